"""Divide events into one packed piece for each replicate, and assemble replicates from pieces and from files.

A piece is the rows that one batch has of one replicate: a key, and 22 bytes for each row. Names, which are most of an
event's bytes, are only in the key.

Rows come in any order, late or twice. A replicate is whole if it has the positions 1..H, or 1..m if both sides have
ended at m. The later positions are then known (``kvdrift.ingestion.event_rows.filled``), and rows of these positions
count as repeats. A row that repeats an earlier row, with equal key and values, counts once. New rows are compared with
the stored and the waiting rows of their replicate, which stay; if new rows contradict these or each other, the new rows
of the replicate are set aside.

A runner keeps a state for each replicate: one byte for each position while positions are missing, and afterwards a
four-byte checksum of each row, which shows whether a row that comes again equals the first. This module does not use
Beam.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.ingestion.event_rows import (
    DISTANCES,
    VALUES,
    EventRows,
    converted,
    exact,
    exact_value,
    only_repeats,
    plain,
    without_tokens,
)
from kvdrift.ingestion.records import is_text
from kvdrift.schema.errors import InputError, first_line
from kvdrift.schema.rows import Flags, Ints, Wide, repeats, run_begins
from kvdrift.schema.tables import COUPLED, EVENTS, GROUP_KEY, PAIR_COLUMNS, PLAIN
from kvdrift.transforms.event_columns import SortedEvents

_VALUES = tuple(name for name in PAIR_COLUMNS if name not in {*GROUP_KEY, "replicate"})
_TEXTS = (*GROUP_KEY, "kind")
_LATER = {"action_revision": 0, "unit": -1}  # with what stands for null; a batch may lack these and ``kind``
_TYPES = {name: EVENTS.schema.field(name).type for name in (*PAIR_COLUMNS, *_LATER, "kind")}

ROW: Final = np.dtype([(name, pa.array([], _TYPES[name]).to_numpy(zero_copy_only=False).dtype) for name in _VALUES])
"""One packed event: t, both tokens, delta, f and both EOS flags."""

Rows = npt.NDArray[np.void]  # of dtype ROW
Batch: TypeAlias = pa.Table | pa.RecordBatch
Horizons: TypeAlias = int | Mapping[str, int]  # H of all studies, or of each study

_SHOWN = 60  # characters of a value in a message
_TEXT_TYPES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
_WANTED = {pa.bool_(): "true, false, 0 or 1", pa.float32(): "a number", pa.string(): "a text"}


@dataclass(frozen=True)
class Piece:
    """Packed rows of one replicate under its key; or, without a key, rows that belong to no replicate.

    The latter are the original rows as an Arrow IPC stream, with the reason why they are refused.
    """

    key: str
    data: bytes
    reason: str = ""


def cut_all(elements: Sequence[Any], horizons: Horizons) -> Iterator[Piece]:
    """Divide batches and single events into pieces; batches with equal columns are divided together.

    An element that is neither a batch nor an event as a dict becomes a piece with a reason, and so does each event that
    cannot belong to a replicate.
    """
    batches, events = dict[pa.Schema, list[pa.Table]](), list[dict[str, Any]]()
    for element in elements:
        if isinstance(element, pa.Table | pa.RecordBatch):
            table = element if isinstance(element, pa.Table) else pa.Table.from_batches([element])
            batches.setdefault(table.schema, []).append(table)
            continue
        try:
            events.append(_exact_event(element))
        except InputError as error:
            yield refused(pa.table({"event": [_content(element)]}), str(error))
    for tables in batches.values():
        yield from cut(pa.concat_tables(tables), horizons)
    if events:
        doubles = {name: pa.float64() for name in DISTANCES}
        columns = {name: pa.array([event[name] for event in events], (_TYPES | doubles)[name]) for name in _TYPES}
        columns["kind"] = columns["kind"].fill_null(COUPLED)
        yield from cut(pa.table(columns), horizons)


def cut(batch: Batch, horizons: Horizons) -> Iterator[Piece]:
    """Divide a batch into one piece for each replicate, after pieces of refused rows.

    Pieces are sorted by study, model, document, action, revision and replicate.

    The batch has the columns of a coupled pair, in any order, of types that can be converted without loss;
    ``action_revision``, ``unit`` and ``kind`` may be absent. Rows outside 1..H, of unknown studies, of other kinds,
    with nulls, with values that do not fit or with distances outside of [0, 1] become pieces with a reason. A batch
    that cannot be read, such as one with a text that is not UTF-8, is halved until only unreadable rows are refused; a
    replicate may then have several pieces.
    """
    table = pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch
    try:
        _check_columns(table)
        names, rows, misfit = _exact_columns(table)
    except InputError as error:
        yield refused(table, str(error))
        return
    except (pa.ArrowException, ValueError) as error:  # one text that is no UTF-8 spoils a whole batch
        half = table.num_rows // 2
        if not half:
            yield refused(table, f"the event cannot be read: {first_line(error)}")
            return
        yield from cut(table.slice(0, half), horizons)
        yield from cut(table.slice(half), horizons)
        return
    right = np.ones(table.num_rows, np.bool_)
    for reason, mask in _faults(names, rows, misfit, horizons):
        if (wrong := mask & right).any():
            yield refused(_chosen(table, wrong), reason)
            right &= ~wrong
    if right.any():
        yield from _pieces(names.filter(pa.array(right)), rows.take(right))


def _pieces(names: pa.Table, rows: EventRows) -> Iterator[Piece]:
    """Yield the pieces of valid events; ``names`` has the columns that ``EventRows`` lacks."""
    within = (rows.replicate.astype(np.int64) << 32) + rows.t
    ordered = SortedEvents.of(names, {name: getattr(rows, name) for name in VALUES}, within, ())
    array = np.empty(len(rows), ROW)
    for name in _VALUES:
        array[name] = ordered.values[name]
    keys = _keys(ordered)
    for key, first, count in zip(keys, ordered.first_row.tolist(), ordered.rows.tolist(), strict=True):
        yield Piece(key, array[first : first + count].tobytes())


def refused(batch: Batch, reason: str) -> Piece:
    """Return a piece with the original rows of a batch, which are refused for ``reason``.

    A batch that is no valid Arrow data is replaced by a row that describes it.
    """
    try:
        batch.validate()
    except pa.ArrowInvalid:  # writing such a batch may end the process
        batch = pa.table({"event": [f"{batch.num_rows} rows that are no valid Arrow data: {batch.schema}"]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write(batch)
    return Piece("", sink.getvalue().to_pybytes(), reason)


def unpacked(data: bytes) -> Rows:
    """Return packed rows as a read-only array of ``ROW``."""
    return np.frombuffer(data, ROW)


def packed(rows: EventRows) -> Rows:
    """Return rows of a replicate as an array of ``ROW``."""
    array = np.empty(len(rows), ROW)
    for name in _VALUES:
        array[name] = getattr(rows, name)
    return array


def rows_of(rows: Rows, group: Ints | None = None) -> EventRows:
    """Return packed rows as columns; ``group`` [N] has the number of each row's replicate, by default 0."""
    zeros = np.zeros(len(rows), np.int32)
    values = {name: rows[name] for name in _VALUES}
    return EventRows(zeros if group is None else group, zeros, flaws=np.zeros(len(rows), np.uint16), **values)


