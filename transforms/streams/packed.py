"""Divide events into one packed piece for each replicate, and turn pieces back into a table.

A piece is the rows that one batch has of one replicate: a key, and 22 bytes for each row. Names, which are most of an
event's bytes, are only in the key.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schema.errors import InputError, first_line
from schema.rows import rounded_into_range
from schema.tables import COUPLED, EVENTS, GROUP_KEY, PAIR_COLUMNS, PLAIN
from transforms.event_columns import SortedEvents

_VALUES = tuple(name for name in PAIR_COLUMNS if name not in {*GROUP_KEY, "replicate"})
_KEY = ("action_revision", "unit", "kind")  # columns that a batch may lack; a row without them has their defaults
_TYPES = {name: EVENTS.schema.field(name).type for name in (*PAIR_COLUMNS, *_KEY)}

ROW: Final = np.dtype([(name, pa.array([], _TYPES[name]).to_numpy(zero_copy_only=False).dtype) for name in _VALUES])
"""One packed event: t, both tokens, delta, f and both EOS flags."""

Rows = npt.NDArray[np.void]  # of dtype ROW
Batch: TypeAlias = pa.Table | pa.RecordBatch
Horizons: TypeAlias = int | Mapping[str, int]  # H of all studies, or of each study

_REASONS = (
    "a value is null",
    "the event is of no coupled pair; branches are derived from a store",
    "the horizon of the study is not given",
    "t is outside of 1..H, or the replicate is negative",
    "delta or f is outside of 0..1",
)
_DISTANCES = ("delta", "f")


@dataclass(frozen=True)
class Piece:
    """Packed rows of one replicate under its key; or, without a key, rows that belong to no replicate.

    The latter are the original rows as an Arrow IPC stream, with the reason why they are refused.
    """

    key: str
    data: bytes
    reason: str = ""


def batch_of(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Build a batch from events as dicts; a column that no row has is left out.

    Raises:
        InputError: A value does not fit its column.
    """
    names = [name for name in _TYPES if any(name in row for row in rows)]
    try:
        return pa.table({name: pa.array([row.get(name) for row in rows], _TYPES[name]) for name in names})
    except (pa.ArrowException, OverflowError, TypeError) as error:
        raise InputError(f"an event does not fit the columns of events: {first_line(error)}") from None


def cut(batch: Batch, horizons: Horizons) -> Iterator[Piece]:
    """Divide a batch into one piece for each replicate, in the order of their keys.

    The batch has the columns of a coupled pair, in any order, of types that can be cast without loss;
    ``action_revision``, ``unit`` and ``kind`` may be absent. Rows outside 1..H, of unknown studies, of other kinds,
    with nulls or with distances outside of [0, 1] are pieces with a reason.
    """
    try:
        events = _as_events(batch)
    except InputError as error:
        yield refused(batch, str(error))
        return
    faults = _faults(events, horizons)
    for number, reason in enumerate(_REASONS, 1):
        if (wrong := faults == number).any():
            yield refused(events.filter(pa.array(wrong)), reason)
    events = events.filter(pa.array(faults == 0))
    if not events.num_rows:
        return
    values = {name: events[name].to_numpy() for name in ("replicate", *_VALUES)}
    values |= {name: rounded_into_range(values[name]) for name in _DISTANCES}
    within = (values["replicate"].astype(np.int64) << 32) + values["t"]
    ordered = SortedEvents.of(events, values, within, ())
    packed = np.empty(len(ordered.of_row), ROW)
    for name in _VALUES:
        packed[name] = ordered.values[name]
    keys = _keys(ordered)
    for key, first, count in zip(keys, ordered.first_row.tolist(), ordered.rows.tolist(), strict=True):
        yield Piece(key, packed[first : first + count].tobytes())


