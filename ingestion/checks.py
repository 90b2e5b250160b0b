"""Check events, many rows at once; symbols are those of ``docs/quantities.md``, e_X and e_Y the ends of X and Y.

An error is a value that no log of coupled pairs can hold, whatever the model, policy and random numbers:

- keys: a replicate is numbered from 0 and has every position 1..H exactly once, with one H for each study and model.
  Positions after both sides' EOS may be missing at the end, since their values follow;
- delta and f are total variations, so within [0, 1]. Values outside by at most 1e-6, which is rounding, are taken as 0
  or 1. A double is converted to float32, the stored type, afterwards;
- the coupling emits a mismatch with probability exactly delta, so X_t != Y_t with delta_t = 0 cannot
  happen, not even by rounding: float32 turns nothing above 1e-45 into 0. After both sides' EOS it follows that both
  sides repeat one and the same EOS token;
- EOS is absorbing: a flag that was true stays true; delta = 0 at t > max(e_X, e_Y), where both distributions
  are the same point mass; f = 0 at t > e_X; and an ended side repeats one token. The token at the first EOS itself may
  differ, since a model can have several EOS tokens and a generator goes on with only one.

Nor can a full-retention control have delta or f other than 0, or two tokens that differ. Such a row would be a
lasting fault of the store, since events are never removed.

Not an error: delta > 0 when only one side has ended (its distribution is a point mass, the other's is not); f > 0 after
Y's EOS alone; equal tokens at any delta, since equal tokens can also be drawn if the distributions overlap little; no
EOS.

A remark names values that kvdrift's own generator does not make, but that the meaning of the columns allows: delta or f
other than 0 at t = 1 (eviction follows prefill here; a method that alters the prefill is legitimate); delta and f that
differ before the first mismatch (the histories are equal, but two batches of a half-precision model need not round
equally).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdrift.ingestion.event_rows import DISTANCES, INTEGERS, VALUES, EventRows
from kvdrift.schema.rows import Flags, Ints, Wide, combined_codes, run_begins

FORCED_TOLERANCE = 0.01  # tolerance of |delta - f| while both histories are the same

_SORTS_FIRST = np.int32(-1)


@dataclass(frozen=True)
class Anomaly:
    """One kind of error or remark, and the numbers of the rows that have it, ascending.

    ``say(row)`` returns a message about one of the rows. ``position(row)`` returns the position t that the message is
    about; ``position`` is None if every message is about the row's own t.
    """

    kind: str
    rows: Wide
    say: Callable[[int], str]
    position: Callable[[int], int] | None = None


@dataclass(frozen=True)
class SortedRows:
    """N rows in key order, cut into R replicates and U units.

    A unit is a run of replicates of one group, with consecutive numbers.
    """

    rows: EventRows
    pair_first: Wide  # [R] the first row of each replicate
    pair_last: Wide  # [R] the last row of each replicate
    unit_first: Wide  # [U + 1] the first row of each unit, and at the end N
    follows: Flags  # [N] whether the previous row is the previous position of the same replicate

    @classmethod
    def of(cls, rows: EventRows) -> SortedRows:
        """Sort N > 0 rows. A replicate or t that is null or no int32 is sorted as -1."""
        unkeyed = [rows.is_flawed(name) for name in ("replicate", "t")]
        replicate, t = (
            np.where(bad, _SORTS_FIRST, values) if bad.any() else values
            for bad, values in zip(unkeyed, (rows.replicate, rows.t), strict=True)
        )
        order = _key_order(rows.group, replicate, t)
        rows = replace(rows, replicate=replicate, t=t)
        if order is not None:
            rows = rows.take(order)
        pair_begins = run_begins(rows.group, rows.replicate)
        step = np.diff(rows.replicate.astype(np.int64), prepend=np.int64(0))
        pair_first = np.flatnonzero(pair_begins)
        follows = ~pair_begins
        follows[1:] &= np.diff(rows.t.astype(np.int64)) == 1
        return cls(
            rows=rows, pair_first=pair_first, pair_last=np.append(pair_first[1:], len(rows)) - 1,
            unit_first=np.append(np.flatnonzero(run_begins(rows.group) | (step > 1)), len(rows)), follows=follows,
        )  # fmt: skip

    def unit_of(self, row: Wide) -> Wide:
        """Return the number of the unit that each row in ``row``, an array of row numbers, belongs to."""
        return np.searchsorted(self.unit_first, row, side="right") - 1

    @property
    def unit_group(self) -> Ints:
        """Return the group of each unit, [U]."""
        return self.rows.group[self.unit_first[:-1]]

    def suggested_horizon(self, of_group: Flags) -> int:
        """Return the H that the replicates of the groups marked in ``of_group`` suggest; 0 if they suggest none.

        H is the commonest last position of the replicates that stop before both sides have ended, the largest on a tie.
        If there is no such replicate, H is the last position of all replicates, provided that it is the same in all of
        them, and that at least one goes on after both sides have ended.
        """
        chosen = of_group[self.rows.group[self.pair_last]]
        last, first = self.pair_last[chosen], self.pair_first[chosen]
        ended = self.rows.x_eos & self.rows.y_eos
        values, counts = np.unique(self.rows.t[last[~ended[last]]], return_counts=True)
        if len(values):
            return int(values[len(values) - 1 - np.argmax(counts[::-1])])
        padded = ended[np.maximum(last - 1, first)] & (last > first)
        ends = np.unique(self.rows.t[last])
        return int(ends[0]) if len(ends) == 1 and padded.any() else 0


def find_errors(ordered: SortedRows, horizon: Ints, control: Flags) -> list[Anomaly]:
    """Find the errors among the rows, one ``Anomaly`` for each kind.

    ``horizon`` is H of each group, 0 if unknown; ``control`` marks the groups that are full-retention controls.
    """
    anomalies = [
        *_flaws(ordered.rows),
        *_key_errors(ordered, horizon),
        *_value_errors(ordered.rows),
        *_eos_errors(ordered),
    ]
    anomalies.append(_moved(ordered.rows, control))
    return [anomaly for anomaly in anomalies if anomaly.rows.size]


def find_remarks(ordered: SortedRows, control: Flags) -> list[Anomaly]:
    """Find unusual values that are no errors; ``control`` marks the groups that are full-retention controls."""
    rows = ordered.rows
    moved = (rows.delta != 0) | (rows.f != 0)
    mismatch = np.not_equal(rows.x_token, rows.y_token)
    before = np.cumsum(mismatch, dtype=np.int64) - mismatch  # number of mismatches in all previous rows
    same_history = before == np.repeat(before[ordered.pair_first], ordered.pair_last - ordered.pair_first + 1)
    with np.errstate(invalid="ignore"):  # infinities are errors, not remarks
        apart = same_history & (np.abs(rows.delta - rows.f) > FORCED_TOLERANCE)
    ours = control[rows.group]
    first = moved & ~ours & (rows.t == 1)
    remarks = [
        ("first position", first, "delta is {:g}, f {:g}; at t = 1 both are 0 if eviction follows prefill"),
        ("before divergence", apart, "delta is {:g}, f {:g}; before a mismatch both are equal but for rounding"),
    ]
    return [
        Anomaly(kind, np.flatnonzero(here), _says(text, rows.delta, rows.f))
        for kind, here, text in remarks
        if here.any()
    ]


def _key_order(group: Ints, replicate: Ints, t: Ints) -> Wide | None:
    """Return the permutation that sorts the rows by key; None if they are sorted."""
    columns = [values.astype(np.int64) - int(values.min()) for values in (group, replicate, t)]
    packed = combined_codes([(codes, int(codes.max()) + 1) for codes in columns], len(group))
    return None if np.all(packed[1:] >= packed[:-1]) else np.argsort(packed, kind="stable")


def _of_row_before(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return for each row the value of the previous row, 0 for the first row."""
    return np.concatenate([np.zeros(1, values.dtype), values[:-1]])


