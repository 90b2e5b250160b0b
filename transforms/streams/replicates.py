"""Beam transforms from rows of events in any order, late or twice, to whole replicates, trajectories and steps.

The arithmetic is in ``kvdrift.transforms.streams.assembly`` and ``kvdrift.transforms.derivation``. A batch of events is
divided into one piece for each replicate. Pieces wait in the runner's state under the replicate's key. Whole replicates
are derived together. So Python code runs once for each piece and batch, never for each row.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.coders import BytesCoder, Coder
from apache_beam.coders.typecoders import registry
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import BagStateSpec, ReadModifyWriteStateSpec, TimerSpec, on_timer
from apache_beam.transforms.window import GlobalWindow, GlobalWindows, TimestampedValue
from apache_beam.utils.timestamp import MIN_TIMESTAMP, Timestamp
from apache_beam.utils.windowed_value import WindowedValue

from kvdrift.ingestion.event_rows import filled
from kvdrift.schema.errors import InputError
from kvdrift.schema.rows import run_bounds
from kvdrift.schema.tables import STEPS, TRAJECTORIES
from kvdrift.transforms.derivation import derive_trajectories
from kvdrift.transforms.streams import assembly
from kvdrift.transforms.streams.assembly import (
    ROW,
    Horizons,
    Piece,
    cut_all,
    events_of,
    horizon_of,
    packed,
    rows_of,
    table_of,
    unpacked,
)

BATCH_ROWS = 1 << 17  # of events that are cut, or derived, together
SHARDS = 64  # groups of replicates that ``grouped`` makes
DAY = 86_400.0


class TableCoder(Coder):
    """Encodes a table as an Arrow IPC stream, since a pickled slice would carry the table that it is a slice of."""

    def encode(self, table: pa.Table) -> bytes:
        """Return the table's rows as an IPC stream, without other rows of the same buffers."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write(table)
        return bytes(sink.getvalue())

    def decode(self, encoded: bytes) -> pa.Table:
        """Return the table of an IPC stream."""
        return pa.ipc.open_stream(encoded).read_all()

    def is_deterministic(self) -> bool:
        """Return False: equal tables may be encoded differently, since dictionaries may be in any order."""
        return False


class BatchCoder(TableCoder):
    """Encodes a record batch as an Arrow IPC stream."""

    def decode(self, encoded: bytes) -> pa.RecordBatch:
        """Return the record batch of an IPC stream."""
        return next(iter(pa.ipc.open_stream(encoded)))


registry.register_coder(pa.Table, TableCoder)
registry.register_coder(pa.RecordBatch, BatchCoder)


@dataclass(frozen=True)
class DeadLetter:
    """Rows from which no trajectory could be made, and the reason; in the columns of events if the rows fit these."""

    reason: str
    events: pa.Table


@dataclass(frozen=True)
class WholeReplicates:
    """The rows of whole replicates, sorted by replicate and position; and rows that belong to no whole replicate."""

    events: pa.Table
    letters: tuple[DeadLetter, ...] = ()


@dataclass(frozen=True)
class DerivedReplicates:
    """The derived rows of whole replicates, in the schemas TRAJECTORIES and STEPS, sorted by key; and dead letters."""

    trajectories: pa.Table = field(default_factory=TRAJECTORIES.schema.empty_table)
    steps: pa.Table = field(default_factory=STEPS.schema.empty_table)
    letters: tuple[DeadLetter, ...] = ()


class AssembleReplicates(beam.PTransform):
    """Assemble a PCollection of events in any order into a PCollection of ``WholeReplicates``.

    An element is an Arrow table or record batch of events, or a dict with the values of one event. A replicate is
    emitted once, as soon as every position 1..H is present. A row that comes twice counts once. If two rows of a
    position differ, the replicate becomes a dead letter.

    Args:
        horizon: H, for all studies or by the name of the study.
        patience: Seconds of event time without a new row after which an incomplete replicate becomes a dead letter.
            Repeated rows are recognized for the same time.
        grouped: Assemble replicates by a GroupByKey, for a bounded PCollection and runners without state, such as
            Dask's, which are refused otherwise; ``patience`` then has no effect.
    """

    def __init__(self, horizon: Horizons, *, patience: float = DAY, grouped: bool = False) -> None:
        super().__init__()
        self._horizon, self._patience, self._grouped = horizon, patience, grouped

    def expand(self, events: Any) -> Any:
        """Return the PCollection of ``WholeReplicates`` that Beam computes from ``events``."""
        if self._grouped:
            return (
                events
                | "Cut" >> beam.FlatMap(_sharded, self._horizon)
                | beam.GroupByKey()
                | "Assemble" >> beam.Map(_assembled, self._horizon)
            )
        _check_has_state(events.pipeline.runner)
        return (
            events
            | "Global" >> beam.WindowInto(GlobalWindows())
            | "Cut" >> beam.ParDo(_Cut(self._horizon)).with_output_types(tuple[str, tuple[bytes, str]])
            | "Assemble" >> beam.ParDo(_Assemble(self._horizon, self._patience))
            | "Gather" >> beam.ParDo(_Gather())
        )


