"""Views for queries that only read: no statement can write, reach a file outside the store, or use the network.

DuckDB's locked configuration keeps a query inside the store's folder, but a ``copy`` could still write there. So only
some types of statements are accepted. The parts of a ``with`` clause are checked too, since DuckDB allows a ``copy``
there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import duckdb

from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError
from kvdrift.schema.location import is_local
from kvdrift.sql.catalog import Views, failing_in_one_line
from kvdrift.sql.quoting import literal

PRAGMAS: Final = ("database_list", "show_tables", "table_info", "version")
_EXPLAIN = re.compile(r"\s*explain\s+(analyze\s+)?(\([^)]*\)\s*)?", re.IGNORECASE)
_PRAGMA = re.compile(r"\s*pragma\s+(\w+)", re.IGNORECASE)
_READING_NODES = {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"}


@dataclass(frozen=True)
class ReadOnlyViews(Views):
    """Views whose queries can only read the store."""

    def sql(self, query: str) -> duckdb.DuckDBPyRelation:
        """Return the relation of one query, as ``Views.sql`` does.

        Raises:
            InputError: The text is not a single query that only reads, or DuckDB cannot parse or bind the query.
        """
        if (count := check_reads(query)) > 1:
            raise InputError(f"{count} queries, but only the last would be answered; give one query at a time")
        return super().sql(query)


def read_only(views: Views, store: Store) -> ReadOnlyViews:
    """Lock the connection of open views: from now on it can read only the store's folder and change no setting.

    The returned views use the same connection. Files of a local store stay readable. Tables behind a URL are scanned by
    Arrow and need no file.
    """
    folders = literal(store.location) if is_local(store.location) else ""
    for setting in (
        f"allowed_directories = [{folders}]",
        "python_enable_replacements = false",  # names of this process's own variables
        "enable_external_access = false",
        "lock_configuration = true",
    ):
        views.connection.execute(f"set {setting}")
    return ReadOnlyViews(views.connection, views.versions, store=store)


def check_reads(query: str) -> int:
    """Refuse all but select, explain of a select, and a pragma of ``PRAGMAS``; return the number of statements."""
    with failing_in_one_line():
        statements = [(statement.type.name, statement.query) for statement in duckdb.extract_statements(query)]
    for kind, text in statements:
        if kind == "EXPLAIN":
            check_reads(_EXPLAIN.sub("", text, count=1))
        elif kind == "PRAGMA":
            pragma = _PRAGMA.match(text)
            if pragma is None or pragma[1].lower() not in PRAGMAS:
                raise InputError(f"'{_start(text)}': sql takes only the pragmas {', '.join(PRAGMAS)}")
        elif kind == "MULTI":
            raise InputError(
                f"'{_start(text)}': name the values of a pivot, as in: pivot v on x in (1, 2) using sum(y)"
            )
        elif kind != "SELECT" or not _READING_NODES.issuperset(_query_nodes(_tree(text))):
            wanted = "give a select, or use kvdrift.open(STORE) in Python for a connection of your own"
            raise InputError(f"'{_start(text)}': sql can only read; {wanted}")
    return len(statements)


def _tree(select: str) -> Any:
    """Return the parsed statement as DuckDB serializes it."""
    with duckdb.connect(":memory:") as connection:
        (text,) = connection.execute("select json_serialize_sql(?)", [select]).fetchall()[0]
    tree = json.loads(text)
    if tree["error"]:
        raise InputError(f"'{_start(select)}': {tree['error_message']}")
    return tree


def _query_nodes(tree: Any) -> Iterator[str]:
    """Yield the types of the queries in all ``with`` clauses of a parsed statement, at any depth."""
    if isinstance(tree, dict):
        if isinstance(node := tree.get("query_node"), dict):
            yield node["type"]
        for value in tree.values():
            yield from _query_nodes(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _query_nodes(value)


def _start(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 40 else f"{words[:39]}…"