def table_of(replicates: Sequence[tuple[str, Rows]]) -> pa.Table:
    """Return replicates, each a key and packed rows, as a table with ``PAIR_COLUMNS``, revision and unit."""
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
    """Return the horizon H of the replicate that has a key."""
    return horizons if isinstance(horizons, int) else horizons[json.loads(key)[0]]


def _exact_event(element: object) -> dict[str, Any]:
    """Return an event with values of exactly the types of its columns, or null; raise InputError if it is no event."""
    if not isinstance(element, dict):
        raise InputError("the element is neither an event as a dict, nor an Arrow table or record batch of events")
    if missing := [name for name in PAIR_COLUMNS if name not in element]:
        raise InputError(f"events lack the column{'s' * (len(missing) > 1)} {', '.join(missing)}")
    event: dict[str, Any] = {}
    for name, kind in _TYPES.items():
        value = element.get(name)
        event[name] = (value if is_text(value) else None) if name in _TEXTS else exact_value(value, kind)
        if value is not None and event[name] is None:
            raise InputError(f"{name} is {_content(value)[:_SHOWN]}, must be {_wanted(name)}")
    return event


def _content(element: object) -> str:
    """Return the content of any object as text."""
    try:
        return repr(element).encode(errors="backslashreplace").decode()
    except Exception:  # noqa: BLE001 - an element's own __repr__ may raise anything
        return object.__repr__(element)


