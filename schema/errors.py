"""Every error that kvdrift raises on purpose.

KvdriftError               one line, made to be read by a person
├── InputError             the user's mistake: what is wrong, where, what would be right (exit code 2)
│   ├── PlanError          an evaluation without its frozen plan, or against another one
│   ├── UnlikeUnitsError   units of one action and document that keep or read unlike entries
│   └── MissingStoreError  a place where there is no store yet
└── OperationError         the work failed though the input was right (exit code 1)
    ├── ControlError       a full-retention control with delta or f other than 0
    ├── NobodyLeftError    an endpoint or a cluster that is gone, so that all work would fail
    └── DamagedStoreError  a store that contradicts itself: commits are damaged or lost
"""

from __future__ import annotations

import difflib
import errno
import pickle
import re
import sys
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Final, TypeVar

_LONGEST_LINE: Final = 2_000  # characters; the longest lists of known names take about 1,500
_LONGEST_END: Final = 500  # of them at the line's end


class KvdriftError(Exception):
    """Base of all errors below; ``exit_code`` is what the command returns.

    Args:
        line: What is wrong, where, and what would be right. A line that echoes a long value is shortened.

    """

    exit_code = 1

    def __init__(self, line: str) -> None:
        super().__init__(shortened(line))


class InputError(KvdriftError):
    """Something the user gave is wrong: a file, a field, a value."""

    exit_code = 2


class PlanError(InputError):
    """Evaluation events were asked for without a frozen plan, or the study no longer matches its plan."""


class UnlikeUnitsError(InputError):
    """Units of one document, action, revision and estimator keep or read unlike prompt entries."""


class MissingStoreError(InputError):
    """There is no store where one was looked for."""


class OperationError(KvdriftError):
    """The work failed although the input was right."""


class NobodyLeftError(OperationError):
    """What generates is gone: other documents would fail, too."""


class DamagedStoreError(OperationError):
    """A store contradicts itself: log files are damaged or lost, or rows have lost what they were made from."""


class ControlError(OperationError):
    """A full-retention control has delta or f other than 0, and must have exactly 0."""


Tried = TypeVar("Tried", bound=Hashable)

_UNREADABLE: Final[tuple[type[Exception], ...]] = (
    OSError, ValueError, RecursionError, ArithmeticError, MemoryError, EOFError, LookupError, NotImplementedError,
    pickle.UnpicklingError,
)  # fmt: skip

_DISK_FAULTS = re.compile("No space left on device|Disk quota exceeded|Input/output error")
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none: libraries add causes and hints below.

    delta-rs puts the operating system's words last, below where it was: these are returned then.
    """
    lines = str(error).strip().splitlines()
    causes = [line.rpartition("↳")[2] for line in lines if "↳" in line]
    return re.sub(r"\x1b\[\d*m", "", (causes or lines or [type(error).__name__])[-1 if causes else 0]).strip()


@contextmanager
def reading(unread: str, *others: type[Exception]) -> Iterator[None]:
    """Make one line of whatever goes wrong while a file of the user's is read in the block.

    Files may be nested without end, hold numbers of a million digits, or say that they are larger than the memory;
    each library says so by exceptions of its own.

    Args:
        unread: How the line begins: the file, the line in it if known, and what the file is not, as in
            ``study.toml: cannot be read as TOML``.
        others: Exceptions of the library besides those that Python itself raises.

    Raises:
        InputError: The file cannot be read.

    """
    expected = _UNREADABLE + others
    try:
        yield
    except KvdriftError:
        raise
    except expected as error:
        raise InputError(f"{unread}: {_said_by(error)}") from error


def _said_by(error: BaseException) -> str:
    """What an exception says of a file's content, without its place in our code."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, MemoryError):
        return "larger than the memory"
    if isinstance(error, pickle.UnpicklingError):
        return "a pickle that is damaged, or that would run code"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    said, name = first_line(error), type(error).__name__
    return said if isinstance(error, OSError | ValueError) or said == name else f"{name}: {said}"


def failure_of(error: BaseException, part: object) -> str:
    """Name an exception in code that is not ours: what it is, and where in the file of the part's class.

    Where it came through no line of that file, the line that raised it stands for one.
    """
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(sys.modules.get(type(part).__module__), "__file__", None)
    place = ([frame for frame in frames if frame.filename == file] or frames)[-1]
    name, said = type(error).__name__, first_line(error)
    return f"{name if said == name else f'{name}: {said}'} ({place.filename}, line {place.lineno})"


def tried_once(trial: Callable[[Tried], str | None]) -> Callable[[Tried], str | None]:
    """Decorate a trial of what a machine may not have or cannot build: it is made once for each argument.

    The trial returns what is wrong in a line, and None where nothing is; so does what is decorated, where a module that
    is not installed and any other exception count as what is wrong.
    """

    @cache
    @wraps(trial)
    def fault(argument: Tried) -> str | None:
        try:
            return trial(argument)
        except ModuleNotFoundError as error:
            return f"{error.name} is not installed"
        except Exception as error:  # noqa: BLE001 - of compilers, linkers, drivers, the file system
            return f"{type(error).__name__}: {first_line(error)}"

    return fault


def is_disk_fault(error: BaseException) -> bool:
    """Tell whether an error says that a disk is full or broken, which is no mistake of the user's."""
    return _DISK_FAULTS.search(str(error)) is not None


def is_forbidden(error: OSError) -> bool:
    """Tell whether an error says that something may not be written, as in a read-only file system."""
    return error.errno in _FORBIDDEN


def shortened(line: str) -> str:
    """Return a line without its middle if nobody could read it; its end often says what would be right."""
    if len(line) <= _LONGEST_LINE:
        return line
    begin, end = line[: _LONGEST_LINE - _LONGEST_END], line[-_LONGEST_END:]
    return f"{begin}… {len(line) - _LONGEST_LINE:,} characters …{end}"


def printable(text: str) -> str:
    """Return a text as one line without control characters: names in it may come from files of others."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def alike(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that ``name`` may stand for: equal but for zeros before a number, else the most alike.

    None if no known name is like it.
    """
    names = sorted(known)
    same = [other for other in names if _without_zeros(other) == _without_zeros(name)]
    return next(iter(same or difflib.get_close_matches(name, names, n=1, cutoff=0.5)), None)


def _without_zeros(name: str) -> str:
    return re.sub(r"(?<!\d)0+(?=\d)", "", name)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error line: the known name nearest to ``name``, or all known names if none is near."""
    names = sorted(known)
    close = alike(name, names)
    return f"did you mean '{close}'?" if close else f"known: {', '.join(names)}"
