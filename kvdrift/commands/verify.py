"""``kvdrift verify``: each check as a line, its faults below it, and the verdict."""

from __future__ import annotations

import typer

from kvdrift.options import StoreArgument
from schema.errors import OperationError

NAMED_FAULTS = 20  # lines of one check, before the rest is a count


def verify(store: StoreArgument) -> None:
    """Read everything in a store and compare it with the log and with what it was made from; change nothing."""
    from kvdrift.console import ConsoleProgress
    from schema.store.store import Store
    from verification.findings import counted
    from verification.whole_store import verify as verified

    opened, found = Store(store), 0
    with ConsoleProgress() as console:
        for check in verified(opened, console):
            found += len(check.faults)
            typer.echo(check)
            for fault in check.faults[:NAMED_FAULTS]:
                typer.echo(f"  fault: {fault}")
            if len(check.faults) > NAMED_FAULTS:
                typer.echo(f"  and {counted(len(check.faults) - NAMED_FAULTS, 'more fault')} of {check.subject}")
            for note in check.notes:
                typer.echo(f"  note: {note}")
    typer.echo(f"{opened.location}: {counted(found, 'fault') if found else 'sound'}")
    raise typer.Exit(OperationError.exit_code if found else 0)
