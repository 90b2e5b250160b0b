"""``kvdrift verify``: each check as a line, its faults below it, and the verdict; before that what was mended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvdrift.options import StoreArgument
from schema.errors import OperationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from schema.progress import Progress
    from schema.store.store import Store
    from verification.findings import Fault

NAMED_FAULTS = 20  # lines of one check, before the rest is a count


def verify(
    store: StoreArgument,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Mend first what is damaged or lost; stop what writes to the store before. Nothing is deleted.",
        ),
    ] = False,
) -> None:
    """Read everything in a store and compare it with the log and with what it was made from.

    Nothing is changed unless --repair asks for it. What is taken away then lies in STORE/set-aside.
    """
    from kvdrift.console import ConsoleProgress
    from schema.store.store import Store
    from verification.findings import counted

    with ConsoleProgress() as console:
        if repair:
            _repair(store)
        faults = _verified(Store(store), console)
        # Some faults show only when files are compared: what is made from others is made again where it has one.
        if repair and faults and _repair(store, faults):
            faults = _verified(Store(store), console)
    typer.echo(f"{Store(store).location}: {counted(len(faults), 'fault') if faults else 'sound'}")
    raise typer.Exit(OperationError.exit_code if faults else 0)


def _repair(location: str, faults: Sequence[Fault] = ()) -> bool:
    """Mend a store, print what was done, and tell whether anything was."""
    from schema.store.store import Store
    from verification.repair import repair

    lines = 0
    for lines, line in enumerate(repair(Store(location), faults), 1):  # noqa: B007 - the last number counts
        typer.echo(f"repaired {line}")
    return lines > 0


def _verified(store: Store, console: Progress) -> list[Fault]:
    """Print the checks of a store, with the faults that they find; return all of these."""
    from verification.findings import counted
    from verification.whole_store import verify as verified

    found: list[Fault] = []
    for check in verified(store, console):
        found += check.faults
        typer.echo(check)
        for fault in check.faults[:NAMED_FAULTS]:
            typer.echo(f"  fault: {fault}")
        if len(check.faults) > NAMED_FAULTS:
            typer.echo(f"  and {counted(len(check.faults) - NAMED_FAULTS, 'more fault')} of {check.subject}")
        for note in check.notes:
            typer.echo(f"  note: {note}")
    return found
