"""Moments of documents, computed once and stored, so that no estimate and no view reads their steps again.

What is stored is what the views compute, by their own SQL and in one thread: equal to the last bit. The views take it
for documents that got no trajectories since (``sql.stored_moments``), so rows may be late and no number changes. The
cost of a call grows with the steps of documents that wait for their moments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from schema.location import is_local
from schema.tables import DOCUMENT_MOMENTS
from sql.catalog import open_views
from sql.quoting import quoted
from sql.stored_moments import stored_moments
from sql.view_texts import WAITING, computed_texts, materialized_text, moments_definition

if TYPE_CHECKING:
    import duckdb

    from schema.store.store import Store

LEAST_STEPS: Final = 1 << 21
"""Fewer steps than these are computed as quickly as they are looked for."""


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
        return 0
    columns = ", ".join(quoted(name) for name in DOCUMENT_MOMENTS.columns)
    with open_views(store, versions, materialized=False) as views:
        steps, batches = _find_batches(views.connection, moments.waiting or _EVERYTHING)
        if steps < least or views.table("from documents anti join studies using (study, model) limit 1").num_rows:
            return 0
        count, version = 0, versions["document_moments"]
        for batch in batches:
            views.connection.execute(f"create or replace table {WAITING} as from stored.batches where batch = {batch}")
            query = f"select {columns} from (select {version + 1} as moments_version, * from stored.rows)"  # noqa: S608
            rows = views.table(query).cast(DOCUMENT_MOMENTS.schema)
            covered = versions if batch == batches[-1] else None
            if not store.append_moments(rows, version, moments_definition(), covered):
                break
            count, version = count + rows.num_rows, version + 1
        return count


_EVERYTHING = "select distinct study, model, doc, action from main.trajectories"


def _find_batches(connection: duckdb.DuckDBPyConnection, waiting: str) -> tuple[int, list[int]]:
    """Make ``stored.batches`` and ``stored.rows``; return the number of steps and the numbers of the batches."""
    connection.execute(f"insert into {WAITING} {waiting}")
    for name, text in computed_texts().items():
        connection.execute(f"create view {name} as {text}")
    connection.execute(f"create table stored.batches as {materialized_text('batches')}")
    connection.execute(f"create view stored.rows as {materialized_text('rows')}")
    found = connection.execute("select batch, sum(steps) from stored.batches group by batch order by batch").fetchall()
    return sum(int(steps) for _, steps in found), [int(batch) for batch, _ in found]
