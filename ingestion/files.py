"""Read event logs of other generators by whole groups.

A group is one (study, model, doc, action). ``kvdrift.ingestion.formats`` reads files; this module checks columns and
types and finds the order of the rows; ``kvdrift.ingestion.checks`` checks the events. A log is read twice. The first
reading reads only the groups' names and finds the runs of rows with equal names. The second reading yields portions of
whole groups, one at a time. If a group comes back after another group, the whole log is a single portion. A portion too
large for memory is refused, since even a small file can claim any number of rows.

A log holds coupled pairs only. The columns ``kind`` and ``weight``, which residual branching needs, may be missing.
If present, ``kind`` must be ``coupled`` and ``weight`` null in every row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.ingestion import formats
from kvdrift.ingestion.event_rows import DISTANCES, INTEGERS, VALUES, EventRows, converted, plain
from kvdrift.ingestion.formats import IGNORED, LATER, open_log
from kvdrift.ingestion.inputs import EventSource, Place, expanded
from kvdrift.schema.errors import InputError, reading
from kvdrift.schema.rows import Ints, Wide, combined_codes, run_begins
from kvdrift.schema.tables import EVENTS, GROUP_KEY

PORTION_ROWS = 1 << 20  # about so many rows of whole groups are checked together
MOST_GROUPS = 1 << 18  # in one log
_READ_BYTES = 1 << 20

_GROUP = ", ".join(GROUP_KEY)

GroupNames = tuple[str | None, ...]  # study, model, doc, action


@dataclass(frozen=True)
class FileGroups:
    """The group of each row of a file, as R runs of rows with equal names."""

    names: list[GroupNames]  # the names of each group, in order of appearance; a null name is None
    run_first: Wide  # [R + 1] the first row of each run, and at the end the number of rows
    run_group: Ints  # [R] the group of each run, as an index into ``names``

    @property
    def clustered(self) -> bool:
        """Tell whether every group is a single run."""
        return len(self.run_group) == len(self.names)

    def group_of_rows(self, first: int, count: int) -> Ints:
        """Return the group of each of ``count`` rows, beginning with row ``first``, [count]."""
        low = int(np.searchsorted(self.run_first, first, side="right")) - 1
        high = int(np.searchsorted(self.run_first, first + count, side="left"))
        bounds = np.clip(self.run_first[low : high + 1], first, first + count)
        return np.repeat(self.run_group[low:high], np.diff(bounds))

    def portion_ends(self) -> list[int]:
        """Return the row numbers at which the portions end; each portion has whole groups."""
        rows = int(self.run_first[-1])
        if not self.clustered:
            return [rows]
        ends: list[int] = []
        end = 0
        while end < rows:
            after = int(np.searchsorted(self.run_first, end + PORTION_ROWS))
            end = int(self.run_first[min(after, len(self.run_group))])
            ends.append(end)
        return ends


class EventFile:
    """One log; opening the log checks formats, columns and types of its files.

    Attributes:
        source: The log as it was named or found.
        path: Path or URL of the log, for messages.
        rows: Number of rows.
        schema: The columns of its first file, and those that names of folders or a Delta log give to its rows.
        ends: Whether the format shows that the log is complete; any other log may still be growing.

    Raises:
        NoEventsError: A file is no event log.
        InputError: A file cannot be read, or a column is missing, repeated, or of a type that does not fit. The
            methods that read rows raise it, too, for damage that opening does not notice.
    """

    def __init__(self, source: EventSource | Path | str) -> None:
        self.source = source if isinstance(source, EventSource) else expanded(source)[0]
        self.path = self.source.name
        self._logs = [_LogFile(file) for file in self.source.files()]
        self.rows = sum(log.reader.rows for log in self._logs)
        self.schema = self._logs[0].schema if self._logs else EVENTS.schema
        self.ends = all(log.reader.ends for log in self._logs)

    def digest(self) -> str:
        """Return the SHA-256 of the files' contents and of the columns that folder names or a Delta log give."""
        digest = hashlib.sha256()
        for log in self._logs:
            if log.constants:
                digest.update(repr(log.constants).encode())
            with reading(f"{log.file.location}: cannot be read"), log.file.open() as source:
                while data := source.read(_READ_BYTES):
                    digest.update(data)
        return digest.hexdigest()

    @property
    def unknown_columns(self) -> list[str]:
        """Return the names of columns that are not read: those that events do not have, and ``IGNORED``."""
        names = dict.fromkeys(name for log in self._logs for name in log.schema.names)
        return [name for name in names if name not in EVENTS.columns or name in IGNORED]

    def groups(self) -> FileGroups:
        """Read only the names of groups, and return the runs of rows with equal names.

        Raises:
            InputError: The file is damaged, a row does not belong to a coupled pair, or there are too many rows.
        """
        groups: dict[GroupNames, int] = {}
        firsts, ids, row = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)], 0
        for log, batch in self._slices((*GROUP_KEY, *LATER)):
            self._check_coupled(batch, row)
            with log.reader.reading():  # Parquet's reader does not check that names are valid UTF-8
                first, group = _runs(batch, groups)
            firsts.append(first + row)
            ids.append(group)
            row += batch.num_rows
            if len(groups) > MOST_GROUPS:
                raise InputError(f"{self.path}: more than {MOST_GROUPS:,} groups of {_GROUP}; split the file")
            # If batches bring no more runs than the file has groups and batches, the file may be clustered.
            if row > formats.MOST_ROWS and sum(map(len, ids)) > len(groups) + len(ids):
                raise self._too_large(
                    f"more than {formats.MOST_ROWS:,} rows that are not ordered by {_GROUP}; order them, or"
                )
        first, group = np.concatenate(firsts), np.concatenate(ids)
        begins = run_begins(group)  # a run may go on from one batch into the next
        file_groups = FileGroups(list(groups), np.append(first[begins], row), group[begins])
        largest = int(np.diff(file_groups.run_first).max(initial=0))
        if largest > formats.MOST_ROWS:
            names = file_groups.names[file_groups.run_group[int(np.argmax(np.diff(file_groups.run_first)))]]
            raise self._too_large(f"{largest:,} rows of {names}, must be {formats.MOST_ROWS:,} at most;")
        return file_groups

    def _too_large(self, what: str) -> InputError:
        return InputError(f"{self.path}: {what} give some replicates in a file of their own")

    def portions(self, groups: FileGroups) -> Iterator[EventRows]:
        """Yield all rows in the file's order, in portions of whole groups."""
        ends = iter(groups.portion_ends())
        end = next(ends, 0)
        parts: list[EventRows] = []
        row = 0
        for _, batch in self._slices(VALUES):
            rows = converted(batch, groups.group_of_rows(row, batch.num_rows))
            row += len(rows)
            while row >= end and len(rows):
                here = len(rows) - (row - end)
                parts.append(rows.take(slice(0, here)))
                rows = rows.take(slice(here, None))
                yield _drained(parts)
                end = next(ends, row + 1)
            if len(rows):
                parts.append(rows)

    def _slices(self, columns: Sequence[str]) -> Iterator[tuple[_LogFile, pa.RecordBatch]]:
        """Yield all rows in slices, each with its file, and with those of the requested columns that the file has."""
        for log in self._logs:
            with log.reader.reading():
                for batch in log.batches(columns):
                    for start in range(0, batch.num_rows, formats.SLICE_ROWS):
                        yield log, batch.slice(start, formats.SLICE_ROWS)

    def _check_coupled(self, batch: pa.RecordBatch, first: int) -> None:
        """Refuse a row whose kind or weight is not a coupled pair's; the batch begins at the file's row ``first``."""
        for name, default in LATER.items():
            if name not in batch.schema.names:
                continue
            values = plain(batch.column(name))
            other = values.is_valid() if default is None else pc.not_equal(values, default).fill_null(True)  # noqa: FBT003
            row = pc.index(other, True).as_py()
            if row >= 0:
                raise InputError(
                    f"{self.path}: row {first + row + 1}: {name} is {values[row].as_py()!r}, must be "
                    f"{'null' if default is None else repr(default)}: ingest takes coupled pairs only"
                )