class DeriveTrajectories(beam.PTransform):
    """Derive a PCollection of events into a PCollection of ``DerivedReplicates``.

    The rows equal, to the bit, those that ``kvdrift derive`` makes of the same events.

    Args:
        horizon: H, for all studies or by the name of the study; None if each element is a table of whole replicates,
            such as those of ``ReadEvents``.
        patience: See ``AssembleReplicates``.
        grouped: See ``AssembleReplicates``.
    """

    def __init__(self, horizon: Horizons | None = None, *, patience: float = DAY, grouped: bool = False) -> None:
        super().__init__()
        self._assembly = None if horizon is None else AssembleReplicates(horizon, patience=patience, grouped=grouped)

    def expand(self, events: Any) -> Any:
        """Return the PCollection of ``DerivedReplicates`` that Beam computes from ``events``."""
        whole = events | "Whole" >> beam.Map(WholeReplicates) if self._assembly is None else events | self._assembly
        return whole | "Derive" >> beam.Map(derive)


def _check_has_state(runner: Any) -> None:
    """Check that a runner has state and timers: Beam's for Dask has none, and would emit nothing, without an error.

    The runner is known by its name, since importing its module needs Dask.
    """
    if any(made.__name__ == "DaskRunner" for made in type(runner).__mro__):
        raise InputError(
            f"{type(runner).__name__}: has no state, in which replicates wait for their rows; write grouped=True, for "
            "a bounded PCollection"
        )


def derive(whole: WholeReplicates) -> DerivedReplicates:
    """Return the derived rows of whole replicates."""
    derived = derive_trajectories(whole.events)
    return DerivedReplicates(derived.trajectories, derived.steps, whole.letters)


class _Cut(beam.DoFn):
    """Map batches and single events to (key, (packed rows, reason)), for many elements of a bundle at once."""

    def __init__(self, horizons: Horizons) -> None:
        self._horizons = horizons

    def start_bundle(self) -> None:
        self._elements, self._count, self._latest = list[Any](), 0, MIN_TIMESTAMP

    def process(self, element: Any, timestamp: Any = beam.DoFn.TimestampParam) -> Iterator[Any]:
        self._elements.append(element)
        self._count += element.num_rows if isinstance(element, pa.Table | pa.RecordBatch) else 1
        self._latest = max(self._latest, timestamp)
        if self._count >= BATCH_ROWS:
            yield from (TimestampedValue(piece, self._latest) for piece in self._pieces())
            self.start_bundle()

    def finish_bundle(self) -> Iterator[Any]:
        yield from (WindowedValue(piece, self._latest, (GlobalWindow(),)) for piece in self._pieces())

    def _pieces(self) -> Iterator[tuple[str, tuple[bytes, str]]]:
        for piece in cut_all(self._elements, self._horizons):
            yield piece.key, (piece.data, piece.reason)


