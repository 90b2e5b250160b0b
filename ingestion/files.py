"""Read event logs of other generators: Parquet or Arrow IPC files, recognized by content, read by whole groups.

A group is one (study, model, doc, action). This module checks formats and types and finds the order of the rows;
``ingestion.checks`` checks the events. A file is read twice. The first reading reads only the names and finds the runs
of rows with equal names. The second reading yields portions of whole groups, one at a time. If a group comes back after
another group, the whole file is a single portion. A portion too large for memory is refused, since even a small file
can claim any number of rows.

A log holds coupled pairs only. The columns ``kind`` and ``weight``, which residual branching needs, may be missing.
If present, ``kind`` must be ``coupled`` and ``weight`` null in every row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ingestion.event_rows import DISTANCES, INTEGERS, VALUES, EventRows, converted, plain
from schema.errors import InputError, reading
from schema.location import check_regular
from schema.rows import Ints, Wide, combined_codes, run_begins
from schema.tables import EVENTS, GROUP_KEY

_LATER = {name: value for name, value in EVENTS.defaults.items() if name != "unit"}  # each store numbers its units

PORTION_ROWS = 1 << 20  # rows of whole groups that are checked together, about
MOST_ROWS = 1 << 23  # in a group, or in a file of one portion; a row takes 100 bytes while it is checked
MOST_GROUPS = 1 << 18  # in one file
MOST_BYTES = 1 << 30  # most bytes of a column of a Parquet row group or IPC batch
_SLICE_ROWS = 1 << 18  # rows that are converted at once

_PARQUET, _IPC = "Parquet", "an Arrow IPC file"

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
    """One log file; opening the file checks its format, columns and types.

    Raises:
        InputError: The file cannot be read, or a column is missing, repeated, or of a type that does not fit. Later
            readings raise it too, for damage further down.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._format = _format(path)
        with self._reading():
            self._open()
        self._check_columns()

    def _open(self) -> None:
        if self._format == _PARQUET:
            with pq.ParquetFile(self.path) as parquet:
                self.schema, self.rows = parquet.schema_arrow, int(parquet.metadata.num_rows)
        else:
            with pa.memory_map(str(self.path)) as source:
                self.schema = pa.ipc.open_file(source).schema
            self.rows = sum(batch.num_rows for batch in self._ipc_batches(self.schema.names[-1:]))

    @property
    def unknown_columns(self) -> list[str]:
        """Return the names of columns that events do not have."""
        return [name for name in self.schema.names if name not in EVENTS.columns]

    def groups(self) -> FileGroups:
        """Read only the names, and return the runs of rows with equal names.

        Raises:
            InputError: The file is damaged, a row does not belong to a coupled pair, or there are too many rows.
        """
        groups: dict[GroupNames, int] = {}
        firsts, ids, row = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)], 0
        for batch in self._slices([*GROUP_KEY, *(name for name in _LATER if name in self.schema.names)]):
            self._check_coupled(batch, row)
            with self._reading():  # Parquet's reader does not check that names are valid UTF-8
                first, group = _runs(batch, groups)
            firsts.append(first + row)
            ids.append(group)
            row += batch.num_rows
            if len(groups) > MOST_GROUPS:
                raise InputError(f"{self.path}: more than {MOST_GROUPS:,} groups of {_GROUP}; split the file")
            # If batches bring no more runs than the file has groups and batches, the file may be clustered.
            if row > MOST_ROWS and sum(map(len, ids)) > len(groups) + len(ids):
                raise self._too_large(f"more than {MOST_ROWS:,} rows that are not ordered by {_GROUP}; order them, or")
        first, group = np.concatenate(firsts), np.concatenate(ids)
        begins = run_begins(group)  # a run may go on from one batch into the next
        found = FileGroups(list(groups), np.append(first[begins], row), group[begins])
        largest = int(np.diff(found.run_first).max(initial=0))
        if largest > MOST_ROWS:
            names = found.names[found.run_group[int(np.argmax(np.diff(found.run_first)))]]
            raise self._too_large(f"{largest:,} rows of {names}, must be {MOST_ROWS:,} at most;")
        return found

    def _too_large(self, what: str) -> InputError:
        return InputError(f"{self.path}: {what} give some replicates in a file of their own")

    def portions(self, groups: FileGroups) -> Iterator[EventRows]:
        """Yield all rows in the file's order, in portions of whole groups."""
        ends = iter(groups.portion_ends())
        end = next(ends, 0)
        parts: list[EventRows] = []
        row = 0
        for batch in self._slices(VALUES):
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

    def _slices(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        with self._reading():
            batches = self._parquet_batches if self._format == _PARQUET else self._ipc_batches
            for batch in batches(columns):
                for start in range(0, batch.num_rows, _SLICE_ROWS):
                    yield batch.slice(start, _SLICE_ROWS)

    def _parquet_batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        coded = [name for name in columns if name in GROUP_KEY]
        with pq.ParquetFile(self.path, read_dictionary=coded, page_checksum_verification=True) as parquet:
            self._check_sizes(parquet.metadata, columns)
            yield from parquet.iter_batches(batch_size=_SLICE_ROWS, columns=list(columns))

    def _check_sizes(self, metadata: pq.FileMetaData, columns: Sequence[str]) -> None:
        """Refuse a column that would take more memory than events can.

        Columns of a small row group are not examined: if their entries in the footer contradict each other, Arrow 25
        ends the process.
        """
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            if group.total_byte_size <= MOST_BYTES:
                continue
            for column in (group.column(place) for place in range(group.num_columns)):
                if column.path_in_schema in columns and column.total_uncompressed_size > MOST_BYTES:
                    raise InputError(
                        f"{self.path}: column '{column.path_in_schema}' has {column.total_uncompressed_size:,} bytes "
                        f"in row group {number}, must be {MOST_BYTES:,} at most"
                    )

    def _ipc_batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        places = [self.schema.names.index(name) for name in columns]
        with pa.memory_map(str(self.path)) as source:
            reader = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=places))
            for batch in map(reader.get_batch, range(reader.num_record_batches)):
                if batch.nbytes > MOST_BYTES or batch.num_rows > MOST_ROWS:
                    raise InputError(f"{self.path}: a batch of {batch.num_rows:,} rows, must be {MOST_ROWS:,} at most")
                batch.validate(full=True)  # Parquet's decoder guarantees this; an IPC file only claims it
                yield batch

    def _reading(self) -> AbstractContextManager[None]:
        return reading(f"{self.path}: cannot be read as {self._format}", pa.ArrowException)

    def _check_columns(self) -> None:
        names = self.schema.names
        missing = [name for name in (*GROUP_KEY, *VALUES) if name not in names]
        if missing:
            raise InputError(
                f"{self.path}: no column {', '.join(repr(name) for name in missing)}; "
                f"an event has {', '.join((*GROUP_KEY, *VALUES))}"
            )
        for name in (*GROUP_KEY, *VALUES, *_LATER):
            if name not in names:
                continue
            if names.count(name) > 1:
                raise InputError(f"{self.path}: {names.count(name)} columns are named '{name}', must be one")
            kind = self.schema.field(name).type
            wanted = _wanted(name, kind.value_type if pa.types.is_dictionary(kind) else kind)
            if wanted:
                raise InputError(f"{self.path}: column '{name}' is {kind}, must be {wanted}")

    def _check_coupled(self, batch: pa.RecordBatch, first: int) -> None:
        """Refuse a row whose kind or weight is not a coupled pair's; the batch begins at the file's row ``first``."""
        for name, default in _LATER.items():
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


def _format(path: Path) -> str:
    check_regular(path)
    if not path.exists():
        raise InputError(f"{path}: no such file")
    with reading(f"{path}: cannot be read"), path.open("rb") as source:
        head = source.read(8)
    if head.startswith(b"PAR1"):
        return _PARQUET
    if head.startswith(b"ARROW1"):
        return _IPC
    raise InputError(f"{path}: neither {_PARQUET} nor {_IPC}" + ("" if head else " (the file is empty)"))


def _drained(parts: list[EventRows]) -> EventRows:
    """Return the rows of all ``parts`` and empty the list, so that memory holds a large portion only once."""
    whole = EventRows.concatenated(parts)
    parts.clear()
    return whole


def _wanted(name: str, kind: pa.DataType) -> str | None:
    """Return the type that a column must have; None if ``kind`` fits."""
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
