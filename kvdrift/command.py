"""The ``kvdrift`` command: its subcommands, each in the module of its name, their help, and how a call ends."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import textwrap
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.exceptions import TyperException

import kvdrift
from kvdrift.commands.analyze import analyze
from kvdrift.commands.check import check
from kvdrift.commands.compact import compact
from kvdrift.commands.confirm import confirm
from kvdrift.commands.derive import derive
from kvdrift.commands.drop import drop
from kvdrift.commands.forget import forget
from kvdrift.commands.gate import gate
from kvdrift.commands.ingest import ingest
from kvdrift.commands.init import init
from kvdrift.commands.list import list_
from kvdrift.commands.report import report
from kvdrift.commands.run import run
from kvdrift.commands.schedule import schedule
from kvdrift.commands.serve import serve
from kvdrift.commands.show import show
from kvdrift.commands.sql import sql
from kvdrift.commands.status import status
from kvdrift.commands.verify import verify
from kvdrift.interrupts import INTERRUPTED, failure_code, noting_interrupts
from kvdrift.junit import JUnitFile
from kvdrift.schema.errors import (
    InputError,
    KvdriftError,
    OperationError,
    failure_of,
    first_line,
    is_forbidden,
    printable,
    shortened,
)


def _returning(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that ``sys.exit`` inside it, for example in a user's selector, counts as a failure."""

    @functools.wraps(command)
    def returning(**options: Any) -> None:
        try:
            command(**options)
        except SystemExit as error:
            raise OperationError(f"the command was ended by sys.exit: {failure_of(error, None)}") from error

    return returning


_TYPES = {"str": "TEXT", "int": "N", "int range": "N", "float": "NUMBER", "float range": "NUMBER"}


class _Command(TyperCommand):
    """A command whose help shows no Python types, and whose summary is a whole sentence in a terminal of any width."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the help of each argument and option; Typer's own would show the type of the Python variable."""
        for kind, title in (("argument", "Arguments"), ("option", "Options")):
            params = [param for param in self.get_params(ctx) if param.param_type_name == kind]
            if records := [record for param in params if (record := param.get_help_record(ctx)) is not None]:
                with formatter.section(title):
                    formatter.write_dl([(_without_type(name, kind), text) for name, text in records])

    def get_short_help_str(self, limit: int = 0) -> str:  # noqa: ARG002 - a summary may take several lines
        """Return the first sentence of the help."""
        paragraph = " ".join((self.help or "").partition("\n\n")[0].split())
        return paragraph.partition(". ")[0].removesuffix(".") + "."


def _without_type(name: str, kind: str) -> str:
    """Return an argument's name as help shows it, or an option's name with the kind of its value."""
    return re.sub(r" <(.*)>$", lambda match: "" if kind == "argument" else f" {_TYPES[match[1]]}", name)


app = typer.Typer(
    name="kvdrift",
    help="When, and for how long, a smaller KV cache makes a language model diverge from itself.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS = (
    init, run, schedule, serve, status, verify, sql, ingest, derive, analyze, report, gate, show, compact, drop, forget,
    confirm, check, list_,
)  # fmt: skip
for function in _COMMANDS:
    help_text, _, examples = (inspect.getdoc(function) or "").partition("\n\nExamples:\n")
    app.command(
        function.__name__.removesuffix("_"),
        cls=_Command,
        help=help_text,
        epilog=f"\b\nExamples:\n{textwrap.indent(textwrap.dedent(examples), '  ')}",  # typer keeps lines after \b
        context_settings={"allow_extra_args": True} if function is sql else None,  # words of a query
    )(_returning(function))


# The commands that go on where an interrupt stopped them.
_RESUMED = ("run", "derive", "analyze", "ingest", "compact", "drop", "forget")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"kvdrift {kvdrift.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback acts
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,  # noqa: ARG001 - main reads it
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@functools.cache
def _group() -> Any:
    """Build the group of all commands once; Typer would read every command's signature again in each call."""
    return typer.main.get_command(app)


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit with its code: 1 after a failure (``gate``: 4), 2 after a mistake, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # --debug may stand anywhere: whoever adds it to a failing command adds it at the end.
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    failure, junit = failure_code(arguments), JUnitFile.of_call(arguments)
    fail = functools.partial(_fail, junit=junit, debug=debug, log_json="--log-json" in arguments)
    try:
        if junit is not None:
            junit.write_error("the call was killed, or has not ended")
        with noting_interrupts() as interrupts:
            code: Any = _group()(arguments, prog_name="kvdrift", standalone_mode=False, obj=junit)
        if code and interrupts:  # a command reported the interrupt as a fault
            code = INTERRUPTED
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED  # Typer, too, turns Ctrl-C within a command into this code
    except BrokenPipeError:
        _write_error(junit, "standard output was closed")
        sys.stderr.close()
        sys.exit(failure)
    except TyperException as error:
        fail(f"{error.format_message()} (kvdrift --help lists commands and options)", 2, debug=False)
    except Exception as error:  # noqa: BLE001 - the last line of defence: one line, no traceback
        fail(*_line_and_code(error, failure))
    if code == INTERRUPTED:
        fail(_interrupted(arguments), INTERRUPTED, debug=False)
    sys.exit(code if isinstance(code, int) else 0)


def _line_and_code(error: Exception, failure: int) -> tuple[str, int]:
    """Return the line about an error, and the exit code: ``failure`` unless the error is the user's mistake."""
    if isinstance(error, KvdriftError):
        return str(error), error.exit_code if isinstance(error, InputError) else failure
    if isinstance(error, OSError):  # for example a disk that is full or broken, or a folder that may not be written
        named = "" if error.filename is None else f"{error.filename}: "
        code = InputError.exit_code if is_forbidden(error) else failure
        return f"{named}{error.strerror or first_line(error)}", code
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return f"unexpected failure: {line} (--debug shows where)", failure


def _interrupted(arguments: list[str]) -> str:
    resumed = arguments[:1] and arguments[0] in _RESUMED
    return "interrupted; run the same command again to go on" if resumed else "interrupted"


def _fail(line: str, code: int, *, junit: JUnitFile | None, debug: bool, log_json: bool) -> None:
    if log_json:
        from kvdrift.console import write_line

        write_line("error", line, exit_code=code, traceback=traceback.format_exc() if debug else None)
        sys.exit(code)
    if debug:
        traceback.print_exc()
    message = printable(shortened(line))
    _write_error(junit, message)
    typer.echo(f"kvdrift: {message}", err=True)
    sys.exit(code)


def _write_error(junit: JUnitFile | None, line: str) -> None:
    if junit is not None:
        with suppress(InputError):  # if the file could not be written from the start, the error is about the file
            junit.write_error(line)
