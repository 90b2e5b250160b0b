"""What the page's sections hold: every figure and every table by name, from what has been read of a study."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from report.parts import figures
from report.parts import tables as made
from report.parts.branching import Branching, cost_table, gain_table, risk_table
from report.parts.branching_figures import gain_figure, systems_figure, windows_figure
from report.parts.branching_systems import Systems, ratios_table, systems_table, validation_table
from report.parts.calibration import calibration_figure, calibration_table
from report.parts.depth import Depths, depth_figure, depth_table, ordering_table
from report.parts.listings import differences_table, other_table, primary_table, uncalibrated_table
from report.parts.plan_rows import cost_curve, cost_curve_table, cost_figure, plan_endpoints
from report.parts.study_tables import actions_table, documents_table
from report.parts.term_bars import EOS, GAP, Bar, term_bars
from report.printing.blocks import Table
from report.printing.canvas import action_styles
from report.reading.estimates import Estimates
from report.reading.facts import Facts
from report.reading.published import PublishedStudy
from report.reading.source import Row

Drawing = tuple[str, Callable[[], Figure]]


@dataclass(frozen=True)
class Material:
    """All that was read of a study. ``actions`` has the baseline first."""

    facts: Facts
    estimates: Estimates
    actions: list[str]
    support: list[Row]
    depths: Depths
    calibration: list[Row]
    published: PublishedStudy
    branching: Branching
    systems: Systems

    @property
    def baseline(self) -> str:
        """The action that contrasts subtract."""
        return self.actions[0]

    @property
    def others(self) -> list[str]:
        """The other actions."""
        return self.actions[1:]

    @property
    def plan(self) -> Any:
        """The frozen plan's content; None without a plan."""
        return self.facts.plan.content if self.facts.plan else None


def sections(material: Material) -> dict[str, bool]:
    """Which sections have something to show; finite-state systems have no text to end, and few have lags to compare."""
    known, finite = material.estimates.known, material.facts.finite
    lags = material.facts.windows.early_last >= 1 or not finite
    return {
        "entry": known("entry_cdf"),
        "gap": known("gap"),
        "clocks": lags and known("generation_delta", "branch_delta", "late_minus_early"),
        "eos": known("eos_gap") and not finite,
        "saturation": known("saturation", "long_agreement") and not finite,
        "depth": bool(material.depths.intervals),
        "calibration": bool(material.calibration),
        "branching": bool(material.branching.actions),
        "systems": bool(material.systems.own),
    }


def drawings(material: Material) -> dict[str, Drawing]:
    """Every figure by name: what it shows in words, and how to draw it."""
    facts, estimates, baseline = material.facts, material.estimates, material.baseline
    styles = action_styles(material.actions)
    shown = sections(material)
    found: dict[str, Drawing] = {}
    if shown["entry"]:
        found["entry_cdf"] = (
            "Share of continuations that have diverged by each position, one curve per action",
            lambda: figures.entry_cdf(estimates, styles, facts.windows),
        )
    if shown["clocks"]:
        found["two_clocks"] = (
            "Total variation by generation position and by lag after divergence, with block gaps and late minus early",
            lambda: figures.two_clocks(estimates, styles, baseline, facts.windows),
        )
    if shown["clocks"] and len(facts.strata) > 1:
        found["clocks_by_stratum"] = (
            "Change of the gap over generation blocks and late minus early on the branch, in each stratum",
            lambda: figures.clocks_by_stratum(estimates, styles, baseline, facts.strata),
        )
    found |= _term_drawings(material)
    if shown["depth"]:
        found["depth"] = (
            "Identified interval of R and of its contrasts by depth of the branch window",
            lambda: depth_figure(material.depths, styles, baseline, facts.windows),
        )
    if shown["calibration"]:
        found["calibration"] = (
            "Error of each predictor of the gap with its interval against the margin",
            lambda: calibration_figure(material.calibration, facts.windows, material.published),
        )
    if len(cost_curve(material.plan)) > 1:
        found["cost_curve"] = (
            "Widest half-width and expected time by number of replicates",
            lambda: cost_figure(material.plan),
        )
    return found | _branching_drawings(material)


def _branching_drawings(material: Material) -> dict[str, Drawing]:
    estimates, branching, facts = material.estimates, material.branching, material.facts
    styles = {
        action: style for action, style in action_styles(material.actions).items() if action in branching.risks
    }  # fmt: skip
    found: dict[str, Drawing] = {}
    if len(styles) * len(facts.strata) > 1 and estimates.known("efficiency"):
        found["swrb_efficiency"] = (
            "Efficiency of residual branching by the share of pairs that diverge, by evaluations and by time",
            lambda: gain_figure(estimates, styles, facts.strata),
        )
    if branching.windows and facts.windows.horizon > 1:
        found["swrb_windows"] = (
            "Interval of R by depth of the branch window, from residual branching and from coupled pairs",
            lambda: windows_figure(branching, material.depths, styles, facts.windows),
        )
    if material.systems.own:
        found["swrb_systems"] = (
            "Estimates against exact risks, and sorted variance ratios, of systems known by enumeration",
            lambda: systems_figure(material.systems),
        )
    return found


