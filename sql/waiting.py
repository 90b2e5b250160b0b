"""Documents whose moments are computed from steps when a view asks for them, since their units have none that serve.

Units of a store that an older version derived have no moments. Units that were derived before their study was declared
have moments of other windows. A derivation makes the former.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from log.units.numbers import numbers_of
from log.units.unit import SPAN
from schema.tables import GROUP_KEY
from schema.windows import Windows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import duckdb

    from log.store import Store
    from schema.rows import Wide

_KEY: Final = ", ".join(GROUP_KEY)
_MADE_WITH: Final = ("study", "model", *(field.name for field in fields(Windows)))


def waiting_documents(store: Store, versions: Mapping[str, int]) -> pa.Table:
    """Find the documents and actions whose moments are computed.

    Args:
        store: The store.
        versions: Delta version by table name.

    Returns:
        The distinct values of ``GROUP_KEY``, one row each.

    Raises:
        InputError: A file is damaged.

    """
    lacking = store.underived(versions)
    without = np.setdiff1d(lacking["unit_moments"], lacking["trajectories"])
    numbers = np.union1d(without, _with_other_windows(store, versions))
    if not len(numbers):
        return pa.table({name: pa.array([], pa.string()) for name in GROUP_KEY})
    units = store.read("units", versions["units"], (*SPAN, "unit"))
    return units.filter(np.isin(numbers_of(units), numbers)).group_by(GROUP_KEY).aggregate([])


def _with_other_windows(store: Store, versions: Mapping[str, int]) -> Wide:
    """Return the units whose moments were made with other windows than those that their study declares."""
    declared = {
        (row["study"], row["model"]): row for row in store.read("studies", versions["studies"], _MADE_WITH).to_pylist()
    }
    found = [np.empty(0, dtype=np.int64)]
    for made_with in store.of_files("unit_moments", (*_MADE_WITH, "unit"), _by_windows, versions["unit_moments"]):
        for row, numbers in made_with:
            if declared.get((row["study"], row["model"]), row) != row:
                found.append(numbers)
    return np.concatenate(found)


def _by_windows(moments: pa.Table) -> list[tuple[Mapping[str, object], Wide]]:
    """Return the windows that rows were made with, study and model included, each with its units."""
    made_with = moments.group_by(_MADE_WITH).aggregate([("unit", "list")])
    numbers = [np.array(units, dtype=np.int64) for units in made_with["unit_list"].to_pylist()]
    return list(zip(made_with.select(_MADE_WITH).to_pylist(), numbers, strict=True))


def with_computed(
    connection: duckdb.DuckDBPyConnection, waiting: pa.Table, sources: Mapping[str, Sequence[str]]
) -> Mapping[str, Sequence[str]]:
    """Return sources of ``unit_moments`` that have computed rows of the waiting documents, in place of stored rows."""
    if not waiting.num_rows:
        return sources
    connection.register("waiting_rows", waiting)
    connection.execute(f"insert into stored.waiting select {_KEY} from waiting_rows")  # noqa: S608 - names of ours
    connection.unregister("waiting_rows")
    kept = {f"(from {source} anti join stored.waiting using ({_KEY}))": lacks for source, lacks in sources.items()}
    return kept | {"internal.computed_moments": ()}
