"""Events of one segment -> trajectories and steps, as pure functions of Arrow tables.

Knows nothing of stores, files or pipelines. Symbols are those of the definitions page: I_t, τ, e_x, e_y,
e = min(e_x, e_y), e′ = max(e_x, e_y), H. Every pass is one array operation over all rows or all trajectories of
the segment; identifying strings are compared once per distinct value, never per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schema.errors import InputError
from schema.tables import EVENTS, STEPS, TRAJECTORIES

Ints = npt.NDArray[np.int32]
Wide = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

NEVER = np.int32(2**31 - 1)  # stands for a null position: later than every t
NAMES = ("study", "model", "doc", "action")


@dataclass(frozen=True)
class Derived:
    """What one segment becomes: ``trajectories`` (TRAJECTORIES schema) and ``steps`` (STEPS schema), sorted by key."""

    trajectories: pa.Table
    steps: pa.Table


def derive(events: pa.Table) -> Derived:
    """Derive trajectories and steps from the events of any number of whole trajectories.

    Definitions: Objects (I_t, τ, e, e′), Decomposition (exposure, occupation), Local agreement, EOS partition.

    Args:
        events: N rows with the columns of EVENTS, in any order; names may be plain or dictionary-encoded strings.
            All rows of a (study, model, doc, action, replicate) must be here, since τ and H are read off them.

    Returns:
        One trajectories row per pair and one steps row per event, both exactly of their Arrow schemas and sorted by
        key. Sums are float64. Where positions are missing or repeated, ``complete`` is false and the other columns
        describe the rows present, a gap or a repetition ending a run of agreements.

    Raises:
        InputError: a column is missing, has nulls or another type, or a position is outside 1..H.

    """
    _validate(events)
    rows = _sorted_rows(events)
    pairs = _Pairs.of(rows)
    return Derived(_trajectories(rows, pairs), _steps(rows, pairs))


@dataclass(frozen=True)
class _Rows:
    """The segment's N events in key order; all arrays are [N] but ``names``."""

    names: dict[str, pa.DictionaryArray]
    group: Wide  # equal where all four names are equal, ascending in their order
    replicate: Ints
    t: Ints
    x_token: Ints
    y_token: Ints
    delta: npt.NDArray[np.float32]
    f: npt.NDArray[np.float32]
    x_eos: Flags
    y_eos: Flags

    def mismatch(self) -> Flags:
        """Return I_t, [N]."""
        return np.not_equal(self.x_token, self.y_token)


