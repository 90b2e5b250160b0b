"""Open the views over a store in an in-memory DuckDB connection; ``kvdrift.sql.catalog_file`` writes them into a file.

The SQL of each view is in a separate file. It reads other views as ``main.NAME`` or ``internal.NAME``, and stored
tables from the schema ``stored``. This module fills that schema with a view for each stored table, over exactly the
Parquet files of the table's pinned version. The SQL uses no variables, macros or extensions, so that a view means the
same in every client. ``breaches`` checks the rows of a view against its contract: unique grains, columns that are never
null, identities.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import duckdb
import pyarrow as pa

from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError, KvdriftError, OperationError, nearest
from kvdrift.schema.location import is_local
from kvdrift.schema.tables import TABLES
from kvdrift.sql.contracts import Contract, contract, contracts
from kvdrift.sql.empty_views import create_views, view_texts
from kvdrift.sql.quoting import literal, parquet_files, quoted
from kvdrift.sql.unlike_units import refuse_unlike_units

__all__ = ["Contract", "Views", "describe_views", "open_views", "view_texts"]

# Versions of tables are pinned in this order. A table comes before the tables that its rows refer to, so that a commit
# amid the pinning leaves no row without the rows it refers to. Depths come after branchings: views join the two, which
# leaves out depths of a later unit. Moments are committed before the trajectories of their units. They are pinned after
# trajectories, so that no unit with trajectories lacks its moments.
PINNING = (
    "results", "calibration", "looks", "plans", "branchings", "branching_depths", "scores", "steps", "trajectories",
    "unit_moments", "units", "events", "exact_values", "identities", "prompts", "actions", "documents", "tokens",
    "studies",
)  # fmt: skip

# All estimates and most views are computed from these views. They are small, and take 2 s at the paper's size (7.1 M
# events). For ``windows`` DuckDB reads all trajectories, though only studies that declare no windows need them: 7 s
# with 17,000 files, for each view that reads ``windows``.
MOMENT_VIEWS = ("windows", "moments", "profiles")

# The most compressed bytes of a table behind a URL that is read into memory, where the table takes a few times as many.
_HELD_BYTES, _SMALL_BYTES = 1 << 25, 1 << 20  # for a caller that keeps views, and for any other caller
_SCANNED = frozenset({"events", "steps"})

_INTERRUPTED = "Query interrupted"  # DuckDB's RuntimeError if Python has a signal while a query runs
_SHORT = "Could not read enough bytes"  # DuckDB's message about a file that ends early
_NO_COLUMN = re.compile(r'.*?column (?:named )?"(?P<name>\w+)"( not found in FROM clause)?')
# Views, and the keys that other views share with them.
_JOINED = {"documents": "study, model, doc", "actions": "study, action"}


@dataclass(frozen=True)
class Views:
    """The views over one store, open in a DuckDB connection."""

    connection: duckdb.DuckDBPyConnection  # The DuckDB connection that has the views
    versions: Mapping[str, int]  # The Delta version of each stored table
    kept: Collection[str] = ()  # The views that are tables in memory, sorted by their grain
    store: Store | None = None  # The store, for errors about its files

    def sql(self, query: str) -> duckdb.DuckDBPyRelation:
        """Return the relation of one query (fetch with ``.df()``, ``.to_arrow_table()``, ``.pl()``, ``.fetchall()``).

        The relation is evaluated when fetched. An error during evaluation is DuckDB's own exception.

        Raises:
            InputError: DuckDB cannot parse or bind the query, or the query is empty.
        """
        with failing_in_one_line(self.store):
            relation = self.connection.sql(query)
        if relation is None:
            raise InputError("the query is empty: give a select")
        return relation

    def table(self, query: str) -> pa.Table:
        """Return the rows of one query as an Arrow table.

        Raises:
            InputError: DuckDB cannot parse, bind or compute the query.
            OperationError: A stored file cannot be read.
        """
        relation = self.sql(query)
        with failing_in_one_line(self.store):
            return relation.to_arrow_table()

    def rows(self, view: str, columns: Sequence[str] = (), /, **equal: Any) -> pa.Table:
        """Return the rows of ``view`` whose columns equal the given values, sorted by the view's grain.

        None stands for null. A list matches any of its values; None in a list matches nothing. The rows have the given
        ``columns``, by default all columns of the view.

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
        with failing_in_one_line(self.store):
            return self.connection.sql(query).to_arrow_table()

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
    checked_within: float | None = None,
    without: Collection[str] = (),
) -> Views:
    """Open all views over ``store`` in a new in-memory connection.

    Args:
        store: An existing store, local or behind a URL; large tables behind a URL are scanned by each query.
        versions: Delta version by table name; a table that is not named is read at its latest version.
        threads: The number of DuckDB's threads. One thread gives the same rows for the same versions bit for bit, which
            stored estimates need; with more threads, the order of floating-point sums varies, and so their last bit.
        kept: Views to compute now and to keep as tables in memory, such as ``MOMENT_VIEWS``. A view that is not kept is
            computed again for each view that reads it. If any view is kept, larger tables behind a URL are held in
            memory too.
        checked_within: If given, files of a local store are checked for damage first. Small tables are read whole;
            files of large tables are read unless they were found whole within this many seconds. 0 reads all files.
        without: Stored tables that the caller reads no rows of; they are left empty, which saves time if they have many
            files.

    Returns:
        The views. Each stored table is pinned to one version, so later commits do not show.

    Raises:
        InputError: An unknown table, version or view, or ``threads`` below 1.
        OperationError: A stored file is missing.
        UnlikeUnitsError: A view in ``kept`` pools replicates, and the store has units that must not be pooled
            (``kvdrift.sql.unlike_units``). A view that is not in ``kept`` raises the same error when it is read.
        DamagedStoreError: Commits are damaged or lost, the events behind derived rows are lost, or a file that is
            checked or read is damaged.
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
    connection = duckdb.connect(":memory:", config={"threads": threads})
    try:
        with failing_in_one_line(store):
            be_quiet(connection)
            create_views(connection)
            for table, version in pinned.items():
                most = _HELD_BYTES if kept else _SMALL_BYTES
                source = None if table in without else _source(connection, store, table, version, most)
                create_stored_view(connection, table, source)
            refuse_unlike_units(connection, store, pinned, kept)
            keep_views(connection, kept)
    except BaseException:
        connection.close()
        raise
    return Views(connection, pinned, kept, store)


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


def describe_views() -> tuple[Contract, ...]:
    """Return the contracts of all views that users query, sorted by name, with description and columns.

    Views of the schema ``internal`` are left out, since they only serve other views.
    """
    return tuple(promised for promised in contracts().values() if not promised.internal)


def _source(connection: duckdb.DuckDBPyConnection, store: Store, table: str, version: int, most: int) -> str | None:
    """Return a table as the source that ``create_stored_view`` takes.

    A table behind a URL is read into memory if it has at most ``most`` bytes, since a view may read a small table ten
    times. Larger tables, and always events and steps, which few views read, are scanned by Arrow when a query asks for
    rows: DuckDB hands the columns and the conditions of the query to the scan, which leaves the rest of the files
    unread.
    """
    if is_local(store.location):
        return parquet_source(store, table, version)
    name = f"stored_{table}"
    small = table not in _SCANNED and sum(file.size for file in store.stored_files(table, version)) <= most
    connection.register(name, store.read(table, version) if small else store.dataset(table, version))
    return quoted(name)


def be_quiet(connection: duckdb.DuckDBPyConnection) -> None:
    """Turn off DuckDB's progress bar, which it would draw in a spawned process as in an interactive one."""
    with suppress(duckdb.InvalidInputException):  # in a notebook without ipywidgets, where DuckDB cannot draw a bar
        connection.execute("set enable_progress_bar = false")


