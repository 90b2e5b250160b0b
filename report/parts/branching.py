"""Residual branching (SWRB) beside plain coupling: what both say of R, what a replicate costs, and where it pays.

Points are those of the views ``swrb_risk``, ``swrb_efficiency`` and ``swrb_windows``, intervals those of ``estimates``;
what is computed here is one difference over its error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from report.parts.depth import by_action
from report.printing.blocks import (
    Cell,
    Column,
    Table,
    estimate_cell,
    label_column,
    quantity_column,
    status_note,
    text_cell,
)
from report.printing.blocks import Row as Line
from report.printing.numbers import MISSING, count, decimals_for, decimals_of, fixed, significant
from report.reading.estimates import Estimate, Estimates
from report.reading.quantities import POOLED, QUANTITIES, Unit
from report.reading.source import Row, StudyRows

_ACTION = label_column("action")
_GAINS = ("variance_ratio", "evaluation_ratio", "second_ratio", "efficiency", "efficiency_in_seconds")
_COSTS = (
    "plain_variance", "swrb_variance", "plain_evaluations", "swrb_evaluations", "plain_seconds", "swrb_seconds",
)  # fmt: skip

PAYS, LOSES, OPEN = "pays", "does not pay", "undecided"


@dataclass(frozen=True)
class Branching:
    """Pooled rows of the branched actions: both risks of each, and its windows by depth; empty without any."""

    risks: dict[str, Row]
    windows: dict[str, list[Row]]

    @property
    def actions(self) -> list[str]:
        """The branched actions, in the page's order."""
        return list(self.risks)


def read_branching(source: StudyRows, split: str, actions: Sequence[str]) -> Branching:
    """What of ``actions`` was measured by residual branching."""
    where = {"split": split, "stratum": POOLED}
    risks = by_action(source.of("swrb_risk", **where), actions)
    if not risks:
        return Branching({}, {})
    windows = sorted(source.of("swrb_windows", **where), key=lambda row: int(row["depth"]))
    return Branching({action: rows[0] for action, rows in risks.items()}, by_action(windows, actions))


def verdict(efficiency: Estimate) -> str:
    """Whether residual branching pays: the interval of an efficiency lies above 1, below 1, or decides nothing."""
    if efficiency.low is None or efficiency.high is None:
        return OPEN
    return PAYS if efficiency.low > 1 else LOSES if efficiency.high < 1 else OPEN


def pay_sentences(estimates: Estimates, actions: Sequence[str]) -> list[str]:
    """Where residual branching pays and where it does not, by kernel-pair evaluations and by decoding time."""
    by_verdict: dict[str, list[str]] = {PAYS: [], LOSES: [], OPEN: []}
    for action in actions:
        by_verdict[verdict(estimates.get("efficiency", action))].append(action)
    named = {found: _list([_named(estimates, action) for action in own]) for found, own in by_verdict.items()}
    sentences = []
    if by_verdict[PAYS]:
        sentences.append(
            f"Residual branching pays for {named[PAYS]}: for as many kernel-pair evaluations, the Monte Carlo variance "
            "of R is smaller by that factor."
        )
    if by_verdict[LOSES]:
        subject = "It" if sentences else "Residual branching"
        sentences.append(
            f"{subject} does not pay for {named[LOSES]}: coupled pairs make better use of as many evaluations."
        )
    if by_verdict[OPEN]:
        sentences.append(f"Undecided for {named[OPEN]}: no interval of the efficiency leaves out 1.")
    return [*sentences, _in_time(estimates, actions)]


def risk_table(branching: Branching, estimates: Estimates) -> Table:
    """Of each action the risk by both estimators on the same documents, and their difference in Monte Carlo errors."""
    names = ("swrb_divergence_probability", "plain_mismatch", "swrb_mismatch", "swrb_occurrence", "swrb_occupation")
    listed = [[estimates.get(name, action) for name in names] for action in branching.actions]
    lines = [
        Line((
            text_cell(action),
            Cell(count(row["documents"])),
            Cell(count(row["replicates"])),
            *cells,
            *_difference(row),
        ))
        for (action, row), cells in zip(branching.risks.items(), _percent_cells(listed), strict=True)
    ]  # fmt: skip
    columns = (
        _ACTION,
        Column("documents", "", "documents with SWRB replicates"),
        Column("replicates", "", "SWRB replicates on all of them"),
        *(quantity_column(name) for name in names),
        Column("difference", "pp", "R (SWRB) − R (coupled), with its standard error given the documents"),
        Column("in errors", "", "the difference over its standard error: ±2 is chance"),
    )
    note = f"Both columns of R estimate the same number on the same documents. {_note(listed)}"
    records = tuple(branching.risks.values())
    return Table("swrb_risk", "R by coupled pairs and by residual branching", columns, tuple(lines), note, records)