class _LogFile:
    """One file of an event log; columns that it lacks are taken from the names of its folders, or from a Delta log."""

    def __init__(self, file: Place) -> None:
        self.file, self.reader = file, open_log(file)
        self.schema = self.reader.schema
        lacking = [name for name in (*GROUP_KEY, *VALUES, *LATER) if name not in self.schema.names]
        self.constants = {name: value for name, value in file.columns if name in lacking}
        for name in self.constants:
            self.schema = self.schema.append(EVENTS.schema.field(name))
        self._check_columns(file.location)

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        names = [name for name in columns if name in self.schema.names]
        present = [name for name in names if name not in self.constants]
        for batch in self.reader.batches(present or VALUES[:1]):
            values = [
                pa.repeat(pa.scalar(self.constants[name], EVENTS.schema.field(name).type), batch.num_rows)
                if name in self.constants
                else batch.column(name)
                for name in names
            ]
            yield pa.RecordBatch.from_arrays(values, names=names)

    def _check_columns(self, location: str) -> None:
        names = self.schema.names
        missing = [name for name in (*GROUP_KEY, *VALUES) if name not in names]
        if missing:
            raise InputError(
                f"{location}: no column {', '.join(repr(name) for name in missing)}; "
                f"an event has {', '.join((*GROUP_KEY, *VALUES))}"
            )
        for name in (*GROUP_KEY, *VALUES, *LATER):
            if name not in names:
                continue
            if names.count(name) > 1:
                raise InputError(f"{location}: {names.count(name)} columns are named '{name}', must be one")
            kind = self.schema.field(name).type
            wanted = _wanted(name, kind.value_type if pa.types.is_dictionary(kind) else kind)
            if wanted:
                raise InputError(f"{location}: column '{name}' is {kind}, must be {wanted}")


