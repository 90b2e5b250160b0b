"""The documents that wait for their moments, in batches, and the views over a batch.

What a batch reads is read once and from its own files, into tables that keep its order and have names as enumerations:
what the views do with each step then compares no strings. A derived file mostly has one document under one action. Then
its names are those of its unit, and are not read for each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from schema.location import join
from schema.tables import GROUP_KEY
from sql.catalog import Views, open_views
from sql.quoting import literal
from sql.stored_tables import parquet_sources, stored_rows
from sql.view_texts import READ_BY_COMPUTED, WAITING, computed_texts, materialized_text

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from log.store import Store

_KEY: Final = ", ".join(GROUP_KEY)
_EVERYTHING: Final = f"select distinct {_KEY} from stored.held"  # noqa: S608 - names of ours
_OF_BATCH: Final = ("trajectories", "steps")
_HELD: Final = f"{_KEY}, action_revision"
_OF_STEP: Final = "replicate, t, mismatch, lag, eos_set, delta, f"
_READ: Final = {f"computed.{name}": names for name, names in READ_BY_COMPUTED.items()}


def has_steps_of_trajectories(store: Store, versions: Mapping[str, int]) -> bool:
    """Tell whether trajectories and steps are of the same files: a derivation commits one table after the other."""
    trajectories, steps = (store.paths(table, versions[table]) for table in ("trajectories", "steps"))
    return trajectories == steps


def find_batches(store: Store, versions: Mapping[str, int], waiting: str | None) -> pa.Table:
    """Put the documents and actions of a query, or all of them, in batches.

    Returns:
        A row for each file that has steps of one: ``study``, ``model``, ``doc``, ``action``, ``path`` relative to the
        tables, ``alone`` (the file has nothing else), ``steps`` and ``batch``.

    """
    paths = store.paths("trajectories", versions["trajectories"])
    units = store.read("units", versions["units"], [*GROUP_KEY, "action_revision", "path", "replicates", "horizon"])
    units = units.filter(pc.is_in(units["path"], pa.array(paths, pa.string())))
    others = set(paths).difference(units["path"].to_pylist())  # compacted, or of a unit whose row is still to come
    with open_views(store, versions, materialized=False, without=("events", "steps")) as views:
        views.connection.register("units_of_files", units)
        steps = "cast(replicates as bigint) * horizon as steps"
        of_units = f"select {_HELD}, path, {steps} from units_of_files"  # noqa: S608 - names of ours
        path = f"substr(filename, {len(join(store.location, 'trajectories', '')) + 1})"
        read = _rows_of(store, "trajectories", versions, others, "filename")
        of_rows = f"select {_HELD}, {path}, sum(horizon) from ({read}) group by all"  # noqa: S608 - as above
        held = f"{of_units} union all {of_rows}" if others else of_units
        views.connection.execute(f"create table stored.held as {held}")
        views.connection.execute(f"insert into {WAITING} {waiting or _EVERYTHING}")
        return views.table(materialized_text("batches"))


@dataclass(frozen=True)
class BatchViews:
    """Views over one batch at a time, in a connection of their own.

    Attributes:
        views: All views, and ``stored.batches``: what ``find_batches`` returned.

    """

    store: Store
    views: Views

    @classmethod
    def open(cls, store: Store, versions: Mapping[str, int], batches: pa.Table) -> BatchViews:
        """Open views over no batch yet."""
        views = open_views(store, versions, materialized=False, without=("events", *_OF_BATCH))
        connection, opened = views.connection, cls(store, views)
        for table in _OF_BATCH:  # an empty table so far
            connection.execute(f"drop table stored.{table}")
        connection.from_arrow(batches).create("stored.batches")
        for name in GROUP_KEY:
            found = f"select distinct {name} from stored.batches order by {name}"  # noqa: S608 - a name of ours
            connection.execute(f"create type computed.{name} as enum ({found})")
        opened.read(-1)
        for name, text in computed_texts().items():
            if name not in _READ:
                connection.execute(f"create view {name} as {text}")
        connection.execute(f"create view stored.rows as {materialized_text('rows')}")
        return opened

    def rows(self, batch: int) -> pa.Table:
        """Compute the moments of a batch: new rows of ``document_moments``."""
        self.read(batch)
        return self.views.table("from stored.rows")

    def read(self, batch: int) -> None:
        """Put what the views of a batch are computed from into tables."""
        execute = self.views.connection.execute
        of_batch = f"from stored.batches where batch = {batch}"
        execute(f"create or replace table {WAITING} as select distinct {_KEY} {of_batch}")
        files = execute(f"select path, bool_and(alone) {of_batch} group by path").fetchall()
        paths = [path for path, _ in files]
        for table in _OF_BATCH:
            execute(
                f"create or replace view stored.{table} as {_rows_of(self.store, table, self.views.versions, paths)}"
            )
        for name, names in _READ.items():
            enumerated = ", ".join(f"cast({column} as computed.{column}) as {column}" for column in names)
            query = f"select * replace ({enumerated}) from ({computed_texts()[name]})"  # noqa: S608 - names of ours
            if name == "computed.steps" and files and all(alone for _, alone in files):
                query = self._steps_by_file(paths, of_batch, enumerated)
            execute(f"create or replace table {name} as {query}")

    def _steps_by_file(self, paths: Sequence[str], of_batch: str, names: str) -> str:
        """The query for the steps of files that have one document under one action each."""
        prefix = literal(join(self.store.location, "steps", ""))
        files = f"select {names}, {prefix} || path as filename {of_batch}"
        rows = _rows_of(self.store, "steps", self.views.versions, paths, "filename")
        steps = f"select {_OF_STEP}, filename from ({rows})"  # noqa: S608 - names of ours
        return f"select {_KEY}, {_OF_STEP} from ({steps}) inner join ({files}) using (filename)"  # noqa: S608 - as above


def _rows_of(store: Store, table: str, versions: Mapping[str, int], paths: Collection[str], *more: str) -> str:
    """The query for the rows of some of a table's files, by their paths."""
    files = {join(store.location, table, path) for path in paths}
    return stored_rows(table, parquet_sources(store, table, versions[table], files), *more)
