"""Create the schema ``stored``: one view of each stored table's declared columns, over files or another source."""

from __future__ import annotations

import duckdb

from kvdrift.log.store import Store
from kvdrift.schema.tables import TABLES
from kvdrift.sql.quoting import parquet_files, quoted


def create_stored_view(connection: duckdb.DuckDBPyConnection, table: str, source: str | None) -> None:
    """Replace the empty table ``stored.TABLE`` by a view of a source; without a source the empty table stays.

    The source is SQL text that can follow ``from``.
    """
    if source:
        connection.execute(f"drop table stored.{quoted(table)}")
        connection.execute(f"create view stored.{quoted(table)} as {_rows(table, source)}")


def guard_stored_view(connection: duckdb.DuckDBPyConnection, table: str, source: str | None, condition: str) -> None:
    """Add a condition to the view ``stored.TABLE`` that is the same for all rows: it is true, or it raises."""
    if source:
        rows = f"{_rows(table, source)} where {condition}"
        connection.execute(f"create or replace view stored.{quoted(table)} as {rows}")


def fill_stored_table(connection: duckdb.DuckDBPyConnection, table: str, source: str | None) -> None:
    """Insert a table's rows into the empty table ``stored.TABLE``."""
    if source:
        connection.execute(f"insert into stored.{quoted(table)} {_rows(table, source)}")


def _rows(table: str, source: str) -> str:
    """Return the query for a table's declared columns."""
    return f"select {', '.join(map(quoted, TABLES[table].columns))} from {source}"  # noqa: S608 - names of ours


def parquet_source(store: Store, table: str, version: int) -> str | None:
    """Return a local table's files as a source; None without files."""
    files = store.files(table, version)
    return parquet_files(files) if files else None
