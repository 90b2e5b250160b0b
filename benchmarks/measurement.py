"""The harness of benchmarks: the command line, the measured parts beside their peers, and the printed table or JSON."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

_Value = TypeVar("_Value")

_TO_BYTES = 1024  # Linux gives ru_maxrss in KiB


@dataclass(frozen=True)
class Measured(Generic[_Value]):
    """A call's result and its cost."""

    value: _Value
    seconds: float  # Wall seconds, without the imports
    cpu_seconds: float  # CPU seconds, without the imports
    peak_bytes: int  # Peak of the process's resident memory, with the interpreter and the imported libraries

    def row(
        self, part: str, rate: float | None = None, peer: str | None = None, ratio: float | None = None
    ) -> BenchmarkRow:
        """Return a table's row for this call of the part ``part``; ``ratio`` compares it with ``peer``."""
        return BenchmarkRow(part, self.seconds, self.cpu_seconds, mib(self.peak_bytes), rate, peer, ratio)


def measure(function: Callable[..., _Value], *arguments: Any) -> Measured[_Value]:
    """Call a module-level function once in a new process, which inherits no other part's peak memory or caches."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_call, function, arguments).result()


def _call(function: Callable[..., _Value], arguments: tuple[Any, ...]) -> Measured[_Value]:
    begun, cpu = time.perf_counter(), time.process_time()
    value = function(*arguments)
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu
    return Measured(value, seconds, cpu_seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _TO_BYTES)


@dataclass(frozen=True)
class BenchmarkRow:
    """One row of a benchmark's table; a field is None where the column does not apply."""

    part: str  # The measured part
    seconds: float
    cpu_seconds: float | None = None
    peak_mib: float | None = None
    rate: float | None = None  # The benchmark's unit per second
    peer: str | None = None  # The peer of the comparison
    ratio: float | None = None  # How many times as fast as the peer the part is


Measurement: TypeAlias = tuple[Sequence[BenchmarkRow], dict[str, Any]]
"""Rows of a table, and the facts that are printed below it."""


def benchmark_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return the command line of ``python -m benchmarks.NAME``, with the option ``--json``."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(
    parser: argparse.ArgumentParser, unit: str, measure_all: Callable[[argparse.Namespace, Path], Iterable[Measurement]]
) -> dict[str, Any]:
    """Read the command line, measure, and print rows and facts as a table or as one JSON object; return the facts.

    ``unit`` is the unit of rates. ``measure_all`` yields measurements, given the options and a folder that is removed
    afterwards. That folder is made in the one that the option ``folder`` names, if there is such an option.
    """
    options, title = parser.parse_args(), parser.prog.rpartition(".")[2]
    if (named := getattr(options, "folder", None)) is not None:
        Path(named).mkdir(parents=True, exist_ok=True)
    rows, facts = list[BenchmarkRow](), dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="kvdrift-benchmark-", dir=getattr(options, "folder", None)) as folder:
        for more, more_facts in measure_all(options, Path(folder)):
            rows, facts = [*rows, *more], facts | more_facts
    facts |= {"processors": os.cpu_count(), "load_average": [round(load, 2) for load in os.getloadavg()]}
    if options.json:
        print(json.dumps({"benchmark": title, "unit": unit, **facts, "rows": [asdict(row) for row in rows]}))
        return facts
    width = max((len(row.part) for row in rows), default=0)
    print(title)
    if rows:
        print(f"{'':{width}}    seconds        CPU  peak MiB  {unit + '/s':>14}  ratio")
    for row in rows:
        cells = [
            _cell(row.seconds, 11, 3), _cell(row.cpu_seconds, 11, 3), _cell(row.peak_mib, 10, 0),
            _cell(row.rate, 16, 0), _cell(row.ratio, 7, 2) + (f" x {row.peer}" if row.peer else ""),
        ]  # fmt: skip
        print(f"{row.part:{width}}{''.join(cells)}".rstrip())
    for name, value in facts.items():
        print(f"{name.replace('_', ' ')}: {value}")
    return facts


def _cell(value: float | None, width: int, digits: int) -> str:
    return " " * width if value is None else f"{value:{width},.{digits}f}"


def mib(size: int) -> float:
    """Return bytes as MiB."""
    return size / 2**20
