"""Units: the commits that make them visible, and the rows of ``units``, which are the records in their footers."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from log.appends import (
    UNIT_FOOTER,
    Span,
    Unit,
    conform_unit,
    is_compacted,
    is_foreign,
    span_of_path,
    span_of_record,
    unit_count,
    unit_name,
    unit_path,
)
from log.commits import Commit, guards
from log.compaction.members import members_of, originals
from log.compaction.rows import ROW_GROUP_ROWS
from log.delta.folder import DeltaFolder
from log.delta.snapshot import Snapshot
from log.durability import side_by_side
from log.kept_sets import COMPARED, check_alike
from log.parquet_files import StoredFile, content_digest, encode_parquet
from schema.errors import InputError
from schema.tables import GROUP_KEY, UNITS

_SPAN_COLUMNS = (*GROUP_KEY, "first_replicate", "replicates", "estimator", "action_revision")


class UnitRows:
    """The table ``units`` of a store."""

    def __init__(self, folder: DeltaFolder) -> None:
        self._folder = folder
        self._groups: dict[str, frozenset[int]] = {}  # by path; see ``_groups_of``

    def stored_and_missing(self) -> tuple[Snapshot, pa.Table]:
        """Return the table, and the rows that it lacks for visible events.

        Raises:
            InputError: A file is damaged.
            DamagedStoreError: There are rows whose events are lost.

        """
        units = self._folder.load("units")
        paths = self._folder.load("events").paths()
        own = [path for path in paths if not is_foreign(path)]
        rows: list[dict[str, Any]] = []
        # Equal counts mean nothing is missing, without a look into any file, as every unit is one row.
        if len(own) < len(paths) or unit_count(own) != units.count_rows():
            known = set(self._folder.read(units, ["path"]).column("path").to_pylist())
            compacted = {
                member.path: member for path in own if is_compacted(path) for member in members_of(self._folder, path)
            }
            there = {path for path in own if not is_compacted(path)} | compacted.keys()
            if len(own) == len(paths) and (lost := known - there):
                raise self._folder.damaged(f"'units' has a row of {min(lost)}, which 'events' has lost")
            for path in sorted(there - known):
                member = compacted.get(path) or members_of(self._folder, path)[0]
                rows.append({**member.record, "path": path})
        return units, pa.Table.from_pylist(rows, schema=UNITS.schema)

    def append(self, records: Sequence[dict[str, Any]], since: int | None) -> int:
        """Append the rows that the table lacks; return how many.

        Args:
            records: Rows that were lacking at a version.
            since: That version; None where it is not known.

        """
        new: list[dict[str, Any]] = []

        def attempt(units: Snapshot) -> Commit | None:
            nonlocal new
            there = set[Span]() if units.version == since else self.spans(units, records)
            new = [row for row in records if span_of_record(row) not in there]
            if not new:
                return None
            data = encode_parquet(pa.Table.from_pylist(new, schema=UNITS.schema))
            file = StoredFile(f"{content_digest(data)}.parquet", len(data), len(new))
            self._folder.put("units", file.path, data)
            spans = [span_of_record(row) for row in new]
            return Commit([file], guards((span.app_id, span.count) for span in spans))

        if records:
            self._folder.commit("units", attempt, since=since)
        return len(new)

    def spans(self, units: Snapshot, of: Iterable[Mapping[str, Any]]) -> set[Span]:
        """Read the spans of the rows that have the study, model, document and action of one of some records."""
        return set(map(span_of_record, self._rows_of(units, of, _SPAN_COLUMNS)))

    def check_alike(self, events: Snapshot, new: Sequence[Mapping[str, Any]]) -> None:
        """Check that new units keep and read what the stored ones of their documents, actions and revisions do.

        Rows are read only if a document that gets units under an action may have some already.

        Raises:
            UnlikeUnitsError: A new unit does not.

        """
        paths = events.paths()
        groups = {span_of_record(record).group for record in new}
        may_have = any(map(is_compacted, paths)) or any(True for _ in spans_in(paths, groups))
        stored = self._rows_of(self._folder.load("units"), new, COMPARED) if may_have else []
        check_alike([*stored, *new])

    def _rows_of(
        self, units: Snapshot, of: Iterable[Mapping[str, Any]], columns: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Read the rows that have the study, model, document and action of one of some records."""
        wanted = {hash(tuple(row[name] for name in GROUP_KEY)) for row in of}
        files = {file.path: file for file in units.files()}
        groups = self._groups_of(units, [path for path, file in files.items() if file.rows <= ROW_GROUP_ROWS])
        paths = [path for path in files if path not in groups or not wanted.isdisjoint(groups[path])]
        if not paths or not wanted:
            return []
        names = {name: {row[name] for row in of} for name in GROUP_KEY}
        same = [pc.field(name).isin(pa.array(values, pa.string())) for name, values in names.items()]
        first, last = min(names["doc"]), max(names["doc"])
        # The bounds tell Arrow which row groups of a large file, which is sorted, need not be read.
        where = (pc.field("doc") >= first) & (pc.field("doc") <= last) & same[0] & same[1] & same[2] & same[3]
        found: list[dict[str, Any]] = self._folder.read(units, columns, where=where, paths=paths).to_pylist()
        return found

    def _groups_of(self, units: Snapshot, paths: Iterable[str]) -> dict[str, frozenset[int]]:
        """Return the hashes of the groups that small files have rows of: a writer of new ones reads none of their rows.

        What was read of a file is kept, since a file does not change.
        """
        known = self._groups
        found = {path: known[path] if path in known else self._read_groups(units, path) for path in paths}
        self._groups = found
        return found

    def _read_groups(self, units: Snapshot, path: str) -> frozenset[int]:
        rows = self._folder.read(units, GROUP_KEY, paths=[path])
        return frozenset(map(hash, zip(*(rows[name].to_pylist() for name in GROUP_KEY), strict=True)))

    def missing(self, events: Snapshot, given: Mapping[Span, Mapping[str, Any]], *, ahead: bool = False) -> list[Span]:
        """Find the given spans that ``events`` lacks.

        Args:
            events: The table.
            given: Records by span.
            ahead: Whether there may be rows of units whose events are lost: then the footers of compacted files tell
                which units these have.

        Raises:
            InputError: One overlaps a stored or another given one of other bounds.

        """
        paths = events.paths()
        stored = set(spans_in(paths, {span.group for span in given}))
        compacted = [path for path in paths if "/" not in path]
        if compacted and not ahead:
            stored |= self.spans(self._folder.load("units"), given.values())
        elif compacted:
            stored |= set(filter(None, map(span_of_path, originals(self._folder, "events", compacted))))
        groups = defaultdict[str, list[Span]](list)
        for span in (*stored, *given):
            groups[span.group].append(span)
        for span, record in given.items():
            for other in groups[span.group]:
                if other != span and other.overlaps(span):
                    raise InputError(
                        f"unit {unit_name(record)} overlaps the replicates "
                        f"[{other.first}, {other.first + other.count}) of the same action, stored or given too"
                    )
        return [span for span in given if span not in stored]


