"""Write and check the catalogue file of a local store: all views of ``kvdrift.sql.catalog``, for any DuckDB client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb

from kvdrift.log.delta.durability import replace_durably
from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError, OperationError, is_forbidden
from kvdrift.schema.location import is_local
from kvdrift.schema.locking import sweep, temporary_folder
from kvdrift.sql.carried_tables import fill_catalog
from kvdrift.sql.catalog import PINNING, be_quiet
from kvdrift.sql.empty_views import create_views
from kvdrift.sql.quoting import literal
from kvdrift.sql.stored_tables import parquet_source

CATALOG_NAME = "catalog.duckdb"

# The oldest format that DuckDB still writes: clients from 1.0 on open the catalogue.
CATALOG_STORAGE = "v1.0.0"

# A single checkpoint, after all views are made: each earlier checkpoint would leave unused space in the file.
_CATALOG_SETTINGS: dict[str, Any] = {"storage_compatibility_version": CATALOG_STORAGE, "wal_autocheckpoint": "1TB"}


def write_catalog(store: Store) -> Path:
    """Write ``catalog.duckdb`` into a local store's folder: all views at the tables' latest versions.

    The file is written in a temporary folder and then renamed, so that clients of the old file are not disturbed.
    DuckDB clients from 1.0 on open the file. It holds small tables and means of documents
    (``kvdrift.sql.carried_tables``), unless these are very many. A copy of the file elsewhere can therefore answer
    queries over pooled views. Other views read Parquet files by absolute path; in a copy these views raise an error,
    since they would read the original store.

    Returns:
        The path of the catalogue.
    """
    if not is_local(store.location):
        raise InputError(f"{store.location}: a catalogue file needs a local store; open_views reads this one")
    path = Path(store.location) / CATALOG_NAME
    sweep(path.parent)
    versions = {table: store.version(table) for table in PINNING}
    files = {table: parquet_source(store, table, version) for table, version in versions.items()}
    try:
        with temporary_folder(path.parent) as folder:  # DuckDB writes more files beside the one that it is told
            aside = folder / CATALOG_NAME
            with duckdb.connect(str(aside), config=_CATALOG_SETTINGS) as connection:
                be_quiet(connection)
                create_views(connection)
                fill_catalog(connection, store, versions, files, _in_place(path))
                connection.execute(f"create table stored.written_for as select {literal(store.id)} as store")
            replace_durably(aside, path)
    except (duckdb.Error, OSError) as error:
        raise OperationError(f"{path}: cannot be written ({' '.join(str(error).split())})") from error
    return path


def _in_place(path: Path) -> str:
    """Return an SQL condition that is true if the catalogue is opened at ``path``, and raises in a copy.

    Clients before DuckDB 2.0 may show a relative path. The condition is then true, since the place is unknown.
    """
    here = str(path.resolve())
    said = f"this catalogue was written for the store {path.parent}; for a copy in FOLDER, run kvdrift derive FOLDER"
    known = f"from duckdb_databases() where path = {literal(here)} or path not like '/%'"
    return f"case when exists ({known}) then true else error({literal(said)}) end"


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
    except OSError as error:  # what else is wrong shows when the catalogue is written
        return not is_forbidden(error)
