"""Event logs that another generator made, as files: Parquet or Arrow IPC, found out by content, read by whole groups.

A group is one (study, model, doc, action). Knows formats, types and row order, and nothing of what makes an event
right: that is ``schema.ingestion.checks``. A file is read twice. The first time only its names, which gives the runs of
equal groups; where no group comes back after another one, the second reading hands out windows of whole groups and
holds one at a time. A file whose groups are mixed is one window.

A file need not have the columns that came with schema version 2, and has coupled pairs alone: ``kind``, where it is
there, is ``coupled`` throughout, and ``weight`` null.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schema.errors import InputError, first_line
from schema.rows import run_begins
from schema.tables import EVENTS

NAMES = ("study", "model", "doc", "action")
VALUES = tuple(name for name in EVENTS.columns if name not in NAMES and name not in EVENTS.defaults)
INTEGERS = tuple(name for name in VALUES if EVENTS.schema.field(name).type == pa.int32())
DISTANCES = tuple(name for name in VALUES if EVENTS.schema.field(name).type == pa.float32())

WINDOW = 1 << 20  # rows of whole groups that are looked at together
_SLICE = 1 << 18  # rows converted at once

Wide = npt.NDArray[np.int64]
Ints = npt.NDArray[np.int32]
Group = tuple[str | None, ...]  # study, model, doc, action


@dataclass(frozen=True)
class EventRows:
    """N events in the types of EVENTS; what a value could not be turned into them is told in ``flaws``."""

    group: Ints  # place in ``Layout.groups``
    replicate: Ints
    t: Ints
    x_token: Ints
    y_token: Ints
    delta: npt.NDArray[np.float32]
    f: npt.NDArray[np.float32]
    x_eos: npt.NDArray[np.bool_]
    y_eos: npt.NDArray[np.bool_]
    flaws: npt.NDArray[np.uint16]  # bit i: VALUES[i] is null; bit 8 + i: it does not fit the type

    def __len__(self) -> int:
        return len(self.group)

    def take(self, chosen: Any) -> EventRows:
        """The rows of a slice, a mask or an array of indices."""
        return EventRows(*(getattr(self, field.name)[chosen] for field in fields(self)))

    @staticmethod
    def concatenated(parts: Sequence[EventRows]) -> EventRows:
        """All rows of ``parts``, of which there must be one."""
        if len(parts) == 1:
            return parts[0]
        return EventRows(*(np.concatenate([getattr(p, field.name) for p in parts]) for field in fields(EventRows)))


@dataclass(frozen=True)
class Layout:
    """Which rows of a file belong to which group."""

    groups: list[Group]  # in order of appearance; a null name is None
    run_first: Wide  # first row of each run of equal groups, and at the end the number of rows
    run_group: Ints

    @property
    def clustered(self) -> bool:
        """Whether every group is one run."""
        return len(self.run_group) == len(self.groups)

    def group_of_rows(self, first: int, count: int) -> Ints:
        """[count] the group of each row from ``first`` on."""
        low = int(np.searchsorted(self.run_first, first, side="right")) - 1
        high = int(np.searchsorted(self.run_first, first + count, side="left"))
        bounds = np.clip(self.run_first[low : high + 1], first, first + count)
        return np.repeat(self.run_group[low:high], np.diff(bounds))

    def window_ends(self) -> list[int]:
        """Row numbers at which windows of whole groups end."""
        rows = int(self.run_first[-1])
        if not self.clustered:
            return [rows]
        ends: list[int] = []
        end = 0
        while end < rows:
            after = int(np.searchsorted(self.run_first, end + WINDOW))
            end = int(self.run_first[min(after, len(self.run_group))])
            ends.append(end)
        return ends


class EventFile:
    """One log file; its format, columns and types are checked when it is opened.

    InputError, one line with the path, for what cannot be read, and for a column that is missing, twice there, or of a
    type that does not fit. Later readings raise it too, for damage further down.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._format = _format(path)
        try:
            self._open()
        except _READ_ERRORS as error:
            raise self._unreadable(error) from None
        self._check_columns()

    def _open(self) -> None:
        if self._format == "Parquet":
            with pq.ParquetFile(self.path) as parquet:
                self.schema, self.rows = parquet.schema_arrow, int(parquet.metadata.num_rows)
                return
        with pa.memory_map(str(self.path)) as source:
            self.schema = self._ipc_reader(source, None).schema
        self.rows = sum(batch.num_rows for batch in self._ipc_batches([len(self.schema) - 1]))

    @property
    def unknown_columns(self) -> list[str]:
        """Columns that no event has."""
        return [name for name in self.schema.names if name not in EVENTS.columns]

    def layout(self) -> Layout:
        """The runs of equal groups, from a reading of the names alone.

        InputError also for a row that is not one of a coupled pair.
        """
        groups: dict[Group, int] = {}
        firsts, ids, row = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)], 0
        for batch in self._slices([*NAMES, *(name for name in EVENTS.defaults if name in self.schema.names)]):
            self._check_coupled(batch, row)
            try:
                first, group = _runs(batch, groups)
            except UnicodeDecodeError as error:  # Parquet's reader does not look
                raise self._unreadable(error) from None
            firsts.append(first + row)
            ids.append(group)
            row += batch.num_rows
        first, group = np.concatenate(firsts), np.concatenate(ids)
        begins = run_begins(group)  # a run may go on from one batch into the next
        return Layout(list(groups), np.append(first[begins], row), group[begins])

    def windows(self, layout: Layout) -> Iterator[EventRows]:
        """All rows in the file's order, in windows of whole groups."""
        ends = iter(layout.window_ends())
        end = next(ends, 0)
        parts: list[EventRows] = []
        row = 0
        for batch in self._slices(VALUES):
            rows = _convert(batch, layout.group_of_rows(row, batch.num_rows))
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
        try:
            places = [self.schema.get_field_index(name) for name in columns]
            for batch in self._parquet_batches(columns) if self._format == "Parquet" else self._ipc_batches(places):
                for start in range(0, batch.num_rows, _SLICE):
                    yield batch.slice(start, _SLICE)
        except _READ_ERRORS as error:
            raise self._unreadable(error) from None

    def _parquet_batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        coded = [name for name in columns if name in NAMES]
        with pq.ParquetFile(self.path, read_dictionary=coded, page_checksum_verification=True) as parquet:
            yield from parquet.iter_batches(batch_size=_SLICE, columns=list(columns))

    def _ipc_reader(self, source: Any, options: Any) -> Any:
        reader = pa.ipc.open_file if self._format == "Arrow IPC file" else pa.ipc.open_stream
        return reader(source, options=options)

    def _ipc_batches(self, places: Sequence[int]) -> Iterator[pa.RecordBatch]:
        with pa.memory_map(str(self.path)) as source:
            reader = self._ipc_reader(source, pa.ipc.IpcReadOptions(included_fields=places))
            count = getattr(reader, "num_record_batches", None)
            for batch in reader if count is None else map(reader.get_batch, range(count)):
                batch.validate(full=True)  # what Parquet's decoder guarantees, an IPC file only claims
                yield batch

    def _unreadable(self, error: BaseException) -> InputError:
        return InputError(f"{self.path}: cannot be read as {self._format} ({first_line(error)})")

    def _check_columns(self) -> None:
        names = self.schema.names
        missing = [name for name in (*NAMES, *VALUES) if name not in names]
        if missing:
            raise InputError(
                f"{self.path}: no column {', '.join(repr(name) for name in missing)}; "
                f"an event has {', '.join((*NAMES, *VALUES))}"
            )
        for name in EVENTS.columns:
            if name not in names:
                continue
            if names.count(name) > 1:
                raise InputError(f"{self.path}: column '{name}' is there {names.count(name)} times")
            kind = self.schema.field(name).type
            wanted = _wanted(name, kind.value_type if pa.types.is_dictionary(kind) else kind)
            if wanted:
                raise InputError(f"{self.path}: column '{name}' is {kind}, must be {wanted}")

    def _check_coupled(self, batch: pa.RecordBatch, first: int) -> None:
        """InputError for a row, of those from the file's row ``first`` on, whose kind or weight is not a pair's."""
        for name, default in EVENTS.defaults.items():
            if name not in batch.schema.names:
                continue
            values = _plain(batch.column(name))
            other = values.is_valid() if default is None else pc.not_equal(values, default).fill_null(True)  # noqa: FBT003
            row = pc.index(other, True).as_py()
            if row >= 0:
                raise InputError(
                    f"{self.path}: row {first + row + 1}: {name} is {values[row].as_py()!r}, must be "
                    f"{'null' if default is None else repr(default)}: only coupled pairs are taken"
                )


