"""``kvdrift verify``: each check as a line, its faults below it, and the verdict."""

from __future__ import annotations

import typer

from kvdrift.console import ConsoleProgress
from schema.errors import OperationError
from schema.progress import listening
from schema.store.store import Store
from verification.findings import counted
from verification.whole_store import verify

NAMED_FAULTS = 20  # lines of one check, before the rest is a count


def verify_store(location: str) -> int:
    """Verify a store and print what was found; returns the exit code: 0 if it is sound, 1 if not."""
    store = Store(location)
    found = 0
    with ConsoleProgress() as console, listening(console):
        for check in verify(store):
            found += len(check.faults)
            typer.echo(check)
            for fault in check.faults[:NAMED_FAULTS]:
                typer.echo(f"  fault: {fault}")
            if len(check.faults) > NAMED_FAULTS:
                typer.echo(f"  and {counted(len(check.faults) - NAMED_FAULTS, 'more fault')} of {check.subject}")
            for note in check.notes:
                typer.echo(f"  note: {note}")
    typer.echo(f"{store.location}: {counted(found, 'fault') if found else 'sound'}")
    return OperationError.exit_code if found else 0