@contextmanager
def failing_in_one_line(store: Store | None = None) -> Iterator[None]:
    """Turn DuckDB's errors within the block into errors of one line, and those after Ctrl-C into KeyboardInterrupt.

    ``store`` is the store that the block reads, if it reads one: the line about a damaged file says how to repair it.
    """
    try:
        yield
    except duckdb.InterruptException as error:
        raise KeyboardInterrupt from error
    except duckdb.Error as error:
        raise one_line(error, store) from error
    except UnicodeDecodeError as error:  # a stored text that damage has made no text
        raise _unreadable(str(error), store) from error
    except RuntimeError as error:
        if str(error) != _INTERRUPTED:
            raise
        raise KeyboardInterrupt from error


def one_line(error: duckdb.Error, store: Store | None = None) -> KvdriftError:
    """Return DuckDB's error as one line without the excerpt of the query.

    The error counts as the user's mistake unless it is about a file that cannot be read. DuckDB has no exception class
    for data that it cannot decompress or decode: such an error is of the base class and names no file, or names a
    Parquet file. If the file is one of ``store``, the line has the command that repairs the store; not if the file is
    missing or cannot be opened, which another try may mend. A message that a view raises by ``error(...)`` is returned
    unchanged.
    """
    lines = []
    for line in str(error).splitlines():
        if line.startswith("LINE "):
            break
        lines.append(line)
    message = " ".join(" ".join(lines).split()).removeprefix("Invalid Input Error: ")
    if (match := _NO_COLUMN.match(message)) and (place := _place_of(match["name"])):
        message = f"{match[0]}; {place}"
    unreadable = isinstance(error, duckdb.IOException) or type(error) is duckdb.Error or ".parquet" in message
    refused = isinstance(error, duckdb.PermissionException)  # may name a file that the query asked for
    if refused or not unreadable:
        return InputError(message)
    stored = type(error) is duckdb.Error or (store is not None and f"{store.location}/" in message)
    damaged = not isinstance(error, duckdb.IOException) or _SHORT in message
    return _unreadable(message, store) if stored and damaged else OperationError(message)