def _says(text: str, *columns: npt.NDArray[Any]) -> Callable[[int], str]:
    """Return a function of a row's number, which fills the format ``text`` with the row's values in ``columns``."""
    return lambda row: text.format(*(column[row] for column in columns))


def _says_outside(name: str, values: npt.NDArray[Any]) -> Callable[[int], str]:
    """Return a function of a row's number, which says with all digits that the row's distance is outside of [0, 1]."""
    return lambda row: f"{name} is {str(values[row]).removesuffix('.0')}, must be within [0, 1]"


def _flaws(rows: EventRows) -> list[Anomaly]:
    if not rows.flaws.any():
        return []
    anomalies = []
    for bit, name in enumerate(VALUES):
        null, misfit = (np.flatnonzero(rows.flaws & np.uint16(1 << shift)) for shift in (bit, 8 + bit))
        wanted = "does not fit int32" if name in INTEGERS else "is no number" if name in DISTANCES else "is not 0 or 1"
        anomalies += [
            Anomaly("null", null, _says(f"{name} is null")),
            Anomaly("type", misfit, _says(f"{name} {wanted}")),
        ]
    return anomalies


def _moved(rows: EventRows, control: Flags) -> Anomaly:
    """Find the rows of full-retention controls that have delta or f other than 0, or two tokens that differ."""
    moved = (rows.delta != 0) | (rows.f != 0) | np.not_equal(rows.x_token, rows.y_token)
    text = "a full-retention control has delta {:g}, f {:g}, tokens {} and {}; must be 0, 0 and two equal tokens"
    says = _says(text, rows.delta, rows.f, rows.x_token, rows.y_token)
    return Anomaly("control", np.flatnonzero(moved & control[rows.group]), says)