class _Assemble(beam.DoFn):
    """Map the pieces of a whole replicate to one piece with all its rows; other rows become pieces with a reason."""

    ROWS = BagStateSpec("rows", BytesCoder())
    SEEN = ReadModifyWriteStateSpec("seen", BytesCoder())
    EXPIRY = TimerSpec("expiry", TimeDomain.WATERMARK)

    def __init__(self, horizons: Horizons, patience: float) -> None:
        self._horizons, self._patience = horizons, patience

    def process(
        self,
        element: tuple[str, tuple[bytes, str]],
        timestamp: Any = beam.DoFn.TimestampParam,
        rows: Any = beam.DoFn.StateParam(ROWS),
        seen: Any = beam.DoFn.StateParam(SEEN),
        expiry: Any = beam.DoFn.TimerParam(EXPIRY),
    ) -> Iterator[Piece]:
        key, (data, reason) = element
        if reason:
            yield Piece(key, data, reason)
            return
        state, sent = seen.read(), unpacked(data)
        if assembly.is_whole(state):
            if assembly.contradicts(state, sent):
                yield Piece(key, data, assembly.LATE_CONTRADICTION)
            return
        latest = max(assembly.latest_of(state), timestamp.micros)  # a late row does not move the timer back
        expiry.set(Timestamp(micros=latest) + self._patience)
        state, whole = assembly.with_positions(state, sent, horizon_of(key, self._horizons), latest)
        if not whole:
            rows.add(data)
            seen.write(state)
            return
        (piece,) = assembled([key] * (1 + len(there := [*rows.read()])), [*there, data], self._horizons)
        rows.clear()
        if piece.reason:
            seen.clear()
        else:
            seen.write(assembly.whole_state(unpacked(piece.data)))
        yield piece

    @on_timer(EXPIRY)
    def expire(
        self,
        key: Any = beam.DoFn.KeyParam,
        rows: Any = beam.DoFn.StateParam(ROWS),
        seen: Any = beam.DoFn.StateParam(SEEN),
    ) -> Iterator[Piece]:
        """Drop the state of a replicate; an incomplete replicate becomes a dead letter."""
        state = seen.read()
        if state is not None and not assembly.is_whole(state):
            there = [*rows.read()]
            yield from assembled([key] * len(there), there, self._horizons)
        rows.clear()
        seen.clear()


class _Gather(beam.DoFn):
    """Collect single whole replicates and dead letters into ``WholeReplicates``."""

    def start_bundle(self) -> None:
        self._pieces, self._size, self._latest = list[Piece](), 0, MIN_TIMESTAMP

    def process(self, piece: Piece, timestamp: Any = beam.DoFn.TimestampParam) -> Iterator[Any]:
        self._pieces.append(piece)
        self._size += len(piece.data)
        self._latest = max(self._latest, timestamp)
        if self._size >= BATCH_ROWS * ROW.itemsize:
            yield TimestampedValue(gathered(self._pieces), self._latest)
            self.start_bundle()

    def finish_bundle(self) -> Iterator[Any]:
        if self._pieces:
            yield WindowedValue(gathered(self._pieces), self._latest, (GlobalWindow(),))


def assembled(keys: Sequence[str], pieces: Sequence[bytes], horizons: Horizons) -> Iterator[Piece]:
    """Assemble replicates from pieces of packed rows; ``keys`` has the replicate's key of each piece.

    Yields one piece for each replicate: all its rows, or the rows that came with the reason why it is not whole.
    """
    number = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    unique, horizon = [*number], np.array([horizon_of(key, horizons) for key in number], np.int32)
    parts = [unpacked(data) for data in pieces]
    group = np.repeat(np.array([number[key] for key in keys], np.int32), [len(part) for part in parts])
    result = assembly.assemble(rows_of(np.concatenate(parts), group), np.full(len(group), assembly.NEW), horizon)
    whole, lacking = filled(result.whole, horizon), "only {} of the replicate's {} positions came"
    for rows, reason in ((whole, ""), (result.waiting, lacking), (result.conflicting, assembly.CONTRADICTION)):
        for first, end in run_bounds(rows.group):
            place = int(rows.group[first])
            positions = packed(rows.take(slice(first, end))).tobytes()
            yield Piece(unique[place], positions, reason.format(end - first, horizon[place]))


def gathered(pieces: Iterable[Piece]) -> WholeReplicates:
    """Return whole replicates as one table, together with the dead letters."""
    pieces = list(pieces)
    whole = sorted((piece.key, piece.data) for piece in pieces if not piece.reason)
    letters = tuple(DeadLetter(piece.reason, events_of(piece)) for piece in pieces if piece.reason)
    return WholeReplicates(table_of([(key, unpacked(data)) for key, data in whole]), letters)


def _sharded(element: Any, horizons: Horizons) -> list[tuple[int, Piece]]:
    """Divide an element into pieces, each with the number of its shard; a shard gets all pieces of its replicates."""
    return [(zlib.crc32(piece.key.encode()) % SHARDS, piece) for piece in cut_all([element], horizons)]


def _assembled(shard: tuple[int, Iterable[Piece]], horizons: Horizons) -> WholeReplicates:
    """Assemble the replicates of a shard."""
    pieces = [*shard[1]]
    done, good = [piece for piece in pieces if piece.reason], [piece for piece in pieces if not piece.reason]
    if good:
        done += assembled([piece.key for piece in good], [piece.data for piece in good], horizons)
    return gathered(done)
