"""Measuring one function call in a process of its own, and printing what was measured as a table or as JSON."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")

_TO_BYTES = 1024  # Linux gives ru_maxrss in KiB


@dataclass(frozen=True)
class Measured(Generic[Value]):
    """What a call returned, and what it took: wall and CPU seconds, and its process's peak of resident bytes.

    The peak includes the interpreter and the libraries that the function's module imports; the seconds do not.
    """

    value: Value
    seconds: float
    cpu_seconds: float
    peak_bytes: int


def measure(function: Callable[..., Value], *arguments: Any) -> Measured[Value]:
    """Call a function of a module once in a new process, so that no peak or cache of one part is in another's."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_call, function, arguments).result()


def _call(function: Callable[..., Value], arguments: tuple[Any, ...]) -> Measured[Value]:
    begun, cpu = time.perf_counter(), time.process_time()
    value = function(*arguments)
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu
    return Measured(value, seconds, cpu_seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _TO_BYTES)


@dataclass(frozen=True)
class Row:
    """One line of a benchmark's table, None where not applicable. ``ratio`` is against ``peer``; above 1 is better."""

    part: str
    seconds: float
    cpu_seconds: float | None = None
    peak_mib: float | None = None
    rate: float | None = None  # of the benchmark's unit per second
    peer: str | None = None
    ratio: float | None = None


def environment() -> dict[str, Any]:
    """What a reader needs to judge wall times: processors, and how busy the machine was at the end."""
    return {"processors": os.cpu_count(), "load_average": [round(load, 2) for load in os.getloadavg()]}


def show(title: str, rows: Sequence[Row], unit: str, facts: dict[str, Any], *, as_json: bool) -> None:
    """Print rows and facts as a table, or as one JSON object."""
    facts = facts | environment()
    if as_json:
        print(json.dumps({"benchmark": title, "unit": unit, **facts, "rows": [asdict(row) for row in rows]}))
        return
    width = max(len(row.part) for row in rows)
    print(title)
    print(f"{'':{width}}  seconds      CPU  peak MiB  {unit + '/s':>14}  ratio")
    for row in rows:
        cells = [
            _cell(row.seconds, 9, 3),
            _cell(row.cpu_seconds, 9, 3),
            _cell(row.peak_mib, 10, 0),
            _cell(row.rate, 16, 0),
            _cell(row.ratio, 7, 2) + (f" x {row.peer}" if row.peer else ""),
        ]
        print(f"{row.part:{width}}{''.join(cells)}".rstrip())
    for name, value in facts.items():
        print(f"{name.replace('_', ' ')}: {value}")


def _cell(value: float | None, width: int, digits: int) -> str:
    return " " * width if value is None else f"{value:{width},.{digits}f}"


def mib(size: int) -> float:
    """Bytes as MiB."""
    return size / 2**20
