"""The prompt of ``kvdrift sql``: queries that end with a semicolon, and a few commands that begin with a dot.

A terminal has history, kept between calls, completion and colours, which are prompt_toolkit's; from a pipe, lines are
read as they come.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import typer

from kvdrift.queries.running import rows_of
from kvdrift.schema.errors import InputError, KvdriftError, nearest
from kvdrift.sql.catalog import Contract, describe_views
from kvdrift.sql.contracts import contracts

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer

    from kvdrift.sql.catalog import Views

_LEAVE = (".quit", ".exit", "quit", "exit")
_HELP = """\
a query ends with ';'
.views          the views, and what one row of each stands for
.schema VIEW    a view's columns, their types and meanings
.help           this
.quit           leave, as Ctrl-D does"""
_KEYWORDS = (
    "select", "from", "where", "group by", "order by", "limit", "join", "using", "with", "as", "distinct", "having",
    "avg", "sum", "count", "min", "max", "median", "describe", "summarize", "pivot", "desc", "asc", "and", "or", "not",
)  # fmt: skip


class Prompt:
    """The interactive prompt of ``kvdrift sql``: answers queries and commands until the end of input."""

    def __init__(self, views: Views, show: Callable[[pa.Table], None]) -> None:
        self._views, self._show = views, show
        self._described = {one.view: one for one in describe_views()}

    def read_all(self) -> None:
        """Read entries and answer them, until one leaves the prompt or the input ends."""
        typer.echo(
            "tables at their latest versions; end a query with ';', .help lists commands, leave with Ctrl-D", err=True
        )
        for text in self._typed() if sys.stdin.isatty() and sys.stdout.isatty() else _piped():
            if text.strip().rstrip(";").lower() in _LEAVE:
                break
            try:
                self.answer(text.strip())
            except KvdriftError as error:
                typer.echo(f"kvdrift: {error}", err=True)
            except KeyboardInterrupt:
                typer.echo("interrupted", err=True)

    def answer(self, text: str) -> None:
        """Answer one query, or one command that begins with a dot.

        Raises:
            InputError: The command is unknown, or DuckDB refuses the query.
        """
        command, *arguments = text.rstrip(";").split()
        if not command.startswith("."):
            began = time.monotonic()
            rows = rows_of(self._views, text)
            self._show(rows)
            counted = f"{rows.num_rows:,} {'row' if rows.num_rows == 1 else 'rows'}"
            typer.echo(f"{counted}, {time.monotonic() - began:.2f} s", err=True)
        elif command in {".views", ".tables"}:
            described = self._described.values()
            self._show(pa.table({"view": [*self._described], "one row": [one.description for one in described]}))
        elif command == ".schema":
            promised = self._of(arguments)
            typer.echo(f"{promised.description}\none row for each {', '.join(promised.grain)}")
            if promised.one_of_each:
                typer.echo(f"for one split and pooled strata: where {promised.one_of_each}")
            self._show(self._columns(promised))
        elif command == ".help":
            typer.echo(_HELP)
        elif command not in _LEAVE:
            raise InputError(f"{command}: no such command; {nearest(command, ('.views', '.schema', '.help', '.quit'))}")

    def _of(self, arguments: list[str]) -> Contract:
        """Return the contract of the view that ``.schema`` names, which may be in the schema ``internal``."""
        if len(arguments) != 1:
            raise InputError(".schema takes one view, as in: .schema decomposition")
        name = arguments[0].removeprefix("main.").removeprefix("internal.")
        if name not in contracts():
            raise InputError(f".schema {name}: no such view; {nearest(name, self._described)}")
        return contracts()[name]

    def _columns(self, view: Contract) -> pa.Table:
        """Return a view's columns, their SQL types and their meanings."""
        types = self._views.sql(f"from {view.relation}").types
        names, meanings = [*view.columns], [*view.comments.values()]
        return pa.table({"column": names, "type": [str(kind) for kind in types], "meaning": meanings})

    def _typed(self) -> Iterator[str]:
        """Yield the entries that a person types; Ctrl-C drops an unfinished entry."""
        session = _session([*self._described], [*{name for one in self._described.values() for name in one.columns}])
        while True:
            try:
                text = session.prompt()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            if text.strip():
                yield text


def is_whole(text: str) -> bool:
    """Tell whether an entry is complete: a query with its semicolon, or a command in one line."""
    text = text.strip()
    return not text or text.endswith(";") or text.startswith(".") or text.lower() in _LEAVE


def history_file() -> Path | None:
    """Return the path of the prompt's history, in the user's state folder; None if that folder cannot be written."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser(), "kvdrift")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "sql_history"
        with file.open("a"):
            return file
    except (OSError, RuntimeError):
        return None


def _piped() -> Iterator[str]:
    pending = ""
    for line in sys.stdin:
        pending += line
        if pending.strip() and is_whole(pending):
            yield pending
            pending = ""
    if pending.strip():
        yield pending


def _session(views: list[str], columns: list[str]) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.lexers import PygmentsLexer
    from pygments.lexers.sql import SqlLexer

    keys = KeyBindings()

    @keys.add("enter")
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_whole(buffer.text):
            buffer.validate_and_handle()
        else:
            buffer.insert_text("\n")

    file = history_file()
    return PromptSession(
        "kvdrift> ",
        multiline=True,
        key_bindings=keys,
        prompt_continuation="      -> ",
        history=InMemoryHistory() if file is None else FileHistory(file),
        completer=completer(views, columns),
        complete_while_typing=False,  # with Tab
        lexer=PygmentsLexer(SqlLexer),
    )


def completer(views: list[str], columns: list[str]) -> Completer:
    """Return a completer of view names, column names and words of SQL."""
    from prompt_toolkit.completion import WordCompleter

    return WordCompleter(
        [*views, *sorted(columns), *_KEYWORDS, ".views", ".schema", ".help", ".quit"], ignore_case=True
    )