def _unreadable(message: str, store: Store | None) -> KvdriftError:
    """Return the error about a file, of ``store`` if given, that is damaged."""
    return OperationError(message) if store is None else store.damaged(f"a file cannot be read ({message})")


def _place_of(column: str) -> str:
    """Return a hint that says which of the views ``_JOINED`` has a column, and how to join it; empty if none has."""
    places = ((view, keys) for view, keys in _JOINED.items() if column in contract(view).columns)
    return next((f"{view} has it: add join {view} using ({keys})" for view, keys in places), "")


def create_stored_view(connection: duckdb.DuckDBPyConnection, table: str, source: str | None) -> None:
    """Replace the empty table ``stored.TABLE`` by a view of a source; without a source the empty table stays.

    The source is SQL text that can follow ``from``.
    """
    if source:
        connection.execute(f"drop table stored.{quoted(table)}")
        connection.execute(f"create view stored.{quoted(table)} as {_rows(table, source)}")


def guard_stored_view(connection: duckdb.DuckDBPyConnection, table: str, source: str | None, condition: str) -> None:
    """Let the view ``stored.TABLE`` of a source check a condition that is true for all rows or raises an error.

    The source is as in ``create_stored_view``; without a source nothing changes.
    """
    if source:
        rows = f"{_rows(table, source)} where {condition}"
        connection.execute(f"create or replace view stored.{quoted(table)} as {rows}")


def fill_stored_table(connection: duckdb.DuckDBPyConnection, table: str, source: str | None) -> None:
    """Insert the rows of a source into the empty table ``stored.TABLE``; without a source it stays empty."""
    if source:
        connection.execute(f"insert into stored.{quoted(table)} {_rows(table, source)}")


def _rows(table: str, source: str) -> str:
    """Return the query that reads a table's declared columns from a source."""
    return f"select {', '.join(map(quoted, TABLES[table].columns))} from {source}"  # noqa: S608 - names of ours


def parquet_source(store: Store, table: str, version: int) -> str | None:
    """Return the files of a local table as SQL text that can follow ``from``; None if the table has no files."""
    files = store.files(table, version)
    return parquet_files(files) if files else None


@dataclass(frozen=True)
class Breach:
    """A promise of a view's contract that some rows of the view break."""

    view: str
    promise: str
    rows: int
    example: dict[str, Any]  # the grain's columns of one of these rows


def computed_views() -> tuple[str, ...]:
    """Return the names of the views whose contracts are checked, sorted.

    Costly views are left out, and so are stored tables whose contracts have no identities.
    """
    computed = {name: promised for name, promised in contracts().items() if name not in TABLES or promised.identities}
    return tuple(name for name, promised in computed.items() if not promised.costly)


def contract_checks(view: str) -> int:
    """Return the number of promises in a view's contract."""
    promised = contract(view)
    return 1 + len(promised.not_null) + len(promised.identities)


def breaches(views: Views, view: str) -> list[Breach]:
    """Return the promises of a view's contract that rows of the view break.

    An identity may read other views, even once for every row; so open ``views`` with those other views ``kept``.
    """
    promised = contract(view)
    grain, rows = ", ".join(map(quoted, promised.grain)), f"from {promised.relation} as view"
    broken = {f"{name} is never null": f"{quoted(name)} is null" for name in promised.not_null}
    broken |= {name: f"({predicate}) is not true" for name, predicate in promised.identities.items()}
    queries = {
        f"one row for each {', '.join(promised.grain)}": f"{rows} select {grain} group by all having count(*) > 1"
    }
    # One query tells whether any check fails. To count the failing rows of each check would take twice as long.
    if views.table(f"{rows} where {' or '.join(broken.values())} limit 1").num_rows:
        queries |= {promise: f"{rows} select {grain} where {condition}" for promise, condition in broken.items()}
    examples = {promise: views.table(query) for promise, query in queries.items()}
    return [
        Breach(view, promise, table.num_rows, table.slice(0, 1).to_pylist()[0])
        for promise, table in examples.items()
        if table.num_rows
    ]
