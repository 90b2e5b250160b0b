"""The tables of estimates, in the page's order: decomposition, gap, clocks, EOS partition, saturation and agreement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from report.printing.blocks import Cell, Column, Table, estimate_table, label_column, quantity_column, text_cell
from report.printing.numbers import MISSING, count
from report.reading.estimates import Estimate, Estimates
from report.reading.quantities import POOLED
from report.reading.source import Row
from schema.windows import Windows

_ACTION = (label_column("action"),)

DECOMPOSITION = (
    "mismatch", "rollout_tv", "fixed_history_tv", "occurrence", "exposure", "mismatch_rate", "divergence_probability",
    "mean_entry",
)  # fmt: skip
GAP = ("gap", "occurrence_term", "exposure_term", "rate_term", "occurrence_share", "exposure_share", "rate_share")
WINDOWS = ("cohort_fraction", "early", "late", "late_minus_early")
PRE_EOS = (
    "early_pre_eos", "late_pre_eos", "late_minus_early_pre_eos", "early_pre_eos_fraction", "late_pre_eos_fraction",
)  # fmt: skip
EOS_CONTRAST = ("rollout_tv_gap", "fixed_history_gap", "history_gap", "pre_eos", "eos_related", "eos_share")
SATURATION = ("saturation", "long_agreement", "mismatch_after_agreement")


def decomposition_table(
    estimates: Estimates, actions: Sequence[str], strata: Sequence[str] = (POOLED,), *, name: str = "decomposition"
) -> Table:
    """R, F, O, E, C, P(τ ≤ H) and mean entry of each action."""
    return _per_action(name, "Decomposition", estimates, actions, DECOMPOSITION, strata)


def gap_table(
    estimates: Estimates,
    actions: Sequence[str],
    baseline: str,
    strata: Sequence[str] = (POOLED,),
    *,
    name: str = "gap",
) -> Table:
    """The gap of each other action, its three terms and their shares."""
    rows = [
        (group, [text_cell(action)], [estimates.get(quantity, action, baseline, stratum=stratum) for quantity in GAP])
        for stratum, group in _groups(strata)
        for action in actions
    ]
    columns = [quantity_column(quantity) for quantity in GAP]
    note = f"Differences to {baseline}."
    return estimate_table(name, f"Gap to {baseline}", _ACTION, columns, rows, note=note)


def entry_table(
    estimates: Estimates,
    actions: Sequence[str],
    windows: Windows,
    strata: Sequence[str] = (POOLED,),
    *,
    name: str = "entry",
) -> Table:
    """The share of continuations that have diverged by the end of block 1, the cohort's bound and H, and mean entry."""
    bounds = list(dict.fromkeys(t for t in (windows.first_block_last, windows.cohort_bound, windows.horizon) if t >= 1))
    columns = [quantity_column("entry_cdf", f"P(τ\u00a0≤\u00a0{count(bound)})") for bound in bounds]
    columns.append(quantity_column("mean_entry"))
    rows = [
        (
            group,
            [text_cell(action)],
            [
                *(estimates.get("entry_cdf", action, stratum=stratum, x=bound) for bound in bounds),
                estimates.get("mean_entry", action, stratum=stratum),
            ],
        )
        for stratum, group in _groups(strata)
        for action in actions
    ]
    return estimate_table(name, "Entry into divergence", _ACTION, columns, rows)


def pre_eos_table(
    estimates: Estimates, actions: Sequence[str], strata: Sequence[str] = (POOLED,), *, name: str = "branch_pre_eos"
) -> Table:
    """The branch clock's windows from steps before either EOS alone, and how many steps of the cohort those are."""
    return _per_action(name, "Branch clock before either EOS", estimates, actions, PRE_EOS, strata)


def branch_table(
    estimates: Estimates,
    actions: Sequence[str],
    support: Sequence[Row],
    strata: Sequence[str] = (POOLED,),
    *,
    name: str = "branch",
    published: Mapping[tuple[str, str], str] | None = None,
) -> Table:
    """Early, late and late − early δ in each action's cohort, with the cohort's support, ours and the paper's."""
    paths = {(row["stratum"], row["action"]): f"{count(row['documents'])} / {count(row['paths'])}" for row in support}
    printed = published or {}
    rows: list[tuple[str, Sequence[Cell], Sequence[Estimate | Cell]]] = []
    for stratum, group in _groups(strata):
        for action in actions:
            entries: list[Estimate | Cell] = [estimates.get(name, action, stratum=stratum) for name in WINDOWS]
            beside = printed.get((stratum, action), "")
            entries.insert(1, Cell(paths.get((stratum, action), MISSING), published=beside and f"published {beside}"))
            rows.append((group, [text_cell(action)], entries))
    columns = [quantity_column(quantity) for quantity in WINDOWS]
    columns.insert(1, Column("documents / paths", "", "support of the cohort"))
    return estimate_table(name, "Branch clock", _ACTION, columns, rows)


