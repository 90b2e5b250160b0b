"""Check the rows of views against their contracts: unique grains, columns that are never null, identities.

This module runs a contract's predicates in DuckDB; it does not know what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvdrift.schema.tables import TABLES
from kvdrift.sql.catalog import Views
from kvdrift.sql.contracts import contract, contracts
from kvdrift.sql.quoting import quoted


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
    grain, rows = ", ".join(map(quoted, promised.grain)), f"from {promised.relation} as view"
    broken = {f"{name} is never null": f"{quoted(name)} is null" for name in promised.not_null}
    broken |= {name: f"({predicate}) is not true" for name, predicate in promised.identities.items()}
    found = {f"one row for each {', '.join(promised.grain)}": f"{rows} select {grain} group by all having count(*) > 1"}
    # One query tells whether any promise is broken. To count the rows of each promise would take twice as long.
    if views.table(f"{rows} where {' or '.join(broken.values())} limit 1").num_rows:
        found |= {promise: f"{rows} select {grain} where {condition}" for promise, condition in broken.items()}
    examples = {promise: views.table(query) for promise, query in found.items()}
    return [
        Breach(view, promise, table.num_rows, table.slice(0, 1).to_pylist()[0])
        for promise, table in examples.items()
        if table.num_rows
    ]
