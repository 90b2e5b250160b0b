"""Tables with one quantity per row: what the plan named, differences to the baseline, and names not known here."""

from __future__ import annotations

from collections.abc import Sequence

from report.printing.blocks import Cell, Column, Row, Table, estimate_cell, label_column, marks, status_note, text_cell
from report.printing.numbers import MISSING, count, decimals_for, level
from report.reading.estimates import Estimate, Estimates
from report.reading.quantities import DIFFERENCE, POOLED, PRIMARY, Unit, known_quantity

_UNCALIBRATED = (
    "rollout_tv_gap", "fixed_history_gap", "flat_extrapolation_gap", "full_minus_fixed_history",
    "full_minus_flat_extrapolation",
)  # fmt: skip


def differences_table(estimates: Estimates, actions: Sequence[str], baseline: str) -> Table | None:
    """Paired differences to the baseline of quantities other than R, one per row; None where there are none."""
    found = {
        row.quantity: None
        for row in estimates.all()
        if row.quantity.endswith(DIFFERENCE) and row.baseline == baseline and row.stratum == POOLED
    }
    return _contrast_rows("differences", f"Other differences to {baseline}", estimates, list(found), actions, baseline)


def uncalibrated_table(estimates: Estimates, actions: Sequence[str], baseline: str) -> Table | None:
    """The gap in R beside its two uncalibrated stand-ins, and what each of them misses; None where there are none."""
    names = [name for name in _UNCALIBRATED if estimates.known(name)]
    if "flat_extrapolation_gap" not in names:
        return None
    return _contrast_rows("uncalibrated", "Uncalibrated predictions", estimates, names, actions, baseline)


def _contrast_rows(
    name: str, title: str, estimates: Estimates, quantities: Sequence[str], actions: Sequence[str], baseline: str
) -> Table | None:
    series = {quantity: [estimates.get(quantity, action, baseline) for action in actions] for quantity in quantities}
    listed = [row for entries in series.values() for row in entries]
    mark = marks(listed)
    rows = []
    for quantity, entries in series.items():
        known = known_quantity(quantity)
        if known is None:
            continue
        decimals = decimals_for(entries, known.unit)
        label = known.label.removeprefix("difference: ")
        cells = (Cell(known.symbol, label, left=True), Cell(known.unit.sign, left=True))
        shown = [estimate_cell(entry, known.unit, decimals, mark[entry.standing]) for entry in entries]
        rows.append(Row((*cells, *shown)))
    if not rows:
        return None
    return Table(
        name=name,
        title=title,
        columns=(label_column("quantity"), label_column("unit"), *(Column(action) for action in actions)),
        rows=tuple(rows),
        note=f"Differences to {baseline}. {status_note(listed)}",
        records=tuple(row.as_row() for row in listed),
    )


def primary_table(estimates: Estimates) -> Table | None:
    """Every estimate that the plan named, in one place; None where there is none."""
    rows = [row for row in estimates.all() if row.standing == PRIMARY]
    return _listing("primary", "Primary endpoints", rows) if rows else None


def other_table(estimates: Estimates) -> Table | None:
    """Scalar estimates with names that no section of the page knows, so that nothing stays unseen."""
    rows = [row for row in estimates.all() if known_quantity(row.quantity) is None and row.x is None]
    return _listing("other", "Other estimates", rows) if rows else None


def _listing(name: str, title: str, rows: list[Estimate]) -> Table:
    lines = []
    for row in rows:
        known = known_quantity(row.quantity)
        unit = known.unit if known else Unit.PERCENT
        where = "" if row.x is None else f" ({row.x})"
        shown = estimate_cell(row, unit, decimals_for([row], unit))
        lines.append(
            Row((
                Cell(f"{row.quantity}{where}", known.label if known else "", left=True),
                text_cell(f"{row.action} − {row.baseline}" if row.baseline else row.action),
                text_cell(row.stratum),
                Cell(f"{shown.text} {unit.sign}" if row.estimate is not None else MISSING, shown.under),
                Cell(level(row.level)),
                Cell(count(row.draws)),
                Cell(count(row.documents)),
                text_cell(row.family or ""),
                text_cell(row.standing),
            ))
        )  # fmt: skip
    columns = (
        label_column("quantity"), label_column("action"), label_column("stratum"), Column("estimate"),
        Column("level"), Column("draws"), Column("documents"), label_column("family"), label_column("status"),
    )  # fmt: skip
    return Table(name, title, columns, tuple(lines), status_note(rows), tuple(row.as_row() for row in rows))
