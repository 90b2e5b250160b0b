"""Open the views over a store in an in-memory DuckDB connection; ``sql.catalog_file`` writes them into a file.

Each view's SQL stands in a file of its own. A view reads other views as ``main.NAME``, and internal views as
``internal.NAME``. The staging views read the schema ``stored``. This module fills that schema: one view per stored
table, over exactly the Parquet files of the table's pinned version. The SQL uses no variables, macros or extensions,
so that a stored view means the same in every client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import duckdb

from schema.errors import InputError, KvdriftError, OperationError, nearest
from schema.location import is_local
from schema.tables import TABLES
from sql.carried_tables import keep_views
from sql.contracts import Contract, contract, contracts
from sql.empty_views import create_views
from sql.quoting import literal, quoted
from sql.stored_moments import NO_MOMENTS, stored_moments
from sql.stored_tables import create_stored_view, parquet_sources
from sql.unlike_units import refuse_unlike_units
from sql.view_texts import view_texts

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from types import TracebackType

    import pyarrow as pa

    from log.store import Store

__all__ = ["Contract", "Views", "describe_views", "open_views", "view_texts"]

# Tables are pinned in this order. Derived tables come before their sources and before the tables written ahead of
# events, so that a commit in between never leaves a row without the row that it refers to. Depths come after their
# branchings: views join the two, and the join leaves out the depths of a later unit.
PINNING = (
    "results", "calibration", "looks", "plans", "document_moments", "branchings", "branching_depths", "scores", "steps",
    "trajectories", "units", "events", "exact_values", "identities", "prompts", "actions", "documents", "tokens",
    "studies",
)  # fmt: skip

# All estimates and most views are computed from these views: small, and 2 s of computing at the paper's size (7.1 M
# events). For windows DuckDB reads all trajectories, though only those of undeclared studies count: 7 s if they are in
# 17,000 files, for each view that reads windows.
MOMENT_VIEWS = ("windows", "moments", "position_moments", "lag_moments")


# Most compressed bytes of a table behind a URL that is read into memory, where it becomes a few times as large.
_HELD_BYTES, _SMALL_BYTES = 1 << 25, 1 << 20  # if many views are going to be read, and if one is


@dataclass(frozen=True)
class Views:
    """The views over one store, open in a DuckDB connection.

    Attributes:
        connection: The DuckDB connection that has the views.
        versions: The Delta version of each stored table.
        kept: The views that are tables in memory, sorted by their grain.
        store: The store of the views; None if errors need not tell the store's files from other files.

    """

    connection: duckdb.DuckDBPyConnection
    versions: Mapping[str, int]
    kept: Collection[str] = ()
    store: Store | None = None

    def sql(self, query: str) -> duckdb.DuckDBPyRelation:
        """Return the relation of one query (fetch with ``.df()``, ``.to_arrow_table()``, ``.pl()``, ``.fetchall()``).

        The relation is evaluated when fetched. An error during evaluation is DuckDB's own exception.

        Raises:
            InputError: DuckDB cannot parse or bind the query, or the query returns no rows.

        """
        try:
            relation = self.connection.sql(query)
        except duckdb.Error as error:
            raise one_line(error) from error
        if relation is None:
            raise InputError("the query returns no rows: give a select")
        return relation

    def table(self, query: str) -> pa.Table:
        """Return the rows of one query as an Arrow table.

        Raises:
            InputError: DuckDB cannot parse, bind or compute the query.
            OperationError: A stored file cannot be read.

        """
        return _fetch(self.sql(query))

    def rows(self, view: str, columns: Sequence[str] = (), /, **equal: Any) -> pa.Table:
        """Return the rows of ``view`` whose columns equal the given values, sorted by the view's grain.

        None stands for null. A list matches any of its values. The rows have the given ``columns``, by default all
        columns of the view.

        Raises:
            InputError: There is no such view or column.
            OperationError: A stored file cannot be read.

        """
        promised = contract(view)
        for column in (*columns, *equal):
            if column not in promised.columns:
                raise InputError(f"view {view}: no column '{column}'; {nearest(column, promised.columns)}")
        conditions = " and ".join(f"{quoted(name)} {_test(value)}" for name, value in equal.items())
        order = "" if view in self.kept else f"order by {', '.join(map(quoted, promised.grain))}"
        selected = ", ".join(map(quoted, columns)) or "*"
        query = f"select {selected} from {promised.relation} where {conditions or 'true'} {order}"  # noqa: S608 - quoted
        try:
            return _fetch(self.connection.sql(query))
        except duckdb.Error as error:
            raise one_line(error) from error

    def close(self) -> None:
        """Close the connection; its relations can no longer be fetched."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _test(value: Any) -> str:
    """Return the SQL condition that a column equals a value, or any value of a list.

    The values stand in the query as literals, so that DuckDB compares them with the bounds in the files and skips parts
    of the files.
    """
    if not isinstance(value, list):
        return f"is not distinct from {_literal(value)}"
    return f"in ({', '.join(map(_literal, value)) or 'null'})"