def block_table(estimates: Estimates, actions: Sequence[str], windows: Windows) -> Table:
    """Mean δ and f of each action in the blocks of the generation clock."""
    quantities = ("generation_block_delta", "generation_block_f")
    columns = [
        quantity_column(quantity, f"{symbol}, {_span(block)}")
        for quantity, symbol in zip(quantities, ("δ", "f"), strict=True)
        for block in windows.blocks
    ]
    rows = [
        ("", [text_cell(action)], [estimates.get(name, action, x=x) for name in quantities for x in (1, 2, 3)])
        for action in actions
    ]
    return estimate_table("generation_blocks", "Generation clock: blocks of positions", _ACTION, columns, rows)


def block_gap_table(
    estimates: Estimates,
    actions: Sequence[str],
    baseline: str,
    windows: Windows,
    strata: Sequence[str] = (POOLED,),
    *,
    name: str = "generation_gaps",
) -> Table:
    """Gaps in δ to the baseline by block, and how they change."""
    columns = [quantity_column("generation_gap", f"g, {_span(block)}") for block in windows.blocks]
    columns.append(quantity_column("generation_gap_change"))
    rows = []
    for stratum, group in _groups(strata):
        for action in actions:
            gaps = [estimates.get("generation_gap", action, baseline, stratum=stratum, x=x) for x in (1, 2, 3)]
            change = estimates.get("generation_gap_change", action, baseline, stratum=stratum)
            rows.append((group, [text_cell(action)], [*gaps, change]))
    note = f"Differences to {baseline}; Δg is the last block’s gap less the first’s."
    return estimate_table(name, "Generation clock: gaps by block", _ACTION, columns, rows, note=note)


def eos_table(estimates: Estimates, actions: Sequence[str]) -> Table:
    """Where R (TV) − F lies relative to the first EOS of either side and of both."""
    sets = ("before either EOS", "at the first EOS", "one side ended", "both ended")
    columns = [
        quantity_column("rollout_tv"),
        quantity_column("fixed_history_tv"),
        *(Column(f"G{sub}", "pp", meaning) for sub, meaning in zip("₀₁₂₃", sets, strict=True)),
    ]
    rows = []
    for action in actions:
        parts = [estimates.get("eos_gap", action, x=x) for x in range(4)]
        rows.append(
            ("", [text_cell(action)], [*(estimates.get(name, action) for name in ("rollout_tv", "fixed_history_tv")),
                                       *parts])
        )  # fmt: skip
    return estimate_table("eos_partition", "EOS partition", _ACTION, columns, rows)


def eos_contrast_table(
    estimates: Estimates,
    actions: Sequence[str],
    baseline: str,
    strata: Sequence[str] = (POOLED,),
    *,
    name: str = "eos_contrasts",
) -> Table:
    """How much of the difference in R (TV) − F to the baseline is tied to EOS."""
    rows = [
        (
            group,
            [text_cell(action)],
            [estimates.get(quantity, action, baseline, stratum=stratum) for quantity in EOS_CONTRAST],
        )
        for stratum, group in _groups(strata)
        for action in actions
    ]
    columns = [quantity_column(quantity) for quantity in EOS_CONTRAST]
    note = f"Differences to {baseline}. The EOS share may be negative."
    return estimate_table(name, "EOS partition of the contrast", _ACTION, columns, rows, note=note)


def saturation_table(
    estimates: Estimates, actions: Sequence[str], strata: Sequence[str] = (POOLED,), *, name: str = "saturation"
) -> Table:
    """Saturated positions and local agreement within the branch cohort."""
    return _per_action(name, "Saturation and local agreement", estimates, actions, SATURATION, strata)


def _per_action(
    name: str,
    title: str,
    estimates: Estimates,
    actions: Sequence[str],
    quantities: Sequence[str],
    strata: Sequence[str],
) -> Table:
    rows = [
        (group, [text_cell(action)], [estimates.get(quantity, action, stratum=stratum) for quantity in quantities])
        for stratum, group in _groups(strata)
        for action in actions
    ]
    return estimate_table(name, title, _ACTION, [quantity_column(quantity) for quantity in quantities], rows)


def _groups(strata: Sequence[str]) -> list[tuple[str, str]]:
    return [(stratum, "" if stratum == POOLED else stratum) for stratum in strata]


def _span(block: tuple[int, int]) -> str:
    first, last = block
    return f"{first}–{last}" if last >= first else MISSING
