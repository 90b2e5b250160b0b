"""The schema ``stored``: a view of each stored table's declared columns, over files or over another source."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import duckdb

from schema.tables import TABLES
from sql.quoting import literal, parquet_files, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from log.store import Store


def create_stored_view(connection: duckdb.DuckDBPyConnection, table: str, sources: Mapping[str, Sequence[str]]) -> None:
    """Create the view ``stored.TABLE`` in place of the empty table, which stays where there are no ``sources``.

    ``stored_rows`` says what these are.
    """
    if sources:
        connection.execute(f"drop table stored.{quoted(table)}")
        connection.execute(f"create view stored.{quoted(table)} as {stored_rows(table, sources)}")


def guard_stored_view(
    connection: duckdb.DuckDBPyConnection, table: str, sources: Mapping[str, Sequence[str]], condition: str
) -> None:
    """Make the view ``stored.TABLE`` hold a condition that does not look at rows: true of all of them, or it raises."""
    if sources:
        rows = f"from ({stored_rows(table, sources)}) where {condition}"
        connection.execute(f"create or replace view stored.{quoted(table)} as {rows}")


def fill_stored_table(connection: duckdb.DuckDBPyConnection, table: str, sources: Mapping[str, Sequence[str]]) -> None:
    """Put a table's rows into the empty table ``stored.TABLE``."""
    if sources:
        connection.execute(f"insert into stored.{quoted(table)} {stored_rows(table, sources)}")


@functools.cache
def stored_types() -> Mapping[str, Mapping[str, str]]:
    """DuckDB's type of each column that a stored table declares, by table."""
    with duckdb.connect(":memory:", config={"threads": 1}) as connection:
        declared = {name: connection.from_arrow(table.schema.empty_table()) for name, table in TABLES.items()}
        return {name: dict(zip(rows.columns, map(str, rows.types), strict=True)) for name, rows in declared.items()}


def stored_rows(table: str, sources: Mapping[str, Sequence[str]]) -> str:
    """The query for a table's declared columns, of the declared types.

    ``sources`` has what stands after ``from`` for each part of the table, with the declared columns that it lacks.
    """
    types = stored_types()[table]
    parts = [f"{_selected(table, types, missing)} from {source}" for source, missing in sources.items()]
    return " union all ".join(parts) or f"{_selected(table, types, tuple(types))} where false"


def _selected(table: str, types: Mapping[str, str], missing: Sequence[str]) -> str:
    """The ``select`` of a table's columns, with the declared defaults in those that are missing or null."""
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
    """A local table's files as sources of ``stored_rows``.

    Files that lack the same columns are read together: for DuckDB to find out by itself what each file has, it would
    open all of them for every query.
    """
    found = store.files_by_missing_columns(table, version)
    return {parquet_files(files): missing for missing, files in found.items()}