def _drained(parts: list[EventRows]) -> EventRows:
    """Return the rows of all ``parts`` and empty the list, so that memory holds a large portion only once."""
    whole = EventRows.concatenated(parts)
    parts.clear()
    return whole


def _wanted(name: str, kind: pa.DataType) -> str | None:
    """Return in words the type that a column must have; None if its type ``kind`` fits."""
    types = pa.types
    if name in GROUP_KEY or name == "kind":
        fits = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
        return None if fits else "string"
    if name == "weight":
        return None if types.is_floating(kind) or types.is_null(kind) else "float or double"
    if name in DISTANCES:
        return None if types.is_floating(kind) else "float or double"
    if name in INTEGERS:
        return None if types.is_integer(kind) else "an integer type"
    return None if types.is_boolean(kind) or types.is_integer(kind) else "bool, or integers 0 and 1"


def _runs(batch: pa.RecordBatch, groups: dict[GroupNames, int]) -> tuple[Wide, Ints]:
    """Return the first row and the group of each run of equal names, and add new groups to ``groups``."""
    columns = [_coded(batch.column(name)) for name in GROUP_KEY]
    codes = [column.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64) for column in columns]
    bounds = [len(column.dictionary) + 1 for column in columns]
    combined = combined_codes([(code + 1, bound) for code, bound in zip(codes, bounds, strict=True)], batch.num_rows)
    first = np.flatnonzero(run_begins(combined))
    _, where, inverse = np.unique(combined[first], return_index=True, return_inverse=True)
    ids = np.zeros(len(where), dtype=np.int32)
    for place in np.argsort(where):  # groups in order of appearance
        row = first[where[place]]
        names = tuple(
            column.dictionary[int(code[row])].as_py() if code[row] >= 0 else None
            for column, code in zip(columns, codes, strict=True)
        )
        ids[place] = groups.setdefault(names, len(groups))
    return first, ids[inverse]


def _coded(column: pa.Array) -> pa.DictionaryArray:
    return column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(plain(column))
