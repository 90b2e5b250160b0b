"""Views that pool replicates refuse a store in which units of one kept set keep or read unlike entries.

``log.units.kept_sets`` says what a kept set is. Stored tables and the views of single replicates stay readable.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from log.units.kept_sets import ALIKE, COMPARED, SAME, unlike_units
from schema.errors import UnlikeUnitsError
from sql.contracts import contract, contracts, stored_tables
from sql.quoting import literal, quoted

if TYPE_CHECKING:
    from collections.abc import Collection

    import duckdb

_POOL_NOTHING: Final = {
    "controls", "plan", "published", "revisions", "superseded", "superseded_analyses", "superseded_documents",
    "superseded_plans", "units", "windows",
}  # fmt: skip


def refuse_unlike_units(connection: duckdb.DuckDBPyConnection, kept: Collection[str] = ()) -> Collection[str]:
    """Look for current units of one kept set that differ; if there are some, make views that pool raise their line.

    The columns of these views stay. It takes one query over ``units``, grouped by kept set.

    Args:
        connection: A connection that has all views.
        kept: The views that the caller is about to compute.

    Returns:
        The views that raise the line from now on; none if all units are alike.

    Raises:
        UnlikeUnitsError: Units differ, and a view that pools is about to be computed.

    """
    if (line := _unlike_units(connection)) is None:
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
    """The views whose rows are of several replicates, or of estimates."""
    single = {name for name, promised in contracts().items() if "replicate" in promised.grain}
    return frozenset(contracts()).difference(stored_tables(), single, _POOL_NOTHING)


def _unlike_units(connection: duckdb.DuckDBPyConnection) -> str | None:
    """The line that names units of one kept set that differ; None if there are none."""
    names, same = ", ".join(map(quoted, COMPARED)), ", ".join(map(quoted, SAME))
    # Hashes of lists compare faster than lists.
    known = [(f"hash({name})", f"filter (where {name} is not null)") for name in map(quoted, ALIKE)]
    differs = " or ".join(f"min({value}) {there} <> max({value}) {there}" for value, there in known)
    first = f"select {same} from main.units group by all having {differs} order by all limit 1"  # noqa: S608 - names of ours
    rows = connection.sql(f"select {names} from main.units semi join ({first}) using ({same}) order by all")  # noqa: S608 - as above
    return next(unlike_units(rows.to_arrow_table().to_pylist()), None)
