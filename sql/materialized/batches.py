"""Divide the documents that wait for their moments into batches, and compute the views over one batch.

The rows that a batch needs are read once, into tables. Names in these tables are enumerations, so that the views
compare no strings. A step's names follow from its unit, so they are not read for each step. Files hold documents in
order, so that a batch can skip the parts of files that hold other documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from schema.errors import DamagedStoreError
from schema.tables import GROUP_KEY
from sql.catalog import Views, open_views
from sql.quoting import literal
from sql.view_texts import READ_BY_COMPUTED, WAITING, computed_texts, materialized_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from log.store import Store

_STEPS_AT_ONCE: Final = 1 << 23
_KEY: Final = ", ".join(GROUP_KEY)
_OF_BATCH: Final = ("trajectories", "steps")
_OF_STEP: Final = "replicate, t, mismatch, lag, eos_set, delta, f"
_READ: Final = {f"computed.{name}": names for name, names in READ_BY_COMPUTED.items()}


def in_batches(waiting: pa.Table, definition: int) -> pa.Table:
    """Assign waiting documents to batches of about 8 million steps; each batch becomes one commit.

    Args:
        waiting: Rows with the columns of ``sql.stored_moments.StoredMoments.waiting``.
        definition: The number that identifies how moments are computed (``moments_number``).

    Returns:
        The rows with the columns ``batch`` and ``definition``.

    """
    steps = waiting["steps"].to_numpy()
    batch = (np.cumsum(steps) - steps) // _STEPS_AT_ONCE
    numbered = waiting.append_column("batch", pa.array(batch, pa.int64()))
    return numbered.append_column("definition", pa.repeat(pa.scalar(definition, pa.int64()), waiting.num_rows))


@dataclass(frozen=True)
class BatchViews:
    """Views over one batch at a time, in a connection of their own.

    Attributes:
        views: All views, and the table ``stored.batches`` with the rows that ``in_batches`` returned.

    """

    views: Views

    @classmethod
    def open(cls, store: Store, versions: Mapping[str, int], batches: pa.Table) -> BatchViews:
        """Open the views without a batch.

        Raises:
            DamagedStoreError: Some steps have no unit, so that they cannot be found.

        """
        views = open_views(store, versions, materialized=False, without=("events",))
        connection, opened = views.connection, cls(views)
        if connection.execute("from stored.steps where unit is null limit 1").fetchone():
            views.close()
            lost = f"{store.location}: 'steps' has rows that belong to no unit"
            raise DamagedStoreError(f"{lost}: kvdrift verify {store.location} names what is damaged")
        for table in _OF_BATCH:  # what has the rows of all documents gives way to what has those of a batch
            connection.execute(f"alter view stored.{table} rename to every_{table}")
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
        """Return the moments of a batch as new rows of ``document_moments``."""
        self.read(batch)
        return self.views.table("from stored.rows")

    def read(self, batch: int) -> None:
        """Read the rows from which the views of a batch are computed into tables."""
        execute = self.views.connection.execute
        of_batch = f"from stored.batches where batch = {batch}"
        execute(f"create or replace table {WAITING} as select {_KEY} {of_batch}")
        first, last = execute(f"select min(doc), max(doc) {of_batch}").fetchone() or (None, None)
        within = "false" if first is None else f"doc between {literal(first)} and {literal(last)}"
        for table in _OF_BATCH:
            execute(f"create or replace view stored.{table} as from stored.every_{table} where {within}")
        for name, names in _READ.items():
            enumerated = ", ".join(f"cast({column} as computed.{column}) as {column}" for column in names)
            query = f"select * replace ({enumerated}) from ({computed_texts()[name]})"  # noqa: S608 - names of ours
            if name == "computed.steps":
                units = f"select unit, {enumerated} from main.units semi join {WAITING} using ({_KEY})"  # noqa: S608
                own, of_step = _of("own", _KEY), _of("steps", _OF_STEP)
                query = f"select {own}, {of_step} from stored.steps as steps inner join ({units}) as own using (unit)"  # noqa: S608
            execute(f"create or replace table {name} as {query}")


def _of(table: str, columns: str) -> str:
    return ", ".join(f"{table}.{name}" for name in columns.split(", "))