def _term_drawings(material: Material) -> dict[str, Drawing]:
    shown, baseline = sections(material), material.baseline
    pooled = [Bar(action, action, baseline) for action in material.others]
    found: dict[str, Drawing] = {}
    for name, section, terms, words in (
        ("gap_terms", "gap", GAP, f"Gap in token mismatch to {baseline}, split into exposure, rate and occurrence"),
        ("eos_terms", "eos", EOS, f"Difference in R − F to {baseline}, split into before and after an EOS"),
    ):
        if shown[section] and material.others:
            found[name] = (words, partial(term_bars, material.estimates, pooled, terms))
            if len(material.facts.strata) > 1:
                draw = partial(term_bars, material.estimates, _bars_by_stratum(material), terms)
                found[f"{name}_by_stratum"] = (f"{words}, in each stratum", draw)
    return found


def tables(material: Material) -> dict[str, Table]:
    """Every table by name."""
    found: list[Table | None] = [
        documents_table(material.facts),
        actions_table(material.facts, material.actions),
        *_action_tables(material),
        primary_table(material.estimates),
        other_table(material.estimates),
        plan_endpoints(material.plan),
        cost_curve_table(material.plan),
    ]
    if material.others:
        found += _contrast_tables(material)
    found += _branching_tables(material)
    return {table.name: table for table in found if table is not None}


def _action_tables(material: Material) -> list[Table | None]:
    estimates, actions, windows, strata = (
        material.estimates, material.actions, material.facts.windows, material.facts.strata,
    )  # fmt: skip
    support, printed = material.support, material.published.support
    return [
        made.decomposition_table(estimates, actions),
        made.decomposition_table(estimates, actions, strata, name="decomposition_by_stratum"),
        made.entry_table(estimates, actions, windows),
        made.entry_table(estimates, actions, windows, strata, name="entry_by_stratum"),
        made.branch_table(estimates, actions, support, published=printed),
        made.branch_table(estimates, actions, support, strata, name="branch_by_stratum", published=printed),
        made.pre_eos_table(estimates, actions),
        made.pre_eos_table(estimates, actions, strata, name="branch_pre_eos_by_stratum"),
        made.block_table(estimates, actions, windows),
        made.eos_table(estimates, actions),
        made.saturation_table(estimates, actions),
        made.saturation_table(estimates, actions, strata, name="saturation_by_stratum"),
        depth_table(material.depths.intervals, windows) if material.depths.intervals else None,
    ]


def _branching_tables(material: Material) -> list[Table | None]:
    estimates, branching, systems = material.estimates, material.branching, material.systems
    found: list[Table | None] = []
    if branching.actions:
        found += [
            risk_table(branching, estimates),
            gain_table(estimates, branching.actions),
            gain_table(estimates, branching.actions, material.facts.strata, name="swrb_efficiency_by_stratum"),
            cost_table(estimates, branching.actions),
            depth_table(
                branching.windows, material.facts.windows, name="swrb_windows",
                title="Identified interval of R by depth, by residual branching",
            ),
        ]  # fmt: skip
    if systems.own:
        found += [validation_table(systems, estimates), systems_table(systems), ratios_table(systems)]
    return found


def _contrast_tables(material: Material) -> list[Table | None]:
    estimates, others, baseline = material.estimates, material.others, material.baseline
    windows, strata, depths = material.facts.windows, material.facts.strata, material.depths
    return [
        made.gap_table(estimates, others, baseline),
        made.gap_table(estimates, others, baseline, strata, name="gap_by_stratum"),
        differences_table(estimates, others, baseline),
        made.block_gap_table(estimates, others, baseline, windows),
        made.block_gap_table(estimates, others, baseline, windows, strata, name="generation_gaps_by_stratum"),
        made.eos_contrast_table(estimates, others, baseline),
        made.eos_contrast_table(estimates, others, baseline, strata, name="eos_contrasts_by_stratum"),
        uncalibrated_table(estimates, others, baseline),
        ordering_table(depths, baseline, windows) if depths.orderings else None,
        calibration_table(material.calibration, baseline, windows, material.published)
        if material.calibration
        else None,
    ]


def _bars_by_stratum(material: Material) -> list[Bar]:
    several = len(material.others) > 1
    return [
        Bar(f"{stratum} · {action}" if several else stratum, action, material.baseline, stratum)
        for action in material.others
        for stratum in material.facts.strata
    ]
