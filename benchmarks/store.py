"""Measure appending to a store with many units, querying and opening it, as runs leave it and after a compaction.

    python -m benchmarks.store                          # 1,000, 10,000 and 100,000 units, the largest takes longest
    python -m benchmarks.store --units 500 5000 --json

Each part runs in a separate process; of a part shorter than a second, the fastest of 8 runs counts. Ratios are CPU
seconds of the smallest size divided by those of the row's size; no part but ``verify``, which reads every row, may
take 1.5 times as long at 100,000 units as at 1,000. All documents have answers, and all pairs are scored. A commit has
the 48 units of 16 documents. A run makes some commits, derives, scores and joins small files.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.measurement import Measured, Measurement, benchmark_parser, measure, mib, run
from benchmarks.synthetic_study import ONE_DOCUMENT, document_row, drawn_units, new_study
from kvdrift.commands.status import status_lines
from kvdrift.log.store import Store
from kvdrift.schema.tables import SCORES
from kvdrift.sql.catalog import open_views
from kvdrift.sql.catalog_file import write_catalog
from kvdrift.transforms.compaction import compact
from kvdrift.transforms.pipeline import run_derivation
from kvdrift.verification.whole_store import verify as verified

ANSWERED = {"answers": ["a", "b"], "scoring": "all"}
DOCUMENTS_PER_COMMIT, COMMITS_PER_RUN = 16, 20
REPETITIONS = 8  # a part shorter than a second runs so often
# The documents whose units are appended to a store, as runs leave the store and after a compaction.
APPENDED = [document_row(1, 9_999_999 - number) | ANSWERED for number in range(2 * REPETITIONS)]

Record = dict[str, Any]


def append(location: str, document: Record) -> float:
    """Append three units of a document; return the number of appended units."""
    return Store.open(location).append_units(list(drawn_units([document], ONE_DOCUMENT, 0)))


def status(location: str) -> float:
    """Do what ``kvdrift status`` does; return the number of its lines."""
    return len(list(status_lines(Store.open(location))))


def derive(location: str) -> float:
    """Derive a store that has nothing to derive; return the number of derived units, 0."""
    return run_derivation(location).units


def views(location: str) -> float:
    """Open a store's views and close them; return 0."""
    with open_views(Store.open(location)):
        return 0


def catalogue(location: str) -> float:
    """Write the store's catalogue; return its size in MiB."""
    return mib(write_catalog(Store.open(location)).stat().st_size)


def verify(location: str) -> float:
    """Run all checks; return their number. No check may find a fault."""
    checks = [*verified(Store.open(location))]
    if faults := [fault for check in checks for fault in check.faults]:
        raise SystemExit(f"{location}: {len(faults)} faults, {faults[0]}")
    return len(checks)


PARTS = (status, derive, views, catalogue, append)  # of both forms


def write(location: str | Path, units: int) -> None:
    """Make a store of at least ``units`` units, like that of many consecutive runs."""
    documents = [document_row(1, number) | ANSWERED for number in range(-(-units // ONE_DOCUMENT.actions))]
    store = new_study(str(location), ONE_DOCUMENT, 0, [*documents, *APPENDED])
    for number, first in enumerate(range(0, len(documents), DOCUMENTS_PER_COMMIT), 1):
        part = documents[first : first + DOCUMENTS_PER_COMMIT]
        made = list(drawn_units(part, ONE_DOCUMENT, 0))
        store.append_units(made)
        scores = [score for unit in made for score in _scores(unit.record)]
        store.append_rows("scores", pa.Table.from_pylist(scores, schema=SCORES.schema))
        if number % COMMITS_PER_RUN == 0 or first + DOCUMENTS_PER_COMMIT >= len(documents):
            run_derivation(store.location)
            store.gather()


def _scores(record: Record) -> Iterator[Record]:
    names = ("study", "model", "doc", "action")
    for replicate in range(ONE_DOCUMENT.replicates):
        yield {name: record[name] for name in names} | {
            "action_revision": 0, "replicate": replicate, "scoring": "all", "score_x": 1.0, "score_y": 1.0,
            "span_first": 1, "span_last": 1, "document_revision": 0,
        }  # fmt: skip


def compact_written(folder: Path, _units: int) -> None:
    """Compact the store that ``write`` made."""
    compact(Store.open(folder))


def measure_sizes(folder: Path, sizes: list[int]) -> Iterator[tuple[str, str, int, Any]]:
    """Yield for each part its name, the store's form (compacted or not) and number of units, and the measurement."""
    for units in sizes:
        store, new = folder / str(units), iter(APPENDED)
        for form, prepare in (("as runs leave it", write), ("compacted", compact_written)):
            measure(prepare, store, units)  # in a separate process, so that its memory does not count for the parts
            for part in (verify, *PARTS) if form == "compacted" else PARTS:
                yield part.__name__, form, units, _fastest(part, str(store), new)


def _fastest(part: Callable[..., float], store: str, new: Iterator[Record]) -> Measured[float]:
    """Return the measurement of a part with the fewest CPU seconds, of one if it takes a second or more.

    A call of a tenth of a second varies by a fifth, and the least of several calls by a few per cent. Each ``append``
    takes the next of the ``new`` documents.
    """
    measured: list[Measured[float]] = []
    while len(measured) < REPETITIONS and (not measured or measured[0].cpu_seconds < 1):
        measured.append(measure(part, store, *([next(new)] if part is append else [])))
    return min(measured, key=lambda one: one.cpu_seconds)


def measure_all(options: argparse.Namespace, folder: Path) -> Iterator[Measurement]:
    """Measure all parts on stores of all sizes; ratios compare with the smallest size."""
    smallest = dict[tuple[str, str], tuple[int, float]]()
    for part, form, units, measured in measure_sizes(folder, sorted(options.units)):
        fewest, seconds = smallest.setdefault((part, form), (units, measured.cpu_seconds))
        peer = (None, None) if units == fewest else (f"{fewest:,} units", seconds / measured.cpu_seconds)
        size = {f"catalogue_mib_{form}_{units}".replace(" ", "_"): round(measured.value, 2)}
        yield (
            [measured.row(f"{part}, {form}, {units:,} units", None, *peer)], size if part == "catalogue" else {},
        )  # fmt: skip


if __name__ == "__main__":
    parser = benchmark_parser("store", "Appending, asking and opening at several sizes, as left by runs and compacted.")
    parser.add_argument("--units", type=int, nargs="+", default=[1_000, 10_000, 100_000], metavar="N")
    parser.add_argument("--folder", type=Path, help="where the stores are written; a temporary folder by default")
    run(parser, "units", measure_all)
