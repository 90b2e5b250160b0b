"""Queries that Ctrl-C can end, unlike DuckDB's own, and ``describe VIEW`` with the columns' meanings."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvdrift.schema.errors import alike
from kvdrift.sql.contracts import contracts

if TYPE_CHECKING:
    import pyarrow as pa

    from kvdrift.sql.catalog import Views

_NAMES = (("documents", "doc"), ("documents", "stratum"), ("documents", "split"), ("actions", "action"))
_TEXTS = re.compile(r"'([^']+)'")
_DESCRIBE = re.compile(r'\s*desc(?:ribe)?\s+(?:main\.|internal\.)?"?(\w+)"?\s*;?\s*', re.IGNORECASE)


def rows_of(views: Views, query: str) -> pa.Table:
    """Return the rows of a query; ``describe VIEW`` also gives the meanings of the columns, unlike DuckDB's own."""
    with ThreadPoolExecutor(1, "query") as thread:
        answer = thread.submit(views.table, _with_meanings(query))
        try:
            return answer.result()
        except KeyboardInterrupt:
            views.connection.interrupt()
            answer.exception()  # the connection is free again only once the query has ended
            raise


def misspelt(views: Views, query: str) -> str:
    """Suggest names for the texts of a query without rows that look like a document, action or stratum.

    Empty if each text is a known name, or resembles none.
    """
    known = {name for view, column in _NAMES for name in views.rows(view, (column,))[column].to_pylist()} - {None}
    asked = dict.fromkeys(text for text in _TEXTS.findall(query) if text not in known)
    meant = [f"'{text}': did you mean '{name}'?" for text in asked if (name := alike(text, known)) is not None]
    return "; ".join(meant)


def _with_meanings(query: str) -> str:
    """Return the query itself, or for ``describe VIEW`` a query that also reads the comments on the columns."""
    described = _DESCRIBE.fullmatch(query)
    view = contracts().get(described[1]) if described else None
    if view is None:
        return query
    return (
        "select column_name, data_type as column_type, comment as meaning from duckdb_columns() "  # noqa: S608 - our names
        f"where schema_name = '{view.schema}' and table_name = '{view.view}' order by column_index"
    )
