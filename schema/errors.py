"""Every error that kvdrift raises on purpose.

KvdriftError               one line, made to be read by a person
├── InputError             the user's mistake: what is wrong, where, what would be right (exit code 2)
│   └── PlanError          an evaluation without its frozen plan, or against another one
└── OperationError         the work failed though the input was right (exit code 1)
    ├── ControlError       a full-retention control with delta or f other than 0
    └── DamagedStoreError  a store that contradicts itself: commits are damaged or lost
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KvdriftError(Exception):
    """Base of all errors below; ``exit_code`` is what the command returns."""

    exit_code = 1


class InputError(KvdriftError):
    """Something the user gave is wrong: a file, a field, a value."""

    exit_code = 2


class PlanError(InputError):
    """Evaluation events were asked for without a frozen plan, or the study no longer matches its plan."""


class OperationError(KvdriftError):
    """The work failed although the input was right."""


class DamagedStoreError(OperationError):
    """A store contradicts itself: log files are damaged or lost, or rows have lost what they were made from."""


class ControlError(OperationError):
    """A full-retention control has delta or f other than 0, and must have exactly 0."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none: libraries add causes and hints below."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error line: the known name nearest to ``name``, or all known names if none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(names)}"
