"""Make views that pool replicates raise an error if the store has units that must not be pooled.

Units of one document, action, revision and estimator (a kept set) must keep and read the same prompt entries. Units of
one study and model name must have the same horizon, seed, weights and tokenizer (``kvdrift.log.units.conditions`` lists
all conditions). Stored tables and views of single replicates stay readable.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Final

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.log.store import Store
from kvdrift.log.units import conditions
from kvdrift.log.units.conditions import KEPT_COLUMNS, KEPT_HASHES, SAME, unlike_units
from kvdrift.log.units.revisions import current_units
from kvdrift.schema.errors import UnlikeUnitsError
from kvdrift.schema.rows import row_hashes
from kvdrift.sql.contracts import contract, contracts, stored_tables
from kvdrift.sql.quoting import literal, quoted

_POOL_NOTHING: Final = {
    "controls", "plan", "published", "revisions", "superseded", "superseded_analyses", "superseded_documents",
    "superseded_plans", "units", "windows",
}  # fmt: skip


def refuse_unlike_units(
    connection: duckdb.DuckDBPyConnection,
    store: Store,
    versions: Mapping[str, int],
    kept: Collection[str] = (),
) -> Collection[str]:
    """Make every view that pools replicates raise an error, if the store has current units that must not be pooled.

    These are units of one document, action, revision and estimator that keep or read different prompt entries, and
    units of one study and model under different conditions, such as the seed. The columns of the views stay the same.
    Returns the names of the views that raise an error; none if all units may be pooled.

    Raises:
        UnlikeUnitsError: There are such units, and a view in ``kept``, which the caller is about to compute, pools
            replicates.
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
        key = (contract(view).schema, view)
        columns = ", ".join(
            f"cast({refusal} as {kind}) as {quoted(name)}" for *where, name, kind in kinds if tuple(where) == key
        )
        relation = contract(view).relation
        connection.execute(f"create or replace view {relation} as select {columns} where {refusal} is null")
    return pooled


@functools.cache
def _pooled_views() -> frozenset[str]:
    """Return the views whose rows pool several replicates, or are estimates."""
    single = {name for name, promised in contracts().items() if "replicate" in promised.grain}
    return frozenset(contracts()).difference(stored_tables(), single, _POOL_NOTHING)


def _unlike_units(store: Store, versions: Mapping[str, int]) -> str | None:
    """Return a message about current units that must not be pooled (``refuse_unlike_units``); None without any.

    Only files of units that are new since the last call are read.
    """
    names = [*dict.fromkeys(("unit", *SAME, *KEPT_HASHES, *conditions.COMPARED))]
    parts = store.of_files("units", names, _facts_of_file, versions["units"])
    facts: conditions.Facts = frozenset().union(*(part_facts for _, part_facts in parts))
    studies = store.read("studies", versions["studies"], conditions.DECLARED).to_pylist()
    if any(conditions.unlike_conditions(facts, studies)):
        current = conditions.current_facts(facts, store.read("actions", versions["actions"]))
        if line := next(conditions.unlike_conditions(current, studies), None):
            return line
    if not parts:
        return None
    hashed = pa.concat_tables([table for table, _ in parts])
    kept = hashed.group_by("kept_set").aggregate([(name, kind) for name in KEPT_HASHES for kind in ("min", "max")])
    differ = (pc.fill_null(pc.not_equal(kept[f"{name}_min"], kept[f"{name}_max"]), False) for name in KEPT_HASHES)  # noqa: FBT003
    unlike = kept["kept_set"].filter(functools.reduce(pc.or_, differ))
    if not len(unlike):
        return None
    numbers = hashed["unit"].filter(pc.is_in(hashed["kept_set"], unlike))
    units = store.unit_rows(numbers.to_numpy(), [*KEPT_COLUMNS], versions["units"])
    current_rows = current_units(units, store.read("actions", versions["actions"]))
    return next(unlike_units(current_rows.to_pylist()), None)


def _facts_of_file(units: pa.Table) -> tuple[pa.Table, conditions.Facts]:
    """Return units' numbers with hashes of what names their kept sets and of what they keep and read, and conditions.

    A hash of what a unit keeps or reads is null if that is unknown.
    """
    columns = {"unit": units["unit"], "kept_set": pa.array(row_hashes(units[name] for name in SAME))}
    for name in KEPT_HASHES:
        columns[name] = pa.array(row_hashes([units[name]]), mask=pc.is_null(units[name]).to_numpy())
    return pa.table(columns), conditions.facts_of(units)