# Arrow raises NotImplementedError for codecs and layouts that it does not read, KeyError for extension types.
_READ_ERRORS = (pa.ArrowException, OSError, NotImplementedError, KeyError, UnicodeDecodeError)


def _format(path: Path) -> str:
    try:
        with path.open("rb") as source:
            head = source.read(8)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or first_line(error)})") from None
    if head.startswith(b"PAR1"):
        return "Parquet"
    if head.startswith(b"ARROW1"):
        return "Arrow IPC file"
    if head.startswith(b"\xff\xff\xff\xff"):
        return "Arrow IPC stream"
    raise InputError(f"{path}: neither Parquet nor Arrow IPC" + ("" if head else " (the file is empty)"))


def _drained(parts: list[EventRows]) -> EventRows:
    """All rows of ``parts``, which is empty afterwards: a window may be a whole file, so hold it once."""
    whole = EventRows.concatenated(parts)
    parts.clear()
    return whole


def _wanted(name: str, kind: pa.DataType) -> str | None:
    """What a column must be, None where ``kind`` will do."""
    types = pa.types
    if name in NAMES or name == "kind":
        fits = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
        return None if fits else "string"
    if name == "weight":
        return None if types.is_floating(kind) or types.is_null(kind) else "float or double"
    if name in DISTANCES:
        return None if types.is_floating(kind) else "float or double"
    if name in INTEGERS:
        return None if types.is_integer(kind) else "an integer type"
    return None if types.is_boolean(kind) or types.is_integer(kind) else "bool, or integers 0 and 1"


