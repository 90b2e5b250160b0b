"""Write and check the catalogue file of a local store: all views of ``kvdrift.sql.catalog``, for any DuckDB client.

The file has copies of small stored tables and of document means, so that a copy of it elsewhere can answer queries. A
catalogue without rows takes 1.8 MB. Each document adds about 0.7 KB for each action (moments, bytes, answers, a unit).
A vocabulary of 128,000 tokens adds 3 MB. The size is bounded, so that writing a catalogue costs the same for any store.
Views read the store's files for every table larger than ``LARGEST``; for documents, their units and their means, if the
store has more than ``MOST_DOCUMENTS``; and always for trajectories, steps and events.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import duckdb

from kvdrift.log.delta.durability import replace_durably
from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError, OperationError, is_forbidden
from kvdrift.schema.location import is_local
from kvdrift.schema.locking import sweep, temporary_folder
from kvdrift.sql.catalog import (
    PINNING,
    be_quiet,
    create_stored_view,
    fill_stored_table,
    guard_stored_view,
    keep_views,
    parquet_source,
)
from kvdrift.sql.contracts import comments, contract
from kvdrift.sql.empty_views import create_views
from kvdrift.sql.quoting import literal
from kvdrift.sql.unlike_units import refuse_unlike_units

CATALOG_NAME = "catalog.duckdb"

# The oldest format that DuckDB still writes: clients from 1.0 on open the catalogue.
CATALOG_STORAGE = "v1.0.0"

# A single checkpoint, after all views are made: each earlier checkpoint would leave unused space in the file.
_CATALOG_SETTINGS: dict[str, Any] = {"storage_compatibility_version": CATALOG_STORAGE, "wal_autocheckpoint": "1TB"}

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


def write_catalog(store: Store) -> Path:
    """Write ``catalog.duckdb``, with all views at the latest versions, into a local store's folder; return its path.

    The file is written in a temporary folder and then renamed, so that clients of the old file are not disturbed.
    DuckDB clients from 1.0 on open the file. It holds small tables, and the means of documents unless the store has
    more than ``MOST_DOCUMENTS`` documents, so that a copy of the file elsewhere can answer queries over pooled views.
    Other views read Parquet files by absolute path; in a copy these views raise an error, since they would read the
    original store.
    """
    if not is_local(store.location):
        raise InputError(f"{store.location}: a catalogue file needs a local store; kvdrift.open reads this one")
    path = Path(store.location) / CATALOG_NAME
    sweep(path.parent)
    versions = {table: store.version(table) for table in PINNING}
    files = {table: parquet_source(store, table, version) for table, version in versions.items()}
    try:
        with temporary_folder(path.parent) as folder:  # DuckDB writes more files beside its database
            aside = folder / CATALOG_NAME
            with duckdb.connect(str(aside), config=_CATALOG_SETTINGS) as connection:
                be_quiet(connection)
                create_views(connection)
                _fill(connection, store, versions, files, _in_place(path))
                connection.execute(f"create table stored.written_for as select {literal(store.id)} as store")
            replace_durably(aside, path)
    except (duckdb.Error, OSError) as error:
        raise OperationError(f"{path}: cannot be written ({' '.join(str(error).split())})") from error
    return path


def _fill(
    connection: duckdb.DuckDBPyConnection,
    store: Store,
    versions: Mapping[str, int],
    files: Mapping[str, str | None],
    condition: str,
) -> None:
    """Fill a catalogue of empty tables: copy the rows of small tables, and make views of the files of large tables.

    A view of files checks ``condition`` when a client reads it. ``files`` has the source of each stored table, as
    ``create_stored_view`` takes it.
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


def _size(store: Store, table: str, version: int) -> int:
    return sum(file.size for file in store.stored_files(table, version))


def _in_place(path: Path) -> str:
    """Return an SQL condition that is true if the catalogue is opened at ``path``, and raises in a copy.

    Clients before DuckDB 2.0 may show a relative path. The condition is then true, since the place is unknown.
    """
    here = str(path.resolve())
    message = f"this catalogue was written for the store {path.parent}; for a copy in FOLDER, run kvdrift derive FOLDER"
    known = f"from duckdb_databases() where path = {literal(here)} or path not like '/%'"
    return f"case when exists ({known}) then true else error({literal(message)}) end"


def catalog_fault(store: Store) -> str | None:
    """Return what is wrong with the catalogue file of a local store; None if the file is sound."""
    path = Path(store.location) / CATALOG_NAME
    try:
        with duckdb.connect(str(path), read_only=True) as connection:
            (written_for,) = connection.execute("from stored.written_for").fetchone() or (None,)
    except (duckdb.Error, OSError) as error:
        return f"it cannot be opened ({' '.join(str(error).split())}), must be a DuckDB database"
    if written_for != store.id:
        return f"it was written for another store (events table {written_for}), must be of this one ({store.id})"
    return None


def refresh_catalog(store: Store) -> None:
    """Write the catalogue of a local store; do nothing for a store behind a URL.

    Raises:
        OperationError: The file cannot be written.
    """
    if is_local(store.location):
        write_catalog(store)


def may_write_catalog(store: Store) -> bool:
    """Tell whether a catalogue can be written into a local store's folder; False if the folder is read-only."""
    try:
        with temporary_folder(Path(store.location)):
            return True
    except OSError as error:  # any other fault shows when the catalogue is written
        return not is_forbidden(error)