class UnitCommits:
    """Makes units visible: their events by one commit, and then their rows.

    Once the rows are known to be whole, only a kill between the two leaves one out.
    """

    def __init__(self, folder: DeltaFolder, rows: UnitRows) -> None:
        self._folder, self._rows = folder, rows
        self._healed = False

    def append(self, units: Sequence[Unit]) -> int:
        """Append units; ``Store.append_units`` says what of them and what is raised."""
        given: dict[Span, tuple[dict[str, Any], pa.Table]] = {}
        for unit in units:
            record, events = conform_unit(unit)
            given.setdefault(span_of_record(record), (record, events))
        if not self._healed:
            self.reconcile()
        written: dict[Span, StoredFile] = {}

        def put(spans: Sequence[Span]) -> list[StoredFile]:
            new = [span for span in spans if span not in written]
            written.update(zip(new, side_by_side(lambda span: self._put(*given[span]), new), strict=True))
            return [written[span] for span in spans]

        return self._commit({span: record for span, (record, _) in given.items()}, put)

    def adopt(self, files: Iterable[tuple[StoredFile, dict[str, Any]]]) -> int:
        """Make files in place visible; ``Store.adopt_units`` says more."""
        given = {span_of_record(record): (file, record) for file, record in files}
        stored = set(map(span_of_path, originals(self._folder, "events", self._folder.load("events").paths())))
        free = {
            span: record
            for span, (_, record) in given.items()
            if not any(other is not None and other.overlaps(span) for other in stored)
        }
        return self._commit(free, lambda spans: [given[span][0] for span in spans], ahead=True)

    def reconcile(self, prepare: Callable[[], None] = lambda: None) -> int:
        """Append the rows that a killed writer left out; ``prepare`` is called before. Return how many."""
        units, rows = self._rows.stored_and_missing()
        if rows.num_rows:
            prepare()
        count = self._rows.append(rows.to_pylist(), units.version)
        self._healed = True
        return count

    def _commit(
        self,
        records: Mapping[Span, dict[str, Any]],
        put: Callable[[Sequence[Span]], list[StoredFile]],
        *,
        ahead: bool = False,
    ) -> int:
        """Make the units that the store lacks visible by one commit, then their rows; return how many.

        ``put`` gives units' files, in place. ``ahead`` says that there may be rows of units whose events are lost.
        """
        files: dict[Span, StoredFile] = {}
        since = None

        def attempt(events: Snapshot) -> Commit | None:
            nonlocal since
            if not ahead:  # nobody writes a unit's row before its events are there
                since = self._folder.load("units").version
            new = self._rows.missing(events, records, ahead=ahead)
            if not ahead:  # what is in place already is adopted as it is
                self._rows.check_alike(events, [records[span] for span in new])
            files.clear()
            files.update(zip(new, put(new), strict=True))
            groups = ((span.group, span.first + span.count) for span in new)
            ids = guards([*groups, *((span.app_id, span.count) for span in new)])
            return Commit(list(files.values()), ids) if new else None

        self._healed = False  # until the rows are there too
        count = self._folder.commit("events", attempt)
        self._rows.append([{**records[span], "path": file.path} for span, file in files.items()], since)
        self._healed = True
        return count

    def _put(self, record: dict[str, Any], events: pa.Table) -> StoredFile:
        data = encode_parquet(events, {UNIT_FOOTER: json.dumps(record)})
        path = unit_path(record, content_digest(data))
        self._folder.put("events", path, data)
        return StoredFile(path, len(data), events.num_rows)


def spans_in(paths: Iterable[str], groups: Collection[str]) -> Iterator[Span]:
    """Yield the spans of units of some groups that have files of their own."""
    for path in paths:
        name = path.rpartition("/")[2].removeprefix("swrb-")
        if name[:16] in groups and (span := span_of_path(path)):
            yield span


def check_units(folder: DeltaFolder, version: int | None, events: Sequence[str]) -> None:
    """Check that ``units``, at a version, has no more rows than there are units in events files; reads logs alone.

    Raises:
        DamagedStoreError: There are rows whose events are lost.

    """
    rows = folder.load("units", version).count_rows()
    if any(map(is_foreign, events)) or rows <= unit_count(events):
        return
    if rows > unit_count(folder.load("events").paths()):  # they may have come since
        raise folder.damaged(f"'units' has {rows} rows, 'events' {unit_count(events)} units: events are lost")