@dataclass(frozen=True)
class _Pairs:
    """The segment's M trajectories; positions are int32 with NEVER for null."""

    first_row: Wide  # [M]
    rows: Wide  # [M] number of rows
    of_row: Ints  # [N] index of each row's trajectory
    horizon: Ints  # [M] H, the last position present
    tau: Ints  # [M] first t with I_t = 1
    eos_x: Ints  # [M]
    eos_y: Ints  # [M]
    first_absorbed: Ints  # [M] e, null counting as H + 1
    last_absorbed: Ints  # [M] e', likewise

    @classmethod
    def of(cls, rows: _Rows) -> _Pairs:
        count = len(rows.t)
        starts = np.ones(count, dtype=np.bool_)
        if count:
            starts[1:] = (np.diff(rows.group) != 0) | (np.diff(rows.replicate) != 0)
        first_row = np.flatnonzero(starts)
        length = np.diff(first_row, append=count)
        of_row = np.repeat(np.arange(len(first_row), dtype=np.int32), length)
        horizon = rows.t[first_row + length - 1]
        eos_x = _first_position(rows.x_eos, rows.t, of_row, len(first_row))
        eos_y = _first_position(rows.y_eos, rows.t, of_row, len(first_row))
        return cls(
            first_row=first_row,
            rows=length,
            of_row=of_row,
            horizon=horizon,
            tau=_first_position(rows.mismatch(), rows.t, of_row, len(first_row)),
            eos_x=eos_x,
            eos_y=eos_y,
            first_absorbed=np.minimum(np.minimum(eos_x, eos_y), horizon + np.int32(1)),
            last_absorbed=np.minimum(np.maximum(eos_x, eos_y), horizon + np.int32(1)),
        )

    def per_row(self, values: Ints) -> Ints:
        """[M] -> [N]: each row gets its trajectory's value."""
        return np.repeat(values, self.rows)

    def count(self, flags: Flags) -> Ints:
        """[N] -> [M]: how many rows of each trajectory have the flag."""
        return np.bincount(self.of_row[flags], minlength=len(self.rows)).astype(np.int32)

    def total(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """[N] -> [M]: sums in float64, in order of t."""
        return np.add.reduceat(values, self.first_row, dtype=np.float64) if len(self.rows) else np.zeros(0)


def _trajectories(rows: _Rows, pairs: _Pairs) -> pa.Table:
    mismatch = rows.mismatch()
    diverged = pairs.tau != NEVER
    tau_of_row = pairs.per_row(pairs.tau)
    after_tau = rows.t > tau_of_row  # never true without divergence

    # 1..H present exactly once: starts at 1, ends at H = number of rows, and every row goes on by exactly one.
    follows = np.zeros(len(rows.t), dtype=np.bool_)  # [N] this row's position is its predecessor's plus one
    follows[1:] = np.diff(rows.t) == 1
    follows[pairs.first_row] = rows.t[pairs.first_row] == 1
    complete = pairs.count(follows) == pairs.rows

    window = after_tau & (rows.t < pairs.per_row(pairs.first_absorbed))  # tau < t < e
    agreement = window & ~mismatch
    longest = _longest_run(agreement, follows, pairs)
    first_agreement = _first_position(agreement, rows.t, pairs.of_row, len(pairs.rows))
    returned = pairs.count(window & mismatch & (rows.t > pairs.per_row(first_agreement))) > 0

    exposure = np.where(diverged, pairs.horizon - pairs.tau, 0)
    columns: dict[str, Any] = {
        **{name: codes.take(pa.array(pairs.first_row)) for name, codes in rows.names.items()},
        "replicate": rows.replicate[pairs.first_row],
        "tau": _nullable(pairs.tau, null=~diverged),
        "eos_x": _nullable(pairs.eos_x, null=pairs.eos_x == NEVER),
        "eos_y": _nullable(pairs.eos_y, null=pairs.eos_y == NEVER),
        "horizon": pairs.horizon,
        "complete": complete,
        "mismatches": pairs.count(mismatch),
        "sum_delta": pairs.total(rows.delta),
        "sum_f": pairs.total(rows.f),
        "exposure": exposure,
        "occupation": pairs.count(mismatch & after_tau),
        "longest_agreement": _nullable(longest, null=~diverged),
        "mismatch_after_agreement": _nullable(returned, null=~diverged),
    }
    return _table(columns, TRAJECTORIES.schema)


def _steps(rows: _Rows, pairs: _Pairs) -> pa.Table:
    tau = pairs.per_row(pairs.tau)
    before = rows.t < tau  # all rows of a pair that never diverges
    first, last = pairs.per_row(pairs.first_absorbed), pairs.per_row(pairs.last_absorbed)
    eos_set = (rows.t >= first).astype(np.int32) + (rows.t > first) + (rows.t > last)
    columns: dict[str, Any] = {
        **rows.names,
        "replicate": rows.replicate,
        "t": rows.t,
        "mismatch": rows.mismatch().astype(np.int32),
        "lag": _nullable(np.where(before, np.int32(0), rows.t - tau), null=before),
        "eos_set": eos_set,
        "delta": rows.delta,
        "f": rows.f,
    }
    return _table(columns, STEPS.schema)


def _first_position(flags: Flags, t: Ints, of_row: Ints, pairs: int) -> Ints:
    """[N] flags of sorted rows -> [M] first t with the flag, NEVER where none."""
    first = np.full(pairs, NEVER, dtype=np.int32)
    flagged = np.flatnonzero(flags)[::-1]  # the last write wins, so write the earliest position last
    first[of_row[flagged]] = t[flagged]
    return first


def _longest_run(agreement: Flags, follows: Flags, pairs: _Pairs) -> Ints:
    """[N] -> [M]: longest run of agreements at consecutive positions.

    A run never crosses into the next trajectory: the first row of a trajectory is at or before its τ, so it is
    outside the window that ``agreement`` is limited to.
    """
    continues = np.zeros(len(agreement), dtype=np.bool_)
    continues[1:] = agreement[1:] & agreement[:-1] & follows[1:]
    begin = np.flatnonzero(agreement & ~continues)
    ends = agreement.copy()
    ends[:-1] &= ~continues[1:]
    longest = np.zeros(len(pairs.rows), dtype=np.int32)
    np.maximum.at(longest, pairs.of_row[begin], (np.flatnonzero(ends) - begin + 1).astype(np.int32))
    return longest


def _validate(events: pa.Table) -> None:
    missing = [name for name in EVENTS.columns if name not in events.column_names]
    if missing:
        raise InputError(f"events lack the column{'s' * (len(missing) > 1)} {', '.join(missing)}")
    for field in EVENTS.schema:
        column = events.column(field.name)
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if kind != field.type and not (pa.types.is_string(field.type) and pa.types.is_large_string(kind)):
            raise InputError(f"events column '{field.name}' is {column.type}, not {field.type}")
        if column.null_count:
            raise InputError(f"events column '{field.name}' has {column.null_count} nulls")
    if events.num_rows:
        positions = pc.min_max(events.column("t")).as_py()
        if positions["min"] < 1 or positions["max"] >= NEVER - 1:
            raise InputError(f"events have positions t from {positions['min']} to {positions['max']}, not within 1..H")


def _sorted_rows(events: pa.Table) -> _Rows:
    names = {name: _dictionary(events.column(name)) for name in NAMES}
    group = _group(list(names.values()), events.num_rows)
    values = {field.name: _numpy(events.column(field.name)) for field in EVENTS.schema if field.name not in NAMES}
    order = _key_order(group, values)
    if order is not None:
        names = {name: codes.take(pa.array(order)) for name, codes in names.items()}
        group = group[order]
        values = {name: column[order] for name, column in values.items()}
    return _Rows(names, group, **values)


def _key_order(group: Wide, values: dict[str, npt.NDArray[Any]]) -> Wide | None:
    """Find the permutation into key order, None where rows already are; repeated keys go by all their values."""
    pair_and_t = (values["replicate"].astype(np.int64) << 32) + values["t"]  # ascending in (replicate, t)
    same_group = np.diff(group) == 0
    step = np.diff(pair_and_t)
    if np.all(np.diff(group) >= 0) and not np.any(same_group & (step <= 0)):
        return None
    order = np.lexsort((pair_and_t, group))
    repeated = (np.diff(group[order]) == 0) & (np.diff(pair_and_t[order]) == 0)
    if repeated.any():
        # So that the result does not depend on the order in which repeated positions arrive.
        rest = tuple(values[name] for name in ("y_eos", "x_eos", "f", "delta", "y_token", "x_token"))
        order = np.lexsort((*rest, pair_and_t, group))
    return order


def _dictionary(column: pa.ChunkedArray) -> pa.DictionaryArray:
    """Encode a string column as int32 codes into its sorted distinct values."""
    encoded = column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)
    if encoded.num_chunks == 1:
        whole = encoded.chunk(0)
    else:
        whole = pa.chunked_array(encoded.chunks, type=encoded.type).unify_dictionaries().combine_chunks()
        whole = whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole
    words = whole.dictionary
    used = pc.unique(words).sort()  # a writer's dictionary may hold words twice or unused
    rank = pc.index_in(words, used).to_numpy(zero_copy_only=False).astype(np.int32)
    codes = whole.indices.to_numpy(zero_copy_only=False)
    return pa.DictionaryArray.from_arrays(pa.array(rank[codes]), used.cast(pa.string()))


def _group(names: list[pa.DictionaryArray], rows: int) -> Wide:
    """[N] one number per combination of names, ascending in their lexicographic order."""
    group, size = np.zeros(rows, dtype=np.int64), 1
    for codes in names:
        distinct = len(codes.dictionary)
        if distinct <= 1:  # the usual segment has one study, model, document and action
            continue
        if size * distinct > 2**62:  # make it dense again before it would overflow
            kept, group = np.unique(group, return_inverse=True)
            size = len(kept)
        group = group * distinct + codes.indices.to_numpy()
        size *= distinct
    return group


def _numpy(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = column.to_numpy()
    return values


def _nullable(values: npt.NDArray[Any], *, null: Flags) -> pa.Array:
    return pa.array(values, mask=null)


def _table(columns: dict[str, Any], schema: pa.Schema) -> pa.Table:
    arrays = []
    for field in schema:
        values = columns[field.name]
        array = values if isinstance(values, pa.Array) else pa.array(values, type=field.type)
        arrays.append(array if array.type == field.type else array.cast(field.type))
    return pa.Table.from_arrays(arrays, schema=schema)