def _check_columns(table: pa.Table) -> None:
    missing = [name for name in PAIR_COLUMNS if name not in table.column_names]
    if missing:
        raise InputError(f"events lack the column{'s' * (len(missing) > 1)} {', '.join(missing)}")
    for name in _TYPES:
        if (count := table.column_names.count(name)) > 1:
            raise InputError(f"events have {count} columns '{name}', must be one")
    for name in (name for name in _TEXTS if name in table.column_names):
        kind = table.schema.field(name).type
        plain_kind = kind.value_type if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind) else kind
        if not any(is_text_type(plain_kind) for is_text_type in _TEXT_TYPES):
            raise InputError(f"events column '{name}' is {kind}, must be string")


def _exact_columns(table: pa.Table) -> tuple[pa.Table, EventRows, dict[str, Flags]]:
    """Convert a batch without loss.

    Returns a table of the batch's names, revisions and units; the values of its other columns; and flags, by column, of
    the rows whose revision or unit does not fit. A row that Arrow cannot read raises Arrow's exceptions.
    """
    table.validate(full=True)
    columns = {name: plain(table[name]).cast(pa.string()) for name in _TEXTS if name in table.column_names}
    misfit = {}
    for name, default in _LATER.items():
        if name in table.column_names:
            values, null, bad = exact(table[name], _TYPES[name])
            misfit[name] = bad | (values < 0) & ~null
            columns[name] = pa.chunked_array([np.where(null, default, values)])
    return pa.table(columns), converted(table, np.zeros(table.num_rows, np.int32)), misfit


def _chosen(table: pa.Table, wanted: Flags) -> pa.Table:
    """Return the rows that ``wanted`` [N] flags, also of a table with columns that Arrow cannot filter."""
    try:
        return table.filter(pa.array(wanted))
    except pa.ArrowNotImplementedError:
        return pa.concat_tables([table.slice(row, 1) for row in np.flatnonzero(wanted).tolist()])


def _faults(
    names: pa.Table, rows: EventRows, misfit: Mapping[str, Flags], horizons: Horizons
) -> Iterator[tuple[str, Flags]]:
    """Yield each possible fault of an event as a line, and flags [N] of the events that have the fault."""
    for name in names.column_names:
        yield f"{name} is null", names[name].is_null().to_numpy()
    for bit, name in enumerate(VALUES) if rows.flaws.any() else ():
        yield f"{name} is null", rows.flaws & np.uint16(1 << bit) != 0
        yield f"{name} is not {_wanted(name)}", rows.flaws & np.uint16(1 << (8 + bit)) != 0
    for name, wrong in misfit.items():
        yield f"{name} is not {_wanted(name)}, or negative", wrong
    if "kind" in names.column_names:
        foreign = pc.not_equal(names["kind"], COUPLED).fill_null(False).to_numpy()  # noqa: FBT003
        yield "kind is not coupled; events of residual branching can only be derived in a store", foreign
    if isinstance(horizons, int):
        horizon = np.full(len(rows), horizons)
    else:
        known = pc.index_in(names["study"], pa.array([*horizons], pa.string())).fill_null(-1).to_numpy()
        horizon = np.array([*horizons.values(), 0])[known]  # the last one for unknown studies
        yield "the horizon of the study is not given; add the study to the transform's horizon", horizon == 0
    yield "t is outside of 1..H, or the replicate is negative", (rows.t < 1) | (rows.t > horizon) | (rows.replicate < 0)
    for name in DISTANCES:
        yield f"{name} is outside of 0..1", ~((getattr(rows, name) >= 0) & (getattr(rows, name) <= 1))


def _wanted(name: str) -> str:
    return _WANTED.get(_TYPES[name], f"a whole number ({_TYPES[name]})")


STORED, WAITING, NEW = 0, 1, 2
"""The origin of a row: table ``events``, the waiting rows, or the newly arrived rows."""

CONTRADICTION = "rows of one position contradict each other"
LATE_CONTRADICTION = "the row contradicts an earlier row of its replicate; the replicate was already whole"

_OPEN, _WHOLE = b"o", b"w"
_ODD = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)


@dataclass(frozen=True)
class Assembled:
    """The rows of some replicates as whole replicates, waiting rows and conflicting rows, each in key order."""

    whole: EventRows  # all rows of the replicates that have become whole
    waiting: EventRows  # new rows of replicates that still lack positions
    conflicting: EventRows  # new rows that are set aside
    conflict: Flags  # [rows of ``conflicting``] whether the row contradicts another row
    collapsed: int  # the number of new rows that repeat an earlier row