def gain_table(
    estimates: Estimates, actions: Sequence[str], strata: Sequence[str] = (POOLED,), *, name: str = "swrb_efficiency"
) -> Table:
    """Variance and cost of an SWRB replicate against a coupled pair's, efficiency, and whether it pays."""
    columns = [quantity_column(quantity) for quantity in _GAINS]
    columns.append(Column("so it", "", "by evaluations: the efficiency’s interval above 1 pays, below 1 does not"))
    title = "What residual branching gains"
    return _measured(name, title, estimates, actions, strata, _GAINS, columns, decided=True)


def cost_table(estimates: Estimates, actions: Sequence[str]) -> Table:
    """Variance, kernel-pair evaluations and decoding time of one replicate of either estimator."""
    columns = [quantity_column(quantity) for quantity in _COSTS]
    title = "One replicate of each estimator"
    return _measured("swrb_costs", title, estimates, actions, (POOLED,), _COSTS, columns)


def ratio_cell(entry: Estimate) -> Cell:
    """A ratio or a cost to three digits with its interval under it."""
    factor = QUANTITIES[entry.quantity].unit.factor
    if entry.estimate is None:
        return Cell(MISSING)
    return Cell(significant(factor * entry.estimate), _bounds(entry, factor))


def _measured(
    name: str,
    title: str,
    estimates: Estimates,
    actions: Sequence[str],
    strata: Sequence[str],
    quantities: Sequence[str],
    columns: Sequence[Column],
    *,
    decided: bool = False,
) -> Table:
    """Rows of M and ``quantities``, one per action and stratum; ``decided`` adds the verdict."""
    mass = "swrb_divergence_probability"
    places = [(stratum, action) for stratum in strata for action in actions]
    listed = [
        [estimates.get(one, action, stratum=stratum) for one in (mass, *quantities)] for stratum, action in places
    ]
    masses = _percent_cells([entries[:1] for entries in listed])
    lines = []
    for (stratum, action), entries, shown in zip(places, listed, masses, strict=True):
        cells = [text_cell(action), *shown, *(ratio_cell(entry) for entry in entries[1:])]
        if decided:
            cells.append(Cell(verdict(estimates.get("efficiency", action, stratum=stratum))))
        lines.append(Line(tuple(cells), "" if stratum == POOLED else stratum))
    heads = (_ACTION, quantity_column(mass), *columns)
    records = tuple(entry.as_row() for entries in listed for entry in entries)
    return Table(name, title, heads, tuple(lines), _note(listed), records)


def _difference(row: Row) -> tuple[Cell, Cell]:
    if row["plain_mismatch"] is None:
        return Cell(MISSING), Cell(MISSING)
    difference, error = row["mismatch"] - row["plain_mismatch"], row["monte_carlo_error"]
    places = decimals_of([difference], 100.0)
    if not error:  # none known, or none at all
        return Cell(fixed(100 * difference, places)), Cell(MISSING)
    return Cell(fixed(100 * difference, places), f"± {fixed(100 * error, places)}"), Cell(fixed(difference / error, 1))


def _in_time(estimates: Estimates, actions: Sequence[str]) -> str:
    known = [action for action in actions if estimates.get("efficiency_in_seconds", action).estimate is not None]
    if not known:
        return "Decoding times are not recorded: what it does to time is not known."
    parts = []
    for found in (PAYS, LOSES, OPEN):
        own = [action for action in known if verdict(estimates.get("efficiency_in_seconds", action)) == found]
        texts = [f"{action} ({_ratio_text(estimates.get('efficiency_in_seconds', action))})" for action in own]
        if texts:
            parts.append(f"{'is undecided' if found == OPEN else found} for {_list(texts)}")
    return f"Counted in decoding time as measured, it {'; it '.join(parts)}."


def _named(estimates: Estimates, action: str) -> str:
    mass = estimates.get("swrb_divergence_probability", action).estimate
    diverge = "" if mass is None else f"; {fixed(100 * mass, 1)}% of pairs diverge"
    return f"{action} (efficiency {_ratio_text(estimates.get('efficiency', action))}{diverge})"


def _ratio_text(entry: Estimate) -> str:
    return f"{significant(entry.estimate)} {_bounds(entry, 1.0)}".rstrip()


def _bounds(entry: Estimate, factor: float) -> str:
    if entry.low is None or entry.high is None:
        return ""
    return f"[{significant(factor * entry.low)}, {significant(factor * entry.high)}]"


def _percent_cells(rows: Sequence[Sequence[Estimate]]) -> list[list[Cell]]:
    """Percentages with their intervals, every column with one count of decimals."""
    decimals = [decimals_for(column, Unit.PERCENT) for column in zip(*rows, strict=True)]
    return [
        [estimate_cell(entry, Unit.PERCENT, places) for entry, places in zip(row, decimals, strict=True)]
        for row in rows
    ]  # fmt: skip


def _note(rows: Sequence[Sequence[Estimate]]) -> str:
    return status_note([entry for entries in rows for entry in entries])


def _list(parts: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)
