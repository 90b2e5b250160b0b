"""Trials: run a function in a process of its own while a change on the disk fails, and judge the outcome."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from faults.disk.failing import How

HANGS = 120.0  # seconds

# What is worth failing in each way, by what ``failing.counted`` says of a change: elsewhere two ways leave the same.
_WORTH = {How.KILLED: "wg-", How.HALF: "w", How.FULL: "wg", How.BROKEN: "wg-"}
_FORK = multiprocessing.get_context("fork")


def say(trial: Mapping[str, object]) -> None:
    """Print the outcome of a trial as a line of JSON."""
    print(json.dumps(trial), flush=True)  # noqa: T201 - what a program of trials is for


def ways(changes: str) -> list[tuple[How, int]]:
    """List the pairs of a change's number and a way in which this change can fail."""
    return [(how, at) for at, kind in enumerate(changes, 1) for how, kinds in _WORTH.items() if kind in kinds]


def in_a_process(said: Path, function: Callable[..., object], *given: Any) -> int | None:
    """Call a function in a process that is forked off; its output goes to a file.

    This process must not have started threads before.

    Returns:
        The exit code, the negative number of a signal, or None if the process hung.
    """
    process = _FORK.Process(target=_heard, args=(said, function, given))
    process.start()
    process.join(HANGS)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None
    return process.exitcode


def _heard(said: Path, function: Callable[..., object], given: Sequence[Any]) -> None:
    with said.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    function(*given)


def fault_of_end(how: How, code: int | None, said: str) -> str | None:
    """Return what is wrong with the end of a command during which a change failed; None if nothing is.

    Args:
        how: How the change failed.
        code: What ``in_a_process`` returned.
        said: Everything that the command printed.
    """
    lines = [line for line in said.splitlines() if line.startswith("kvdrift: ")]
    if code is None:
        return "hang"
    if "Traceback" in said or "panicked" in said or "unexpected failure" in said:
        return "traceback"
    if how in {How.KILLED, How.HALF} or code == 0:  # it was done with before, or could do without the change
        return None if code in {0, -9} and not lines else f"ended with {code}"
    if code != 1 or len(lines) != 1:
        return f"ended with {code} and {len(lines)} lines"
    named = how is not How.FULL or re.search("No space left on device|the disk is full", lines[0])
    return None if named else "the line does not name the disk"