def refused(batch: Batch, reason: str) -> Piece:
    """Return the piece of rows that belong to no replicate, unchanged."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write(batch)
    return Piece("", sink.getvalue().to_pybytes(), reason)


def unpacked(data: bytes) -> Rows:
    """Return packed rows as a read-only array of ``ROW``."""
    return np.frombuffer(data, ROW)


def table_of(replicates: Sequence[tuple[str, Rows]]) -> pa.Table:
    """Return packed rows of replicates as events: the columns of a coupled pair, ``action_revision`` and ``unit``."""
    counts = np.array([len(rows) for _, rows in replicates], np.int64)
    rows = np.concatenate([np.empty(0, ROW), *(rows for _, rows in replicates)])
    parts = list(zip(*(json.loads(key) for key, _ in replicates), strict=True)) or [()] * 8
    columns = {}
    for name, values in zip((*GROUP_KEY, "action_revision", "unit", "estimator", "replicate"), parts, strict=True):
        if name == "estimator":
            continue
        kind = EVENTS.schema.field(name).type
        columns[name] = pa.array(values, kind).take(pa.array(np.repeat(np.arange(len(counts)), counts)))
    columns |= {name: pa.array(rows[name], _TYPES[name]) for name in _VALUES}
    return pa.table({name: columns[name] for name in (*PAIR_COLUMNS, "action_revision", "unit")})


def events_of(piece: Piece) -> pa.Table:
    """Return the rows of a piece as a table: events of a replicate, or the original rows."""
    if piece.key:
        return table_of([(piece.key, unpacked(piece.data))])
    return pa.ipc.open_stream(piece.data).read_all()


def _keys(ordered: SortedEvents) -> list[str]:
    at = ordered.first_row
    names = [ordered.names[name].take(pa.array(at)).to_pylist() for name in GROUP_KEY]
    units = [None if unit < 0 else unit for unit in ordered.values["unit"][at].tolist()]
    revisions, replicates = (ordered.values[name][at].tolist() for name in ("action_revision", "replicate"))
    parts = zip(*names, revisions, units, replicates, strict=True)
    return [json.dumps([*group, revision, unit, PLAIN, replicate]) for *group, revision, unit, replicate in parts]


def horizon_of(key: str, horizons: Horizons) -> int:
    """Return H of a replicate."""
    return horizons if isinstance(horizons, int) else horizons[json.loads(key)[0]]


def _as_events(batch: Batch) -> pa.Table:
    """Cast a batch to the columns and types of events."""
    table = pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch
    missing = [name for name in PAIR_COLUMNS if name not in table.column_names]
    if missing:
        raise InputError(f"events lack the column{'s' * (len(missing) > 1)} {', '.join(missing)}")
    columns = {}
    for name in (name for name in _TYPES if name in table.column_names):
        column = table.column(name)
        plain = column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
        try:
            columns[name] = plain.cast(_TYPES[name])
        except pa.ArrowException as error:
            raise InputError(f"events column '{name}': {first_line(error)}") from None
    return pa.table(columns)


def _faults(events: pa.Table, horizons: Horizons) -> npt.NDArray[np.int64]:
    """Number the first fault of each event, [N]: 0 for none, else from 1 in the order of ``_REASONS``."""
    missing = functools.reduce(pc.or_, [events[name].is_null() for name in PAIR_COLUMNS])
    kinds = events["kind"] if "kind" in events.column_names else pa.repeat(COUPLED, events.num_rows)
    foreign = pc.not_equal(kinds, COUPLED).to_numpy(zero_copy_only=False)
    if isinstance(horizons, int):
        horizon = np.full(events.num_rows, horizons)
    else:
        known = pc.index_in(events["study"], pa.array([*horizons], pa.string())).fill_null(-1).to_numpy()
        horizon = np.array([*horizons.values(), 0])[known]  # the last one for unknown studies
    t, replicate = (events[name].fill_null(0).to_numpy() for name in ("t", "replicate"))
    distances = [rounded_into_range(events[name].fill_null(0).to_numpy()) for name in _DISTANCES]
    flags = (
        missing.to_numpy(zero_copy_only=False),
        foreign,
        horizon == 0,
        (t < 1) | (t > horizon) | (replicate < 0),
        ~np.logical_and.reduce([(own >= 0) & (own <= 1) for own in distances]),
    )
    return np.select(flags, range(1, len(flags) + 1), 0)
