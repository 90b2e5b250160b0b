"""``kvdrift verify``: make requested repairs, and print a line for each check with its faults, and the verdict."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvdrift.options import JsonOption, StoreArgument, seconds_of
from kvdrift.schema.errors import InputError, OperationError

if TYPE_CHECKING:
    from kvdrift.log.store import Store
    from kvdrift.schema.progress import Progress
    from kvdrift.verification.files import Fault, Verified


NAMED_FAULTS = 20  # faults of one check that are printed; the rest are counted


def verify(
    store: StoreArgument,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="First repair damaged or lost files. Nothing is deleted. End all other processes that write to the "
            "store beforehand.",
        ),
    ] = False,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="AGE",
            help="Read only files that were not found whole within the last AGE, such as 90m, 12h or 7d. Regular "
            "checks then find disk damage within AGE.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read everything in a store; compare files with the log, and rows with those that they are made from.

    No row is changed unless --repair asks for it. A repair moves files that it takes out of tables to
    STORE/set-aside.
    STORE/.checked says which files were found whole, and when; STORE/.last when the store was last verified.

    Examples:
        kvdrift verify stores/quickstart
        kvdrift verify stores/quickstart --repair
        kvdrift verify stores/quickstart --since 7d
    """
    from kvdrift.console import ConsoleProgress
    from kvdrift.log.last_times import record_check
    from kvdrift.log.store import Store
    from kvdrift.verification.files import number_of

    within = None if since is None else seconds_of(since, "--since")
    if repair and since is not None:
        raise InputError("--since and --repair: a repair reads all files first; leave one of the two out")
    unprinted: list[str] = []
    tell = unprinted.append if as_json else typer.echo
    with ConsoleProgress() as console:
        repaired = _repair(store, tell) if repair else []
        checks = _verified(Store(store), console, tell, within)
        # Some faults show only when files are compared; tables that have such faults are derived again.
        if repair and (faults := _faults(checks)) and (more := _repair(store, tell, faults)):
            repaired += more
            checks = _verified(Store(store), console, tell, None)
    faults, location = _faults(checks), Store(store).location
    record_check(location, len(faults), whole=within is None)
    if as_json:
        typer.echo(json.dumps(_fields(location, checks, repaired), ensure_ascii=False))
    else:
        typer.echo(f"{location}: {number_of(len(faults), 'fault') if faults else 'sound'}")
    raise typer.Exit(OperationError.exit_code if faults else 0)


def _faults(checks: Sequence[Verified]) -> list[Fault]:
    return [fault for check in checks for fault in check.faults]


def _fields(location: str, checks: Sequence[Verified], repaired: Sequence[str]) -> dict[str, Any]:
    """Return the outcome as the fields of ``--json``, with every fault."""
    return {
        "store": location,
        "sound": not _faults(checks),
        "repaired": list(repaired),
        "checks": [
            {"subject": check.subject, "faults": list(map(str, check.faults)), "notes": list(map(str, check.notes))}
            for check in checks
        ],
    }


def _repair(location: str, tell: Callable[[str], None], faults: Sequence[Fault] = ()) -> list[str]:
    """Repair a store; give a line for each repair to ``tell``, and return all lines.

    Derived rows that ``faults``, those of an earlier check, name as wrong are derived again.
    """
    from kvdrift.log.store import Store
    from kvdrift.verification.repair import repair

    lines = []
    for line in repair(Store(location), faults):
        lines.append(str(line))
        tell(f"repaired {line}")
    return lines


def _verified(store: Store, console: Progress, tell: Callable[[str], None], within: float | None) -> list[Verified]:
    """Print the checks of a store with the faults that they find, and return the checks.

    With ``within``, rows are not compared, and files that a check found whole in so many last seconds are not read.
    """
    from kvdrift.verification.files import number_of
    from kvdrift.verification.whole_store import scrub
    from kvdrift.verification.whole_store import verify as verified

    checks: list[Verified] = []
    for check in verified(store, console) if within is None else scrub(store, within):
        checks.append(check)
        tell(str(check))
        for fault in check.faults[:NAMED_FAULTS]:
            tell(f"  fault: {fault}")
        if len(check.faults) > NAMED_FAULTS:
            tell(f"  and {number_of(len(check.faults) - NAMED_FAULTS, 'more fault')} of {check.subject}")
        for note in check.notes:
            tell(f"  note: {note}")
    return checks
