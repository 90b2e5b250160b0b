"""Copy small stored tables and document means into ``catalog.duckdb``, so that a copy of the file can answer queries.

A catalogue without rows takes 1.8 MB. Each document and action adds about 0.7 KB (moments, bytes, answers, a unit). A
vocabulary of 128,000 tokens adds 3 MB. The size is bounded, so that writing a catalogue costs the same for any store.
Views read the store's files for every table larger than ``LARGEST``; for documents, their units and their means,
if the store has more than ``MOST_DOCUMENTS``; and always for trajectories, steps and events.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import duckdb

from kvdrift.log.store import Store
from kvdrift.sql.contracts import comments, contract
from kvdrift.sql.quoting import quoted
from kvdrift.sql.stored_tables import create_stored_view, fill_stored_table, guard_stored_view
from kvdrift.sql.unlike_units import refuse_unlike_units
from kvdrift.sql.view_texts import view_texts

CARRIED: Final = (
    "documents", "actions", "units", "plans", "looks", "results", "calibration", "studies", "identities",
    "exact_values", "tokens",
)  # fmt: skip
"""The stored tables that a catalogue holds, if a table's files are no larger than ``LARGEST``."""

LARGEST: Final = 1 << 22
"""The most bytes of the files of a carried table."""

MOST_DOCUMENTS: Final = 10_000
"""The most documents of a store whose catalogue holds documents, with their units and means."""

_OF_DOCUMENTS: Final = frozenset({"documents", "units"})  # tables that grow with each document

CARRIED_VIEWS: Final = ("windows", "document_bytes", "document_answers", "moments")
"""The views whose rows a catalogue holds; views that pool documents are computed from these."""


def fill_catalog(
    connection: duckdb.DuckDBPyConnection,
    store: Store,
    versions: Mapping[str, int],
    files: Mapping[str, str | None],
    condition: str,
) -> None:
    """Fill a catalogue: copy the rows of small tables, and make views of the files of large tables.

    Args:
        connection: A connection to a catalogue with all views over empty tables.
        store: The store.
        versions: Delta version by table name.
        files: The source of each table, as ``create_stored_view`` takes it.
        condition: The SQL condition that a view of files checks when a client reads it; it raises if it does not hold.
    """
    few_documents = store.row_count("documents") <= MOST_DOCUMENTS
    carried = {name for name in CARRIED if _size(store, name, versions[name]) <= LARGEST}
    carried -= frozenset() if few_documents else _OF_DOCUMENTS
    for table, source in files.items():
        if table in carried:
            fill_stored_table(connection, table, source)
        else:
            create_stored_view(connection, table, source)
    refused = refuse_unlike_units(connection, store, versions)
    if few_documents:
        connection.execute("set threads = 1")  # the same bits in every run
        kept = [view for view in CARRIED_VIEWS if view not in refused]
        keep_views(connection, kept)
        for view in kept:
            connection.execute(comments(contract(view), "table"))
    for table, source in files.items():
        if table not in carried:
            guard_stored_view(connection, table, source, condition)


def keep_views(connection: duckdb.DuckDBPyConnection, views: Collection[str]) -> None:
    """Compute views, and replace each view by a table of its rows. The tables have no comments.

    The rows are sorted by the view's grain, so that sums over documents have the same last bit in every run.
    """
    for name in view_texts():
        if name in views:
            promised = contract(name)
            order = ", ".join(map(quoted, promised.grain))
            connection.execute(f"create table {promised.schema}.kept as from {promised.relation} order by {order}")
            connection.execute(f"drop view {promised.relation}")
            connection.execute(f"alter table {promised.schema}.kept rename to {quoted(name)}")


def _size(store: Store, table: str, version: int) -> int:
    return sum(file.size for file in store.stored_files(table, version))
