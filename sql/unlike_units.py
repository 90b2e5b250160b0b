"""Make views that pool replicates raise an error if units of one kept set keep or read unlike entries.

``log.units.kept_sets`` says what a kept set is. Stored tables and views of single replicates stay readable.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from log.units.kept_sets import COMPARED, unlike_units
from log.units.revisions import current_units
from schema.errors import UnlikeUnitsError
from sql.contracts import contract, contracts, stored_tables
from sql.quoting import literal, quoted
from sql.unit_facts import kept_facts

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import duckdb

    from log.readable_store import ReadableStore

_POOL_NOTHING: Final = {
    "controls", "plan", "published", "revisions", "superseded", "superseded_analyses", "superseded_documents",
    "superseded_plans", "units", "windows",
}  # fmt: skip


def refuse_unlike_units(
    connection: duckdb.DuckDBPyConnection,
    store: ReadableStore,
    versions: Mapping[str, int],
    kept: Collection[str] = (),
) -> Collection[str]:
    """If current units of one kept set differ, make every view that pools replicates raise an error line.

    The columns of these views stay the same.

    Args:
        connection: A connection that has all views.
        store: The store.
        versions: Delta version by table name.
        kept: The views that the caller is about to compute.

    Returns:
        The views that raise the line from now on; none if all units are alike.

    Raises:
        UnlikeUnitsError: Units differ, and a view that pools is about to be computed.

    """
    if (line := _unlike_units(store, versions)) is None:
        return ()
    pooled = _pooled_views()
    if not pooled.isdisjoint(kept):
        raise UnlikeUnitsError(line)
    refusal = f"error({literal(line)})"
    kinds = connection.execute(
        "select schema_name, table_name, column_name, data_type from duckdb_columns() "
        "where database_name = current_database() order by column_index"
    ).fetchall()
    for view in pooled:
        own = (contract(view).schema, view)
        columns = ", ".join(
            f"cast({refusal} as {kind}) as {quoted(name)}" for *where, name, kind in kinds if tuple(where) == own
        )
        relation = contract(view).relation
        connection.execute(f"create or replace view {relation} as select {columns} where {refusal} is null")
    return pooled


@functools.cache
def _pooled_views() -> frozenset[str]:
    """Return the views whose rows pool several replicates, or are estimates."""
    single = {name for name, promised in contracts().items() if "replicate" in promised.grain}
    return frozenset(contracts()).difference(stored_tables(), single, _POOL_NOTHING)


def _unlike_units(store: ReadableStore, versions: Mapping[str, int]) -> str | None:
    """Return a line that names current units of one kept set that differ; None if there are none."""
    if not len(numbers := kept_facts(store, versions["units"]).unlike()):
        return None
    units = store.unit_rows(numbers, [*COMPARED], versions["units"])
    current = current_units(units, store.read("actions", versions["actions"]))
    return next(unlike_units(current.to_pylist()), None)
