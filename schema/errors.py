"""Every error that kvdrift raises on purpose.

KvdriftError               one line that a person can read
├── InputError             the user's mistake: what is wrong, where, what would be right (exit code 2)
│   ├── PlanError          an evaluation without a frozen plan, or against another plan
│   ├── UnlikeUnitsError   units of one action and document that keep or read different entries
│   └── MissingStoreError   no store at this place
└── OperationError         the work failed although the input was right (exit code 1)
    ├── ControlError       a full-retention control with delta or f other than 0
    ├── NobodyLeftError    an endpoint or a cluster is gone, so that all work would fail
    └── DamagedStoreError  a store that contradicts itself: commits are damaged or lost
"""

from __future__ import annotations

import difflib
import errno
import pickle
import re
import sys
import traceback
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Final, TypeVar

_LONGEST_LINE: Final = 2_000  # characters; the longest lists of known names take about 1,500
_LONGEST_END: Final = 500  # characters of the line's end that stay


class KvdriftError(Exception):
    """Base of all errors of kvdrift; the command line exits with ``exit_code``. An overlong message is shortened."""

    exit_code = 1

    def __init__(self, line: str) -> None:
        super().__init__(shortened(line))


class InputError(KvdriftError):
    """Something that the user gave is wrong: a file, a field, a value."""

    exit_code = 2


class PlanError(InputError):
    """Evaluation events were requested without a frozen plan, or the study no longer matches its plan."""


class UnlikeUnitsError(InputError):
    """Units of one document, action, revision and estimator keep or read different prompt entries."""


class MissingStoreError(InputError):
    """There is no store at the given location."""


class OperationError(KvdriftError):
    """The work failed although the input was right."""


class NobodyLeftError(OperationError):
    """The server or cluster that generates is gone, so that every further document would fail."""


class DamagedStoreError(OperationError):
    """A store contradicts itself: log files are damaged or lost, or the sources of derived rows are lost."""


class ControlError(OperationError):
    """A full-retention control has delta or f other than 0, and must have exactly 0."""


UNREADABLE: Final = (InputError, DamagedStoreError)
"""The errors of reading a stored file: it is missing, or damaged."""

Tried = TypeVar("Tried", bound=Hashable)

_UNREADABLE: Final[tuple[type[Exception], ...]] = (
    OSError, ValueError, RecursionError, ArithmeticError, MemoryError, EOFError, LookupError, NotImplementedError,
    pickle.UnpicklingError,
)  # fmt: skip

_DISK_FAULTS = re.compile("No space left on device|Disk quota exceeded|Input/output error")
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if the message is empty.

    Libraries put causes and hints below the first line. delta-rs puts the operating system's message last; if there is
    such a message, it is returned instead.
    """
    lines = str(error).strip().splitlines()
    causes = [line.rpartition("↳")[2] for line in lines if "↳" in line]
    return re.sub(r"\x1b\[\d*m", "", (causes or lines or [type(error).__name__])[-1 if causes else 0]).strip()


@contextmanager
def reading(unread: str, *others: type[Exception]) -> Iterator[None]:
    """Turn an exception in the block, which reads a user's file, into an InputError of one line.

    A file may be nested without end, hold numbers of a million digits, or claim to be larger than the memory. Python
    reports this by exceptions that are known here; ``others`` are exceptions of the library that reads the file.
    ``unread`` begins the error's message: the file, the number of the line if known, and what failed, as in
    ``study.toml: cannot be read as TOML``.
    """
    expected = _UNREADABLE + others
    try:
        yield
    except KvdriftError:
        raise
    except expected as error:
        raise InputError(f"{unread}: {_message_of(error)}") from error


def _message_of(error: BaseException) -> str:
    """Return the message of an exception about a file's content, without the place in our code."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, MemoryError):
        return "larger than the memory"
    if isinstance(error, pickle.UnpicklingError):
        return "a pickle that is damaged, or that would run code"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    message, name = first_line(error), type(error).__name__
    return message if isinstance(error, OSError | ValueError) or message == name else f"{name}: {message}"


def failure_of(error: BaseException, part: object) -> str:
    """Describe an exception from the class of ``part``: its type, its message, and the file and line that it came from.

    The line is the innermost one in the class's own file; if the exception passed through none, the raising line.
    """
    file = getattr(sys.modules.get(type(part).__module__), "__file__", None)
    return failure_in(error, [] if file is None else [file])


def failure_in(error: BaseException, files: Collection[str]) -> str:
    """Describe an exception: its type, its message, and the file and line that it came from.

    The line is the innermost one in one of ``files``; if the exception passed through none of them, the raising line.
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = ([frame for frame in frames if frame.filename in files] or frames)[-1]
    name, message = type(error).__name__, first_line(error)
    return f"{name if message == name else f'{name}: {message}'} ({place.filename}, line {place.lineno})"


@contextmanager
def failing_as(kind: str, part: object, step: str = "") -> Iterator[None]:
    """Turn any exception in the block but kvdrift's own into an OperationError about ``part``, which users may write.

    The line names the ``kind`` of the object, such as "selector", its class and, if given, the failed step.
    """
    try:
        yield
    except KvdriftError:
        raise
    except Exception as error:
        raise OperationError(f"{kind} {type(part).__name__}: {step}{failure_of(error, part)}") from error


def tried_once(trial: Callable[[Tried], str | None]) -> Callable[[Tried], str | None]:
    """Decorate a function that tries something the machine may lack or cannot build, so that it runs once per argument.

    The function returns one line about the failure, or None for success. The decorated function does the same, and also
    turns a missing module or any other exception into such a line.
    """

    @cache
    @wraps(trial)
    def fault(argument: Tried) -> str | None:
        try:
            return trial(argument)
        except ModuleNotFoundError as error:
            return f"{error.name} is not installed"
        except Exception as error:  # noqa: BLE001 - compilers, linkers, drivers and the file system raise all sorts
            return f"{type(error).__name__}: {first_line(error)}"

    return fault


def installing(extra: str) -> str:
    """Return the command that installs an optional extra of kvdrift, both for a wheel and for a clone."""
    return f"pip install 'kvdrift[{extra}]'"


def is_disk_fault(error: BaseException) -> bool:
    """Tell whether an error says that a disk is full or broken, which is not the user's mistake."""
    return _DISK_FAULTS.search(str(error)) is not None


def is_forbidden(error: OSError) -> bool:
    """Tell whether an error says that something may not be written, as in a read-only file system."""
    return error.errno in _FORBIDDEN


def shortened(line: str) -> str:
    """Return a line without its middle if it is too long to read; the end stays, since it often names a remedy."""
    if len(line) <= _LONGEST_LINE:
        return line
    begin, end = line[: _LONGEST_LINE - _LONGEST_END], line[-_LONGEST_END:]
    return f"{begin}… {len(line) - _LONGEST_LINE:,} characters …{end}"


def printable(text: str) -> str:
    """Return a text as one line without control characters, which names from other people's files may contain."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def similar_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that ``name`` probably means; None if no known name is similar.

    A name that differs only by zeros before a number is preferred to the name that is most similar.
    """
    names = sorted(known)
    same = [other for other in names if _without_zeros(other) == _without_zeros(name)]
    return next(iter(same or difflib.get_close_matches(name, names, n=1, cutoff=0.5)), None)


def _without_zeros(name: str) -> str:
    return re.sub(r"(?<!\d)0+(?=\d)", "", name)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error line: the known name similar to ``name``, or all known names if none is similar."""
    names = sorted(known)
    close = similar_name(name, names)
    return f"did you mean '{close}'?" if close else f"known: {', '.join(names)}"
