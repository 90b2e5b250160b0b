"""Contracts held against the rows that views have: unique grains, columns that are never null, identities.

Knows how a contract's predicates are asked of DuckDB, and nothing of what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from schema.tables import TABLES
from sql.catalog import Views
from sql.contracts import Contract, contract, contracts
from sql.quoting import quoted


@dataclass(frozen=True)
class Breach:
    """A promise of a view's contract that some of its rows do not keep."""

    view: str
    promise: str
    rows: int
    example: dict[str, Any]  # the grain of one of them


def computed_views() -> tuple[str, ...]:
    """Views that compute something, those over a stored table's rows alone left out; sorted."""
    return tuple(name for name, promised in contracts().items() if name not in TABLES or promised.identities)


def promises(view: str) -> int:
    """How many promises a view's contract makes.

    Raises:
        InputError: there is no such view.

    """
    promised = contract(view)
    return 1 + len(promised.not_null) + len(promised.identities)


def breaches(views: Views, view: str) -> list[Breach]:
    """Find the promises of its contract that a view does not keep.

    Identities may look at other views, some of them for every row: open the views with what they read ``kept``.

    Raises:
        InputError: there is no such view.
        OperationError: a stored file cannot be read.

    """
    promised = contract(view)
    grain = ", ".join(quoted(name) for name in promised.grain)
    repeated = f"{grain} from {quoted(view)} group by {grain} having count(*) > 1"
    found = [_breach(views, promised, f"one row for each {', '.join(promised.grain)}", repeated)]
    broken = {f"{name} is never null": f"{quoted(name)} is null" for name in promised.not_null}
    broken |= {name: f"({predicate}) is not true" for name, predicate in promised.identities.items()}
    for promise, condition in broken.items():
        rows = f"{grain} from {quoted(view)} as view where {condition}"
        found.append(_breach(views, promised, promise, rows))
    return [breach for breach in found if breach is not None]


def _breach(views: Views, promised: Contract, promise: str, rows: str) -> Breach | None:
    broken = views.table(f"select {rows}")
    if not broken.num_rows:
        return None
    return Breach(promised.view, promise, broken.num_rows, broken.slice(0, 1).to_pylist()[0])
