"""Make views that pool replicates raise an error if the store has units that must not be pooled.

Units of one document, action, revision and estimator (a kept set) must keep and read the same prompt entries. Units of
one study and model name must have the same horizon, seed, weights and tokenizer (``kvdrift.log.units.conditions`` lists
all conditions). Stored tables and views of single replicates stay readable.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.log.store import Store
from kvdrift.log.units import conditions
from kvdrift.log.units.conditions import KEPT_COLUMNS, KEPT_HASHES, SAME, unlike_units
from kvdrift.log.units.revisions import current_units
from kvdrift.schema.errors import UnlikeUnitsError
from kvdrift.schema.rows import Flags, Hashes, Wide, row_hashes
from kvdrift.schema.tables import UNITS
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
    """Return a message about current units that must not be pooled (``refuse_unlike_units``); None without any."""
    facts = _unit_facts(store, versions["units"])
    studies = store.read("studies", versions["studies"], conditions.DECLARED).to_pylist()
    if any(conditions.unlike_conditions(facts.conditions, studies)):
        current = conditions.current_facts(facts.conditions, store.read("actions", versions["actions"]))
        if line := next(conditions.unlike_conditions(current, studies), None):
            return line
    if not len(numbers := facts.kept.unlike()):
        return None
    units = store.unit_rows(numbers, [*KEPT_COLUMNS], versions["units"])
    current = current_units(units, store.read("actions", versions["actions"]))
    return next(unlike_units(current.to_pylist()), None)


@dataclass(frozen=True)
class _KeptFacts:
    """Hashes of the prompt entries that units keep and read.

    ``number`` and ``kept_set`` are arrays [units]: a unit's number, and a hash of its values in the columns ``SAME``,
    which is equal for units that must keep and read the same entries. ``kept`` and ``is_known`` are [2, units], with a
    row for each column of ``KEPT_HASHES``: a hash of the unit's value, and whether the value is not null.
    """

    number: Wide
    kept_set: Hashes
    kept: Hashes
    is_known: Flags

    @classmethod
    def of(cls, units: pa.Table) -> _KeptFacts:
        """Return the facts of rows of table ``units``."""
        return cls(
            units["unit"].to_numpy(),
            row_hashes(units[name] for name in SAME),
            np.stack([row_hashes([units[name]]) for name in KEPT_HASHES]),
            np.stack([pc.is_valid(units[name]).to_numpy() for name in KEPT_HASHES]),
        )

    @classmethod
    def all(cls, parts: Sequence[_KeptFacts]) -> _KeptFacts:
        """Put the units of several files together."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts], axis=-1) for name in names))

    def unlike(self) -> Wide:
        """Return the numbers of the units of every ``kept_set`` whose units do not all keep and read the same entries.

        Superseded units count too.
        """
        marked = np.zeros(len(self.number), dtype=np.bool_)
        order = np.argsort(self.kept_set)
        for kept, known in zip(self.kept, self.is_known, strict=True):
            members = order[known[order]]
            sets, kept_there = self.kept_set[members], kept[members]
            # Neighbours in a set are compared: if any members differ, some neighbours do.
            differ = (sets[1:] == sets[:-1]) & (kept_there[1:] != kept_there[:-1])
            if differ.any():
                marked |= np.isin(self.kept_set, sets[1:][differ])
        return self.number[marked]


class _UnitFacts(NamedTuple):
    """The prompt entries that units keep and read, and the values that all units of a study must share."""

    kept: _KeptFacts
    conditions: conditions.Facts

    @classmethod
    def of(cls, units: pa.Table) -> _UnitFacts:
        """Return the facts of rows of table ``units``."""
        return cls(_KeptFacts.of(units), conditions.facts_of(units))


def _unit_facts(store: Store, version: int) -> _UnitFacts:
    """Return the facts of all units at a version of ``units``; only files new since the last call are read."""
    names = [*dict.fromkeys(("unit", *SAME, *KEPT_HASHES, *conditions.COMPARED))]
    parts = store.of_files("units", names, _UnitFacts.of, version)
    parts = parts or [_UnitFacts.of(UNITS.schema.empty_table().select(names))]
    return _UnitFacts(_KeptFacts.all([part.kept for part in parts]), frozenset().union(*(p.conditions for p in parts)))