def assemble(rows: EventRows, origin: Ints, horizon: Ints) -> Assembled:
    """Assemble new rows of some replicates with all earlier rows of these, and divide them as in ``Assembled``.

    Args:
        rows: N rows at positions 1..H.
        origin: [N] ``STORED``, ``WAITING`` or ``NEW``.
        horizon: H by group number, for each number in ``rows.group``.
    """
    order = np.lexsort((origin, rows.t, rows.replicate, rows.group))
    rows, origin = rows.take(order), origin[order]
    pair, new, repeated = np.cumsum(run_begins(rows.group, rows.replicate)) - 1, origin == NEW, only_repeats(rows)
    compared = without_tokens(rows, repeated)
    values = [getattr(compared, name) for name in VALUES if name not in {"replicate", "t"}]
    again, differs = repeats([rows.group, rows.replicate, rows.t], values)
    aside = new & _any(differs & new, pair)
    kept = ~again & ~aside
    count = np.cumsum(kept)
    prefix = kept & (
        rows.t == count - np.concatenate([[0], count])[np.searchsorted(pair, pair)]
    )  # 1, 2, … in each pair
    ends = (rows.x_eos & rows.y_eos) | (rows.t == horizon[rows.group])
    length = np.bincount(pair, weights=prefix)[pair]
    complete = _any(prefix & ends & (rows.t == length), pair)
    undone = kept & ~prefix & complete & ~repeated
    aside |= new & _any(undone, pair)
    wrong = new & (differs | undone | _any(undone & ~new, pair))
    return Assembled(
        whole=rows.take(prefix & complete & ~_any((origin == STORED) | undone, pair)),
        waiting=rows.take(kept & ~complete & new),
        conflicting=rows.take(aside),
        conflict=wrong[aside],
        collapsed=int(np.sum(new & ~aside & (again | (kept & ~prefix & complete)))),
    )


def _any(rows: Flags, pair: Wide) -> Flags:
    """Tell for each row, [N], whether ``rows`` flags any row of its replicate; ``pair`` numbers the replicates, [N]."""
    return np.bincount(pair, weights=rows)[pair] > 0


def is_whole(state: bytes | None) -> bool:
    """Tell from its state whether a replicate is whole."""
    return state is not None and state.startswith(_WHOLE)


def latest_of(state: bytes | None) -> int:
    """Return the event time of the latest row of an incomplete replicate, in microseconds."""
    return -(2**63) if state is None else int(np.frombuffer(state, np.int64, 1, offset=1)[0])


def with_positions(state: bytes | None, rows: Rows, horizon: int, latest: int) -> tuple[bytes, bool]:
    """Add rows at positions 1..H to an incomplete replicate, whose state is None before its first row.

    ``latest`` is the event time of the latest row, including these rows, in microseconds. Returns the new state, and
    whether the replicate may be whole.
    """
    there = np.zeros(horizon, np.int8) if state is None else np.frombuffer(state, np.int8, offset=9).copy()
    there[rows["t"] - 1] = np.where(rows["x_eos"] & rows["y_eos"], 2, 1)  # 2: both sides have ended
    length = horizon if there.all() else int(np.argmin(there))  # of the positions 1, 2, … without a gap
    whole = length == horizon or (length > 0 and there[length - 1] == 2)
    return _OPEN + np.int64(latest).tobytes() + there.tobytes(), bool(whole)


def whole_state(rows: Rows) -> bytes:
    """Return the state of a whole replicate with ``rows``, [H]."""
    return _WHOLE + _checksums(rows).tobytes()


def contradicts(state: bytes, rows: Rows) -> bool:
    """Tell whether rows that come again for a whole replicate differ from the first rows."""
    known = np.frombuffer(state, np.uint32, offset=1)
    return bool((known[rows["t"] - 1] != _checksums(rows)).any())


def _checksums(rows: Rows) -> npt.NDArray[np.uint32]:
    """Return a checksum of each row, [N]: the sum of its 22 bytes as three words, each word times an odd number."""
    columns = rows_of(rows)
    compared = packed(without_tokens(columns, only_repeats(columns)))
    padded = np.zeros((len(rows), 24), np.uint8)
    padded[:, : ROW.itemsize] = compared.view(np.uint8).reshape(len(rows), ROW.itemsize)
    mixed = (padded.view("<u8") * _ODD).sum(axis=1, dtype=np.uint64)
    spread: npt.NDArray[np.uint64] = (mixed ^ (mixed >> np.uint64(29))) * _ODD[0]
    return (spread >> np.uint64(32)).astype(np.uint32)
