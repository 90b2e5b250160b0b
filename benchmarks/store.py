"""What a store costs that has many units: appending, asking, opening, before and after ``kvdrift compact``.

    python -m benchmarks.store                          # 1,000, 10,000 and 100,000 units, which take longest
    python -m benchmarks.store --units 500 5000 --json

Measured for each size, before and after a compaction, each part in a process of its own:

- ``append``: a store is opened, and three units of a new document are appended;
- ``status``: all lines of ``kvdrift status``;
- ``derive``: ``kvdrift derive`` where nothing is to do, without its catalogue;
- ``views``: the views are opened;
- ``catalogue``: ``catalog.duckdb`` is written;
- ``verify``: all checks of ``kvdrift verify``, of the compacted store alone, which is sound. It reads every row, so its
  cost is that of the units: its ratio is to be no less than that of the sizes.

Ratios are of CPU seconds: those of the smallest size by those of this one. After a compaction all others are to stay
near 1; before it they are to be no less than the ratio of the sizes.

All documents have answers, and all pairs are scored. The store is written by hand, since only names and logs count
here: before the compaction all units of a table are one file under many names, and a commit has 48 units, as a run of
16 documents makes them. What is compacted has rows of its own for each unit.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from log.appends import DERIVED, conform_unit, unit_path
from log.compaction.members import Member
from log.compaction.packs import put_pack, rewriting

from benchmarks.measurement import BenchmarkRow, benchmark_parser, measure, mib, show
from benchmarks.synthetic_study import Sizes, action_row, document_row, drawn_units, study_row
from benchmarks.written_log import write_commit
from kvdrift.commands.status import status_lines
from log.delta.folder import DeltaFolder
from log.delta.parquet_files import StoredFile, content_digest, encode_parquet
from log.store import Store
from schema.tables import ACTIONS, DOCUMENTS, PLAIN, SCORES, STUDIES, UNITS
from sql.catalog import open_views, write_catalog
from transforms.compaction import compact
from transforms.pipeline import run_derivation
from transforms.segments import derived_rows
from verification.whole_store import verify as verified

SIZES = Sizes(strata=1, documents=1, actions=3, replicates=2, horizon=8)  # of one document
ANSWERED = {"answers": ["a", "b"], "scoring": "all"}
APPENDED = document_row(1, 9_999_999) | ANSWERED
UNITS_PER_COMMIT = 48
SEGMENTS_PER_COMMIT = 2048

Record = dict[str, Any]


def append(location: str) -> float:
    """Append three units; return their number."""
    return Store.open(location).append_units(list(drawn_units([APPENDED], SIZES, 0)))


def status(location: str) -> float:
    """Return the number of lines."""
    return len(list(status_lines(Store.open(location))))


def derive(location: str) -> float:
    """Derive nothing."""
    return run_derivation(location).segments


def views(location: str) -> float:
    """Open the views and close them."""
    with open_views(Store.open(location)):
        return 0


def catalogue(location: str) -> float:
    """Return the size of the catalogue in MiB."""
    return mib(write_catalog(Store.open(location)).stat().st_size)


def verify(location: str) -> float:
    """Return the number of checks, none of which finds a fault."""
    checks = [*verified(Store.open(location))]
    if faults := [fault for check in checks for fault in check.faults]:
        raise SystemExit(f"{location}: {len(faults)} faults, {faults[0]}")
    return len(checks)


PARTS = (status, derive, views, catalogue, append)  # of both forms


class WrittenStore:
    """A store of many units, written by hand."""

    def __init__(self, folder: Path, units: int) -> None:
        """Name the units; nothing is written."""
        self.folder, self.units = folder, units
        self.documents = [document_row(1, number) | ANSWERED for number in range(-(-units // SIZES.actions))]
        record, self.events = conform_unit(next(drawn_units(self.documents[:1], SIZES, 0)))
        names = ((row["doc"], action) for row in self.documents for action in SIZES.action_names)
        self.records = [record | {"doc": doc, "action": action} for doc, action in names][:units]
        self.data = encode_parquet(self.events)
        self.paths = [unit_path(record, content_digest(self.data)) for record in self.records]

    def write(self) -> None:
        """Write events, units, trajectories, steps and scores, each unit in files of its own."""
        store = Store.create(self.folder)
        store.append_rows("documents", pa.Table.from_pylist([*self.documents, APPENDED], schema=DOCUMENTS.schema))
        store.append_rows("studies", pa.Table.from_pylist([study_row(SIZES, 0)], schema=STUDIES.schema))
        actions = [action_row(name) for name in SIZES.action_names]
        store.append_rows("actions", pa.Table.from_pylist(actions, schema=ACTIONS.schema))
        self._write_files("events", self.data, self.events.num_rows, UNITS_PER_COMMIT)
        for table, rows in derived_rows(self.paths[0], self.events).items():
            self._write_files(table, encode_parquet(rows), rows.num_rows, SEGMENTS_PER_COMMIT)
        rows = [record | {"path": path} for record, path in zip(self.records, self.paths, strict=True)]
        for version, first in enumerate(range(0, self.units, UNITS_PER_COMMIT), 1):
            part = pa.Table.from_pylist(rows[first : first + UNITS_PER_COMMIT], schema=UNITS.schema)
            self._write_rows("units", version, part)
        for first in range(0, self.units, UNITS_PER_COMMIT):
            scores = pa.Table.from_pylist(list(self._scores(first)), schema=SCORES.schema)
            self._write_rows("scores", 1 + first // UNITS_PER_COMMIT, scores)
        for table in ("events", "units", "scores", *DERIVED[PLAIN]):
            DeltaTable(str(self.folder / table)).create_checkpoint()

    def _scores(self, first: int) -> Iterator[Record]:
        """Scores of the units of one commit."""
        names = ("study", "model", "doc", "action", "action_revision")
        for record in self.records[first : first + UNITS_PER_COMMIT]:
            for replicate in range(SIZES.replicates):
                yield {name: record[name] for name in names} | {
                    "replicate": replicate, "scoring": "all", "score_x": 1.0, "score_y": 1.0,
                    "span_first": 1, "span_last": 1,
                }  # fmt: skip

    def _write_rows(self, table: str, version: int, rows: pa.Table) -> None:
        data = encode_parquet(rows)
        path = f"{content_digest(data)}.parquet"
        (self.folder / table / path).write_bytes(data)
        write_commit(self.folder / table, version, [StoredFile(path, len(data), rows.num_rows)])

    def _write_files(self, table: str, data: bytes, rows: int, per_commit: int) -> None:
        file = self.folder / f"{table}.parquet"
        file.write_bytes(data)
        for version, first in enumerate(range(0, self.units, per_commit), 1):
            paths = self.paths[first : first + per_commit]
            for path in paths:
                target = self.folder / table / path
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(file, target)
            write_commit(self.folder / table, version, (StoredFile(path, len(data), rows) for path in paths))
            if version % 20 == 0:
                file.unlink()
                file.write_bytes(data)  # a file has so many names at most

    def compact(self) -> None:
        """Put all units in one file; everything else is done as ``kvdrift compact`` does it."""
        folder = DeltaFolder(self.folder)
        members = [
            (Member(path, self.events.num_rows, record), self._events_of(record))
            for record, path in zip(self.records, self.paths, strict=True)
        ]
        file = put_pack(folder, PLAIN, members)
        folder.commit("events", lambda loaded: rewriting(loaded, file, self.paths), alone=True)
        compact(Store.open(self.folder))

    def _events_of(self, record: Record) -> pa.Table:
        events = self.events
        for name in ("doc", "action"):
            at, field = events.schema.get_field_index(name), events.schema.field(name)
            events = events.set_column(at, field, pa.repeat(pa.scalar(record[name]), events.num_rows))
        return events


def write(folder: Path, units: int) -> None:
    """Write a store, each unit in files of its own."""
    WrittenStore(folder, units).write()


def compact_written(folder: Path, units: int) -> None:
    """Compact such a store."""
    WrittenStore(folder, units).compact()


def measure_sizes(folder: Path, sizes: list[int]) -> Iterator[tuple[str, str, int, Any]]:
    """Yield each part's name, whether the store is compacted, its units and what was measured."""
    for units in sizes:
        store = folder / str(units)
        for form, prepare in (("as written", write), ("compacted", compact_written)):
            measure(prepare, store, units)  # in a process of its own, whose memory is not that of the parts
            for part in (verify, *PARTS) if form == "compacted" else PARTS:
                yield part.__name__, form, units, measure(part, str(store))


def main() -> None:
    """Measure, and print ratios."""
    parser = benchmark_parser("store", "Appending, asking and opening at several sizes, before and after a compaction.")
    parser.add_argument("--units", type=int, nargs="+", default=[1_000, 10_000, 100_000], metavar="N")
    parser.add_argument("--folder", type=Path, help="where the stores are written; a temporary folder by default")
    options = parser.parse_args()
    rows, smallest = list[BenchmarkRow](), dict[tuple[str, str], tuple[int, float]]()
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for part, form, units, measured in measure_sizes(Path(folder), sorted(options.units)):
            fewest, seconds = smallest.setdefault((part, form), (units, measured.cpu_seconds))
            peer = (None, None) if units == fewest else (f"{fewest:,} units", seconds / measured.cpu_seconds)
            rows.append(measured.row(f"{part}, {form}, {units:,} units", None, *peer))
            if part == "catalogue":
                facts[f"catalogue_mib_{form}_{units}".replace(" ", "_")] = round(measured.value, 2)
    show("store: costs by size", rows, "units", facts, as_json=options.json)


if __name__ == "__main__":
    main()