def _key_errors(ordered: SortedRows, horizon: Ints) -> list[Anomaly]:
    rows, pair_first, pair_last = ordered.rows, ordered.pair_first, ordered.pair_last
    keyed = ~(rows.is_flawed("replicate") | rows.is_flawed("t"))
    before = _of_row_before(rows.t)
    again = rows.t == before
    again[pair_first] = False
    before[pair_first] = 0  # the previous position of the replicate, 0 at its start
    np.maximum(before, 0, out=before)
    last = rows.t[pair_last]
    wanted = horizon[rows.group[pair_last]]
    stopped = rows.x_eos[pair_last] & rows.y_eos[pair_last] & (last < wanted)
    ends = pair_last[(last != wanted) & (last > 0) & ~stopped]

    def missing(row: int) -> str:
        first, last = int(before[row]) + 1, int(rows.t[row]) - 1
        return "the position is missing" if first == last else f"positions {first}..{last} are missing"

    def short(row: int) -> str:
        if not horizon[rows.group[row]]:
            return "all replicates stop where both sides have ended, so the horizon is unknown; give --horizon"
        return f"the replicate ends at {rows.t[row]}, but the study and model have horizon {horizon[rows.group[row]]}"

    negative = np.flatnonzero(keyed & (rows.replicate < 0))
    early = np.flatnonzero(keyed & (rows.t < 1))
    skipped = np.flatnonzero(keyed & (rows.t - before.astype(np.int64) > 1))
    return [
        Anomaly("replicate", negative, lambda row: f"replicate is {rows.replicate[row]}, must be at least 0"),
        Anomaly("position", early, lambda row: f"t is {rows.t[row]}, must be at least 1"),
        Anomaly("duplicate", np.flatnonzero(keyed & again), _says("the key occurs more than once")),
        Anomaly("gap", skipped, missing, position=lambda row: int(before[row]) + 1),
        Anomaly("horizon", ends, short),
    ]


def _value_errors(rows: EventRows) -> list[Anomaly]:
    anomalies = []
    for name in ("delta", "f"):
        values = getattr(rows, name)
        readable = rows.flaws & np.uint16(1 << VALUES.index(name)) == 0
        outside = ~((values >= 0) & (values <= 1))  # true for NaN as well
        anomalies.append(Anomaly("range", np.flatnonzero(outside & readable), _says_outside(name, values)))
    agreed = (rows.delta == 0) & (rows.flaws == 0)
    mismatch = np.flatnonzero(agreed & (rows.x_token != rows.y_token))
    say = _says("x_token {} and y_token {} differ although delta is 0", rows.x_token, rows.y_token)
    return [*anomalies, Anomaly("impossible mismatch", mismatch, say)]


def _eos_errors(ordered: SortedRows) -> list[Anomaly]:
    rows = ordered.rows
    sound = ordered.follows & (rows.flaws == 0) & (_of_row_before(rows.flaws) == 0)
    anomalies = []
    ended = []  # for each side: whether the side had ended before this row
    for name, flag, token in (("x", rows.x_eos, rows.x_token), ("y", rows.y_eos, rows.y_token)):
        before = _of_row_before(flag) & sound
        repeats = _of_row_before(before)  # ended even earlier: its token repeats
        undone = np.flatnonzero(before & ~flag)
        changed = np.flatnonzero(before & repeats & flag & (token != _of_row_before(token)))
        repeated = f"{name}_token is {{}} after {{}}, must repeat it after EOS"
        anomalies.append(Anomaly("EOS undone", undone, _says(f"{name}_eos is false after it was true")))
        anomalies.append(Anomaly("token after EOS", changed, _says(repeated, token, _of_row_before(token))))
        ended.append(before & flag)
    after_x = np.flatnonzero(ended[0] & (rows.f > 0))
    after_both = np.flatnonzero(ended[0] & ended[1] & (rows.delta > 0))
    return [
        *anomalies,
        Anomaly("delta after EOS", after_both, _says("delta is {:g} after both sides' EOS, must be 0", rows.delta)),
        Anomaly("f after EOS", after_x, _says("f is {:g} after X's EOS, must be 0", rows.f)),
    ]
