"""The sections that split a difference to the baseline into terms: the gap in R, and R (TV) − F by ends of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvdrift.report.figures.canvas import (
    INK,
    QUIET,
    TERM_COLOURS,
    Axes,
    Figure,
    Line2D,
    Patch,
    legend_patch,
    new_figure,
)
from kvdrift.report.figures.strokes import WIDTH, errors, published_handle
from kvdrift.report.printing.estimate_tables import (
    EstimateColumn,
    action_table,
    action_tables,
    columns_of,
    differences_table,
)
from kvdrift.report.printing.numbers import MISSING, decimals_for, fixed, interval, scaled
from kvdrift.report.printing.tables import Cell, PrintedTable, TableRow
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Estimate, ReportedEstimates
from kvdrift.report.sections.findings import sentence, signs
from kvdrift.report.sections.section import Drawing, Section
from kvdrift.schema.study import POOLED
from kvdrift.stats.quantities import QUANTITIES
from kvdrift.stats.registry import DIFFERENCE, Scale

GAP = ("gap", "occurrence_term", "exposure_term", "rate_term", "occurrence_share", "exposure_share", "rate_share")
EOS_SETS = ("before either EOS", "at the first EOS", "one side has ended", "both have ended")
EOS_CONTRAST = ("rollout_tv_gap", "fixed_history_gap", "history_gap", "pre_eos", "eos_related", "eos_share")


@dataclass(frozen=True)
class Terms:
    """What a stacked bar shows: each term's quantity, label, colour and hatch, and the quantity of their total.

    ``share`` is the quantity whose value is printed beside the bar, under the heading ``share_label``.
    """

    total: str
    share: str
    share_label: str
    axis: str
    terms: tuple[tuple[str, str, str, str], ...]


def term_drawings(name: str, words: str, content: PageContent, terms: Terms) -> tuple[Drawing, ...]:
    """Return the figure of all contrasts with the baseline, and, if there are several strata, ``NAME_by_stratum``."""
    pooled = {action: (action, POOLED) for action in content.others}
    drawings = [Drawing(name, words, partial(term_bars, content.estimates, content.baseline, pooled, terms))]
    strata = content.facts.strata
    if len(strata) > 1:
        several = len(content.others) > 1
        bars = {
            f"{stratum} · {action}" if several else stratum: (action, stratum)
            for action in content.others for stratum in strata
        }  # fmt: skip
        draw = partial(term_bars, content.estimates, content.baseline, bars, terms)
        drawings.append(Drawing(f"{name}_by_stratum", f"{words}, in each stratum", draw))
    return tuple(drawings)


def term_bars(estimates: ReportedEstimates, baseline: str, bars: Mapping[str, tuple[str, str]], terms: Terms) -> Figure:
    """Draw differences to the baseline as stacked bars of terms; ``bars`` has (action, stratum) by a bar's label."""
    figure = new_figure(WIDTH, 1.35 + 0.42 * len(bars))
    axes, beside = figure.subplots(1, 2, width_ratios=(3, 1.3))

    def of(quantity: str) -> list[Estimate]:
        return [estimates.get(quantity, action, baseline, stratum=stratum) for action, stratum in bars.values()]

    totals = of(terms.total)
    for place, parts in enumerate(zip(*(of(quantity) for quantity, *_ in terms.terms), strict=True)):
        _stack(axes, parts, place, terms)
        _total(axes, totals[place], place)
    axes.use_sticky_edges = False  # room beyond the longest bar
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(bars)), [f" {label}" for label in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(terms.axis)
    decimals = decimals_for(totals, Scale.POINTS)
    beside.set_axis_off()
    beside.set(xlim=(0, 1), ylim=axes.get_ylim())
    beside.text(0, -0.62, "total, pp", va="bottom", color=QUIET)
    beside.text(1, -0.62, terms.share_label, va="bottom", ha="right", color=QUIET)
    for place, (total, part) in enumerate(zip(totals, of(terms.share), strict=True)):
        clear, share = total.excludes_zero() or not total.has_interval, MISSING
        if clear and part.estimate is not None:
            share = f"{fixed(100 * part.estimate, 1)}%"
        value = f"{scaled(total.estimate, Scale.POINTS, decimals)} {interval(total, Scale.POINTS, decimals)}".rstrip()
        beside.text(0, place, value, va="center")
        beside.text(1, place, share, va="center", ha="right", fontweight="bold")
    handles: list[Patch | Line2D] = [
        legend_patch(label, facecolor=colour, hatch=hatch, edgecolor="white") for _, label, colour, hatch in terms.terms
    ]
    if any(total.published is not None for total in totals):
        handles.append(published_handle("D"))
    figure.legend(handles=handles, loc="outside upper left", ncols=4)
    return figure


def _stack(axes: Axes, parts: Sequence[Estimate], place: int, terms: Terms) -> None:
    right, left = 0.0, 0.0
    for part, (_, _, colour, hatch) in zip(parts, terms.terms, strict=True):
        if part.estimate is None:
            continue
        width = 100 * part.estimate
        start = right if width >= 0 else left
        axes.barh(place, width, left=start, height=0.62, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
        right, left = (right + width, left) if width >= 0 else (right, left + width)


def _total(axes: Axes, total: Estimate, place: int) -> None:
    if total.estimate is not None and total.has_interval:
        axes.errorbar([total.estimate * 100], [place], xerr=errors(total), color=INK, linewidth=1.2, capsize=3.5)
    if total.published is not None:
        axes.plot([100 * total.published], [place], marker="D", markersize=6.5, markerfacecolor="white",
                  markeredgecolor=INK, markeredgewidth=1.1, zorder=4)  # fmt: skip


GAP_TERMS = Terms(
    "gap",
    "exposure_share",
    "exposure share",
    "gap in token mismatch to the baseline (percentage points)",
    (
        ("exposure_term", "exposure: apart longer", TERM_COLOURS[0], ""),
        ("rate_term", "rate: apart more often", TERM_COLOURS[1], "////"),
        ("occurrence_term", "occurrence: first mismatch", TERM_COLOURS[2], ""),
    ),
)


def gap_section(content: PageContent) -> Section | None:
    """Make the section: the gap of each other action, its terms and their shares; None without another action."""
    if not content.others:
        return None
    estimates, baseline = content.estimates, content.baseline
    note = f"Differences to {baseline}."
    made = action_tables("gap", f"Gap to {baseline}", content, columns_of(*GAP), contrasts=True, note=note)
    tables = [_with_shares_of_gaps(table, content) for table in made]
    differences = sorted(
        {row.quantity for row in estimates.all() if row.baseline == baseline and row.stratum == POOLED}
        & {name for name in QUANTITIES if name.endswith(DIFFERENCE)}
    )
    if differences:
        tables.append(differences_table("differences", f"Other differences to {baseline}", content, differences))
    shown = estimates.known("gap")
    words = f"Gap in token mismatch to {baseline}, split into exposure, rate and occurrence"
    drawings = term_drawings("gap_terms", words, content, GAP_TERMS) if shown else ()
    return Section("gap", "What the gap is made of", tuple(tables), drawings, _largest_terms(content), {"shown": shown})


def _largest_terms(content: PageContent) -> str:
    """Return the sentence that names the largest term of each gap that is not 0."""
    groups: dict[str, list[str]] = {name: [] for name in ("exposure", "rate", "occurrence")}
    may_be_zero = []
    for action in content.others:
        terms = {name: content.estimates.get(f"{name}_term", action, content.baseline).estimate for name in groups}
        if not content.estimates.get("gap", action, content.baseline).excludes_zero():
            may_be_zero.append(action)
        elif known := {name: abs(term) for name, term in terms.items() if term is not None}:
            groups[max(known, key=lambda name: known[name])].append(action)
    return sentence("The largest term of the gap is", groups | {"undecided, as the gap may be 0,": may_be_zero})


def _with_shares_of_gaps(table: PrintedTable, content: PageContent) -> PrintedTable:
    """Blank the shares of gaps that may be 0; the CSV file keeps them."""
    first = 1 + GAP.index("occurrence_share")

    def cells(row: TableRow) -> tuple[Cell, ...]:
        gap = content.estimates.get("gap", row.cells[0].text, content.baseline, stratum=row.group or POOLED)
        if gap.excludes_zero() or not gap.has_interval:
            return row.cells
        return (*row.cells[:first], *(Cell(MISSING) for _ in row.cells[first:]))

    return replace(table, rows=tuple(replace(row, cells=cells(row)) for row in table.rows))


EOS_TERMS = Terms(
    "history_gap",
    "eos_share",
    "EOS share",
    "difference in R (TV) − F to the baseline (percentage points)",
    (
        ("pre_eos", "before either EOS", TERM_COLOURS[0], ""),
        ("eos_related", "at or after an EOS", TERM_COLOURS[1], "////"),
    ),
)


def eos_section(content: PageContent) -> Section | None:
    """Make the section: G_0..G_3 of each action, and each contrast's EOS share; None for finite-state systems."""
    if content.facts.finite:
        return None
    shown = content.estimates.known("eos_gap")
    columns = [
        *columns_of("rollout_tv", "fixed_history_tv"),
        *(EstimateColumn("eos_gap", x, f"G{'₀₁₂₃'[x]}", meaning) for x, meaning in enumerate(EOS_SETS)),
    ]
    tables = [action_table("eos_partition", "EOS partition", content.estimates, content.actions, columns)]
    drawings: tuple[Drawing, ...] = ()
    if content.others:
        note = f"Differences to {content.baseline}. The EOS share may be negative."
        title = "EOS partition of the contrast"
        tables += action_tables("eos_contrasts", title, content, columns_of(*EOS_CONTRAST), contrasts=True, note=note)
        words = f"Difference in R − F to {content.baseline}, split into before and after an EOS"
        drawings = term_drawings("eos_terms", words, content, EOS_TERMS) if shown else ()
    shows = signs(content, "eos_related", "The part at or after an EOS", content.baseline)
    return Section("eos", "Around the end of the text", tuple(tables), drawings, shows, {"shown": shown})
