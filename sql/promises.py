"""Check the rows of views against their contracts: unique grains, columns that are never null, identities.

This module runs a contract's predicates in DuckDB; it does not know what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schema.tables import TABLES
from sql.catalog import Views
from sql.contracts import contract, contracts
from sql.quoting import quoted


@dataclass(frozen=True)
class Breach:
    """A promise of a view's contract that some rows of the view break."""

    view: str
    promise: str
    rows: int
    example: dict[str, Any]  # the grain of one of them


def computed_views() -> tuple[str, ...]:
    """Return the views that compute rows, sorted, without costly views and views of a stored table's rows."""
    computed = {name: promised for name, promised in contracts().items() if name not in TABLES or promised.identities}
    return tuple(name for name, promised in computed.items() if not promised.costly)


def promises(view: str) -> int:
    """Return the number of promises in a view's contract."""
    promised = contract(view)
    return 1 + len(promised.not_null) + len(promised.identities)


def breaches(views: Views, view: str) -> list[Breach]:
    """Return the promises of its contract that a view breaks.

    An identity may read other views, even once for every row. Open ``views`` with these views ``kept``.
    """
    promised = contract(view)
    grain = ", ".join(quoted(name) for name in promised.grain)
    broken = {f"{name} is never null": f"{quoted(name)} is null" for name in promised.not_null}
    broken |= {name: f"({predicate}) is not true" for name, predicate in promised.identities.items()}
    repeated = f"{grain} from {promised.relation} group by {grain} having count(*) > 1"
    found = {f"one row for each {', '.join(promised.grain)}": repeated}
    for promise in _broken_by_some(views, view, broken):
        found[promise] = f"{grain} from {promised.relation} as view where {broken[promise]}"
    rows = {promise: views.table(f"select {query}") for promise, query in found.items()}
    return [
        Breach(view, promise, table.num_rows, table.slice(0, 1).to_pylist()[0])
        for promise, table in rows.items()
        if table.num_rows
    ]


def _broken_by_some(views: Views, view: str, conditions: Mapping[str, str]) -> list[str]:
    """Return the names of the conditions that hold in at least one row of a view, found in one pass."""
    names = [f"broken_{number}" for number in range(len(conditions))]
    judged = ", ".join(f"{condition} as {name}" for name, condition in zip(names, conditions.values(), strict=True))
    counts = ", ".join(f"count_if({name}) as {name}" for name in names)
    query = f"select {counts} from (select {judged} from {contract(view).relation} as view)"  # noqa: S608 - of the contract's own
    (row,) = views.table(query).to_pylist()
    return [promise for promise, name in zip(conditions, names, strict=True) if row[name]]