def _literal(value: Any) -> str:
    return literal(value) if isinstance(value, str) else "null" if value is None else str(value).lower()


def open_views(
    store: Store,
    versions: Mapping[str, int] | None = None,
    *,
    threads: int = 1,
    kept: Sequence[str] = (),
    materialized: bool = True,
    checked_within: float | None = None,
    without: Collection[str] = (),
) -> Views:
    """Open all views over ``store`` in a new in-memory connection.

    Args:
        store: An existing store, local or behind a URL. Tables behind a URL are scanned when a query asks for rows.
        versions: Delta version by table name; a table without an entry is read at its latest version.
        threads: The number of threads that DuckDB may use. With one thread, the same versions give the same rows bit
            for bit in every run, as stored estimates need. With more, the order of floating-point sums varies, and so
            does their last bit.
        kept: Views to compute now and keep as tables in memory (``MOMENT_VIEWS``). A caller that reads many views which
            depend on these saves computing them for each. Small tables behind a URL are then kept in memory too.
        materialized: Whether to use the moments of documents that the store has; False computes all from steps.
        checked_within: Check first that no file of a local store is damaged. Small tables are read whole. A file of a
            large table is read unless it was found whole within this many seconds; 0 reads all files. None checks
            nothing.
        without: Stored tables to open without rows, since the caller reads none. This saves the time of listing their
            files.

    Returns:
        The views. Each stored table is pinned to one version, so later commits do not show.

    Raises:
        InputError: An unknown table, version or view, a damaged file, or ``threads`` below 1.
        UnlikeUnitsError: A view in ``kept`` pools replicates, and units of one action and document keep or read unlike
            entries. A view that is not in ``kept`` raises the same error when it is read.
        DamagedStoreError: Commits are damaged or lost, the events behind derived rows are lost, or a checked file is
            damaged.

    """
    if threads < 1:
        raise InputError(f"threads is {threads}: give 1 or more")
    for table in versions or {}:
        if table not in TABLES:
            raise InputError(f"no table '{table}'; {nearest(table, TABLES)}")
    for view in kept:
        contract(view)  # InputError for an unknown one
    pinned = {table: (versions or {}).get(table, -1) for table in PINNING}
    pinned = {table: store.version(table) if version < 0 else version for table, version in pinned.items()}
    store.check_made_from_events(pinned)
    if checked_within is not None:
        store.check_files(pinned, checked_within)
    moments = stored_moments(store, pinned) if materialized else NO_MOMENTS
    connection = duckdb.connect(":memory:", config={"threads": threads})
    try:
        be_quiet(connection)
        create_views(connection, stored=moments.stored, waiting=moments.waits)
        for table, version in pinned.items():
            most = _HELD_BYTES if kept else _SMALL_BYTES
            sources = {} if table in without else _sources(connection, store, table, version, most)
            create_stored_view(connection, table, sources)
        moments.insert_waiting(connection)
        refuse_unlike_units(connection, store, pinned, kept)
        keep_views(connection, kept)
    except duckdb.Error as error:
        connection.close()
        raise one_line(error) from error
    except KvdriftError:
        connection.close()
        raise
    return Views(connection, pinned, kept, store)


def describe_views() -> tuple[Contract, ...]:
    """Return the contracts of all views that users query, sorted by name, with description and columns.

    Views of the schema ``internal`` are left out, since they only serve other views.
    """
    return tuple(promised for promised in contracts().values() if not promised.internal)


def _sources(
    connection: duckdb.DuckDBPyConnection, store: Store, table: str, version: int, most: int
) -> dict[str, Sequence[str]]:
    """Return a table as sources of ``create_stored_view``.

    A table behind a URL with at most ``most`` bytes is read into memory, since one view can read a small table ten
    times. Arrow scans a larger table when a query asks for rows. DuckDB passes the query's columns and conditions to
    the scan, which skips the rest of the files.
    """
    if is_local(store.location):
        return parquet_sources(store, table, version)
    name = f"stored_{table}"
    small = sum(file.size for file in store.stored_files(table, version)) <= most
    connection.register(name, store.read(table, version) if small else store.dataset(table, version))
    return {quoted(name): ()}


def be_quiet(connection: duckdb.DuckDBPyConnection) -> None:
    """Turn off DuckDB's progress bar, which it would draw in a spawned process as in an interactive one."""
    connection.execute("set enable_progress_bar = false")


def _fetch(relation: duckdb.DuckDBPyRelation) -> pa.Table:
    try:
        return relation.to_arrow_table()
    except duckdb.Error as error:
        raise one_line(error) from error


def one_line(error: duckdb.Error) -> KvdriftError:
    """Return DuckDB's error as one line without the excerpt of the query.

    The error is the user's mistake unless a file cannot be read. A message that a view raises by ``error(...)`` is
    returned unchanged.
    """
    lines = []
    for line in str(error).splitlines():
        if line.startswith("LINE "):
            break
        lines.append(line)
    message = " ".join(" ".join(lines).split()).removeprefix("Invalid Input Error: ")
    return OperationError(message) if isinstance(error, duckdb.IOException) else InputError(message)