def _runs(batch: pa.RecordBatch, groups: dict[Group, int]) -> tuple[Wide, Ints]:
    """First row and group of each run of equal names; new groups are added to ``groups``."""
    columns = [_coded(batch.column(name)) for name in NAMES]
    combined, size = np.zeros(batch.num_rows, dtype=np.int64), 1
    codes = []
    for column in columns:
        codes.append(column.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64))
        width = len(column.dictionary) + 1
        if size * width > 2**62:  # make it dense again before it would overflow
            kept, combined = np.unique(combined, return_inverse=True)
            size = len(kept)
        combined = combined * width + (codes[-1] + 1)
        size *= width
    first = np.flatnonzero(run_begins(combined))
    _, where, inverse = np.unique(combined[first], return_index=True, return_inverse=True)
    ids = np.zeros(len(where), dtype=np.int32)
    for place in np.argsort(where):  # in order of appearance
        row = first[where[place]]
        names = tuple(
            column.dictionary[int(code[row])].as_py() if code[row] >= 0 else None
            for column, code in zip(columns, codes, strict=True)
        )
        ids[place] = groups.setdefault(names, len(groups))
    return first, ids[inverse]


def _coded(column: pa.Array) -> pa.DictionaryArray:
    return column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(_plain(column))


def _plain(column: pa.Array) -> pa.Array:
    """Without dictionary, and not as string view, which Arrow's functions do not all take."""
    if pa.types.is_dictionary(column.type):
        return column.dictionary_decode()
    return column.cast(pa.large_string()) if pa.types.is_string_view(column.type) else column


def _convert(batch: pa.RecordBatch, group: Ints) -> EventRows:
    """The values in the types of EVENTS: nulls and what does not fit become 0 (NaN in a distance) with their flaw."""
    flaws = np.zeros(batch.num_rows, dtype=np.uint16)
    values: dict[str, npt.NDArray[Any]] = {}
    for bit, name in enumerate(VALUES):
        column = _plain(batch.column(name))
        if column.null_count:
            flaws |= column.is_null().to_numpy(zero_copy_only=False).astype(np.uint16) << np.uint16(bit)
        if name in DISTANCES:
            with np.errstate(over="ignore"):  # to infinity, which is outside 0..1 as well
                values[name] = column.to_numpy(zero_copy_only=False).astype(np.float32)
            continue
        if column.null_count:
            column = column.fill_null(False if pa.types.is_boolean(column.type) else 0)
        given = column.to_numpy(zero_copy_only=False)
        if given.dtype != np.bool_:
            low, high = (-(2**31), 2**31 - 1) if name in INTEGERS else (0, 1)
            misfit = (given < low) | (given > high)
            if misfit.any():
                flaws |= misfit.astype(np.uint16) << np.uint16(8 + bit)
                given = np.where(misfit, 0, given)
        values[name] = given.astype(np.int32 if name in INTEGERS else np.bool_)
    return EventRows(group, flaws=flaws, **values)
