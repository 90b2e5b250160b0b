"""Create the schema ``stored``: one view of each stored table's declared columns, over files or another source."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import duckdb

from kvdrift.log.store import Store
from kvdrift.schema.tables import TABLES
from kvdrift.sql.quoting import literal, parquet_files, quoted


def create_stored_view(connection: duckdb.DuckDBPyConnection, table: str, sources: Mapping[str, Sequence[str]]) -> None:
    """Replace the empty table ``stored.TABLE`` by a view of ``sources``; without sources the empty table stays.

    The sources are as ``stored_rows`` takes them.
    """
    if sources:
        connection.execute(f"drop table stored.{quoted(table)}")
        connection.execute(f"create view stored.{quoted(table)} as {stored_rows(table, sources)}")


def guard_stored_view(
    connection: duckdb.DuckDBPyConnection, table: str, sources: Mapping[str, Sequence[str]], condition: str
) -> None:
    """Add a condition to the view ``stored.TABLE`` that is the same for all rows: it is true, or it raises."""
    if sources:
        rows = f"from ({stored_rows(table, sources)}) where {condition}"
        connection.execute(f"create or replace view stored.{quoted(table)} as {rows}")


def fill_stored_table(connection: duckdb.DuckDBPyConnection, table: str, sources: Mapping[str, Sequence[str]]) -> None:
    """Insert a table's rows into the empty table ``stored.TABLE``."""
    if sources:
        connection.execute(f"insert into stored.{quoted(table)} {stored_rows(table, sources)}")


@functools.cache
def stored_types() -> Mapping[str, Mapping[str, str]]:
    """Return DuckDB's type of each declared column, by table and column."""
    with duckdb.connect(":memory:", config={"threads": 1}) as connection:
        declared = {name: connection.from_arrow(table.schema.empty_table()) for name, table in TABLES.items()}
        return {name: dict(zip(rows.columns, map(str, rows.types), strict=True)) for name, rows in declared.items()}


def stored_rows(table: str, sources: Mapping[str, Sequence[str]]) -> str:
    """Return the query for a table's declared columns in their declared types.

    ``sources`` has one entry for each part of the table: SQL text that can follow ``from``, and the declared columns
    that this part lacks.
    """
    types = stored_types()[table]
    parts = [f"{_selected(table, types, missing)} from {source}" for source, missing in sources.items()]
    return " union all ".join(parts) or f"{_selected(table, types, tuple(types))} where false"


def _selected(table: str, types: Mapping[str, str], missing: Sequence[str]) -> str:
    """Return the ``select`` of a table's columns, with declared defaults for columns that are missing or null."""
    defaults = TABLES[table].defaults
    columns = []
    for name, kind in types.items():
        default = "null" if defaults.get(name) is None else literal(str(defaults[name]))
        if name in missing:
            columns.append(f"cast({default} as {kind}) as {quoted(name)}")
        elif default != "null":  # a compaction of older files leaves null
            columns.append(f"coalesce({quoted(name)}, {default}) as {quoted(name)}")
        else:
            columns.append(quoted(name))
    return f"select {', '.join(columns)}"


def parquet_sources(store: Store, table: str, version: int) -> dict[str, Sequence[str]]:
    """Return a local table's files as sources of ``stored_rows``.

    Files that lack the same columns are one source. DuckDB could also find out the columns of each file, but would open
    every file for every query.
    """
    found = store.files_by_missing_columns(table, version)
    return {parquet_files(files): missing for missing, files in found.items()}
