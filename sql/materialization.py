"""Moments of documents, computed once and stored, so that no estimate and no view reads their steps again.

What is stored is what the views compute, by their own SQL and in one thread: equal to the last bit. The views take it
for documents that got no trajectories since (``sql.stored_moments``), so rows may be late and no number changes. The
cost of a call grows with the steps of documents that wait for their moments.

Documents are computed in batches, some of them side by side. What a batch reads is read once, into tables that keep
its order and have names as enumerations: what the views do with each step then compares no strings.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from schema.location import is_local
from schema.tables import DOCUMENT_MOMENTS, GROUP_KEY
from sql.catalog import Views, open_views
from sql.stored_moments import stored_moments
from sql.view_texts import READ_BY_COMPUTED, WAITING, computed_texts, materialized_text, moments_definition

if TYPE_CHECKING:
    from collections.abc import Mapping

    from schema.store.store import Store

LEAST_STEPS: Final = 1 << 21
"""Fewer steps than these are computed as quickly as they are looked for."""

_BATCHES_AT_ONCE: Final = 4  # at most; each holds up to a gigabyte


def materialize_moments(store: Store, least: int = LEAST_STEPS) -> int:
    """Store the moments of the documents that wait for theirs, if these have ``least`` steps or more.

    A store behind a URL keeps none, nor does one with a log of another generator: its windows follow the longest
    horizon, which may still grow.

    Of two calls at once, the one that comes late stops and leaves the rest to the other.

    Returns:
        The number of new rows, one to a document and action.

    Raises:
        InputError: The store is damaged or cannot be written.
        OperationError: A stored file cannot be read.

    """
    if not is_local(store.location) or store.row_count("steps") < least:
        return 0
    versions = store.versions()
    moments = stored_moments(store, versions)
    if moments.stored and moments.waiting is None:
        if not store.moments_cover(versions):  # files were compacted since; nobody need look at what they were
            none = DOCUMENT_MOMENTS.schema.empty_table()
            store.append_moments(none, versions["document_moments"], moments_definition(), versions)
        return 0
    waiting = moments.waiting or _EVERYTHING
    with ExitStack() as opened:
        first = opened.enter_context(_open_batches(store, versions, waiting))
        sizes = first.connection.execute(_SIZES).fetchall()
        foreign = "from documents anti join studies using (study, model) limit 1"
        if sum(int(steps) for _, steps in sizes) < least or first.table(foreign).num_rows:
            return 0
        at_once = min(_BATCHES_AT_ONCE, os.cpu_count() or 1, len(sizes))
        free = SimpleQueue[Views]()
        free.put(first)
        for _ in range(at_once - 1):
            free.put(opened.enter_context(_open_batches(store, versions, waiting)))

        def compute(batch: int) -> pa.Table:
            views = free.get()
            try:
                return _rows_of_batch(views, batch)
            finally:
                free.put(views)

        batches = [int(batch) for batch, _ in sizes]
        workers = opened.enter_context(ThreadPoolExecutor(at_once))
        count, version = 0, versions["document_moments"]
        for batch, rows in zip(batches, workers.map(compute, batches), strict=True):
            numbered = rows.append_column("moments_version", pa.repeat(pa.scalar(version + 1), rows.num_rows))
            new = numbered.select(DOCUMENT_MOMENTS.columns).cast(DOCUMENT_MOMENTS.schema)
            covered = versions if batch == batches[-1] else None
            if not store.append_moments(new, version, moments_definition(), covered):
                break
            count, version = count + rows.num_rows, version + 1
        return count


_READ = {f"computed.{name}": names for name, names in READ_BY_COMPUTED.items()}


def keep_up_moments(store: Store) -> int:
    """Store the moments of all documents that wait for theirs, if the store keeps any or they are many.

    Arguments, results and errors are those of ``materialize_moments``.
    """
    kept = is_local(store.location) and stored_moments(store, store.versions()).stored
    return materialize_moments(store, 1) if kept else materialize_moments(store)


_EVERYTHING = "select distinct study, model, doc, action from main.trajectories"
_SIZES = "select batch, sum(steps) from stored.batches group by batch order by batch"


def _open_batches(store: Store, versions: Mapping[str, int], waiting: str) -> Views:
    """Open views with ``stored.batches``, the waiting documents in batches, and ``stored.rows``, those of one batch."""
    views = open_views(store, versions, materialized=False)
    execute = views.connection.execute
    execute(f"insert into {WAITING} {waiting}")
    execute(f"create table stored.batches as {materialized_text('batches')}")
    for name in GROUP_KEY:
        found = f"select distinct {name} from stored.batches order by {name}"  # noqa: S608 - a name of ours
        execute(f"create type computed.{name} as enum ({found})")
    _read_batch(views, -1)
    for name, text in computed_texts().items():
        if name not in _READ:
            execute(f"create view {name} as {text}")
    execute(f"create view stored.rows as {materialized_text('rows')}")
    return views


def _rows_of_batch(views: Views, batch: int) -> pa.Table:
    _read_batch(views, batch)
    return views.table("from stored.rows")


def _read_batch(views: Views, batch: int) -> None:
    """Put what the views of a batch are computed from into tables."""
    views.connection.execute(f"create or replace table {WAITING} as from stored.batches where batch = {batch}")
    for name, names in _READ.items():
        enumerated = ", ".join(f"cast({column} as computed.{column}) as {column}" for column in names)
        query = f"select * replace ({enumerated}) from ({computed_texts()[name]})"  # noqa: S608 - names of ours
        views.connection.execute(f"create or replace table {name} as {query}")
