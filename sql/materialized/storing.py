"""Compute the moments of documents once and store them, so that no estimate and no view reads the steps again.

The stored rows equal the rows of the views to the last bit, since the views' own SQL computes them in one thread. The
views use a stored row unless its document got trajectories since (``sql.stored_moments``). So storing may lag behind,
and no number changes. The cost of a call grows with the steps of the documents that wait for their moments.

Documents are computed in batches (``sql.materialized.batches``), several batches at a time.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schema.tables import DOCUMENT_MOMENTS
from sql.materialized.batches import BatchViews, in_batches
from sql.stored_moments import moments_number, stored_moments, waiting_documents

if TYPE_CHECKING:
    from collections.abc import Mapping

    from log.store import Store

LEAST_STEPS: Final = 1 << 15
"""The fewest steps worth storing moments for: fewer steps are computed as quickly as stored moments are found."""

_BATCHES_AT_ONCE: Final = 4  # at most; each holds up to a gigabyte


def materialize_moments(store: Store, least: int = LEAST_STEPS) -> int:
    """Store the moments of all documents that wait for theirs, if these documents have ``least`` steps or more.

    A store with a log of another generator keeps no moments: the windows follow the longest horizon, which may grow.

    If two calls run at the same time, the later call stops and leaves the rest to the other.

    Returns:
        The number of new rows, one for each document and action.

    """
    if store.row_count("steps") < least:
        return 0
    versions = store.versions()
    moments = stored_moments(store, versions)
    if moments.stored and not moments.waits:
        return 0
    underived = store.underived(versions)
    if not np.array_equal(underived["trajectories"], underived["steps"]):  # a derivation is between its two commits
        return 0
    waiting = waiting_documents(store, versions) if moments.waiting is None else moments.waiting
    if (pc.sum(waiting["steps"]).as_py() or 0) < least or _has_foreign_documents(store, versions):
        return 0
    found = in_batches(waiting, moments_number())
    batches = sorted(set(found.column("batch").to_pylist()))
    with ExitStack() as opened:
        at_once = min(_BATCHES_AT_ONCE, os.cpu_count() or 1, len(batches))
        free = SimpleQueue[BatchViews]()
        for _ in range(at_once):
            one = BatchViews.open(store, versions, found)
            opened.enter_context(one.views)
            free.put(one)

        def compute(batch: int) -> pa.Table:
            one = free.get()
            try:
                return one.rows(batch)
            finally:
                free.put(one)

        workers = opened.enter_context(ThreadPoolExecutor(at_once))
        count, version = 0, versions["document_moments"]
        for rows in workers.map(compute, batches):
            numbered = rows.append_column("moments_version", pa.repeat(pa.scalar(version + 1), rows.num_rows))
            new = numbered.select(DOCUMENT_MOMENTS.columns).cast(DOCUMENT_MOMENTS.schema)
            if not store.append_moments(new, version):
                break
            count, version = count + rows.num_rows, version + 1
        return count


def keep_up_moments(store: Store) -> int:
    """Store the moments of all documents that wait for theirs, if the store has stored moments or the steps are many.

    Arguments, results and errors are those of ``materialize_moments``.
    """
    kept = bool(store.paths("document_moments"))
    return materialize_moments(store, 1) if kept else materialize_moments(store)


def _has_foreign_documents(store: Store, versions: Mapping[str, int]) -> bool:
    """Tell whether the store has documents whose study has no row in table ``studies``."""
    documents, studies = (store.read(name, versions[name], ["study", "model"]) for name in ("documents", "studies"))
    keys = ["study", "model"]
    return bool(documents.join(studies, keys, join_type="left anti").num_rows)
