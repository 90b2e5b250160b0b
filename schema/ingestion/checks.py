"""What makes events right, checked over whole windows of rows at once; symbols are those of the definitions page.

An error is what no log of the definitions can hold, whatever the model, the policy and the random numbers:

- keys: a replicate is numbered from 0 and has every position 1..H exactly once, with one H per study and model;
- delta and f are total variations, so within [0, 1]. A double is looked at as float32, the stored type;
- the coupling emits a mismatch with probability exactly delta ("Coupling"), so X_t != Y_t with delta_t = 0 cannot
  happen. Rounding is no excuse: float32 turns nothing above 1e-45 into 0. After both sides' EOS this also says that
  both sides repeat one and the same EOS token;
- EOS is absorbing ("EOS is absorbing"): a flag that was true stays true; delta = 0 at t > e', where both laws are the
  point mass; f = 0 at t > e_X; and an ended side repeats one token. The token at the first EOS itself may be another
  one, since a model can have several EOS tokens and a generator goes on with one of them.

Not an error: delta > 0 when only one side has ended (its law is a point mass, the other's is not); f > 0 after Y's EOS
alone; equal tokens however large delta is, since equal tokens can also be drawn where the laws overlap little; no EOS.

A remark, since it follows from how kvdrift measures and not from what the columns mean: delta or f other than 0 at
t = 1 (eviction there follows prefill; a method that alters the prefill is legitimate); delta and f that differ before
the first mismatch (equal histories, but two batches of a half-precision model need not round alike); a full-retention
control that moves (the report says so, and it is the very thing that a control is kept for).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from schema.ingestion.files import INTEGERS, VALUES, EventRows, Ints, Wide
from schema.rows import run_begins

Flags = npt.NDArray[np.bool_]

FORCED_TOLERANCE = 0.01  # of |delta - f| while both histories are the same

_SORTS_FIRST = np.int32(-1)


@dataclass(frozen=True)
class Problem:
    """One kind of error or remark in a window: the rows that have it, and how to say it of one of them."""

    kind: str
    rows: Wide  # ascending
    say: Callable[[int], str]
    position: Callable[[int], int] | None = None  # t to name instead of the row's own


@dataclass(frozen=True)
class Window:
    """N rows in key order, cut into R replicates and U units: runs of consecutive replicates of one group."""

    rows: EventRows
    pair_first: Wide  # [R] first row of each replicate
    pair_last: Wide  # [R]
    unit_first: Wide  # [U] first row of each unit, and at the end N
    follows: Flags  # [N] the row before is the position before, of the same replicate

    @classmethod
    def of(cls, rows: EventRows) -> Window:
        """Sort N > 0 rows. A replicate or t that is null or no int32 takes part as -1."""
        unkeyed = [rows.flaws & np.uint16(0x101 << VALUES.index(name)) != 0 for name in ("replicate", "t")]
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
            rows=rows,
            pair_first=pair_first,
            pair_last=np.append(pair_first[1:], len(rows)) - 1,
            unit_first=np.append(np.flatnonzero(run_begins(rows.group) | (step > 1)), len(rows)),
            follows=follows,
        )

    def unit_of(self, row: Wide) -> Wide:
        """The unit of each of some rows."""
        return np.searchsorted(self.unit_first, row, side="right") - 1

    @property
    def unit_group(self) -> Ints:
        """[U] the group of each unit."""
        return self.rows.group[self.unit_first[:-1]]

    def common_last_position(self, of_group: Flags) -> int:
        """The last position at which most replicates of the chosen groups end; of several, the longest."""
        last = self.rows.t[self.pair_last][of_group[self.rows.group[self.pair_last]]]
        values, counts = np.unique(last, return_counts=True)
        return int(values[len(values) - 1 - np.argmax(counts[::-1])])


def find_errors(window: Window, horizon: Ints) -> list[Problem]:
    """Every kind of error that rows of the window have; ``horizon`` is H of each group (module docstring)."""
    rows = window.rows
    problems = [*_flaws(rows), *_key_errors(window, horizon), *_value_errors(rows), *_eos_errors(window)]
    return [problem for problem in problems if problem.rows.size]


def find_remarks(window: Window, control: Flags) -> list[Problem]:
    """What is worth a line and keeps nothing out; ``control`` tells which groups are full-retention controls."""
    rows = window.rows
    moved = (rows.delta != 0) | (rows.f != 0)
    mismatch = np.not_equal(rows.x_token, rows.y_token)
    before = np.cumsum(mismatch, dtype=np.int64) - mismatch  # mismatches before each row, of the whole window
    same_history = before == np.repeat(before[window.pair_first], window.pair_last - window.pair_first + 1)
    with np.errstate(invalid="ignore"):  # infinities are errors, not remarks
        apart = same_history & (np.abs(rows.delta - rows.f) > FORCED_TOLERANCE)
    problems = [
        Problem(
            "control",
            np.flatnonzero(control[rows.group] & moved),
            lambda row: f"a full-retention control has delta {rows.delta[row]:g}, f {rows.f[row]:g}, which should be 0",
        ),
        Problem(
            "first position",
            np.flatnonzero((rows.t == 1) & moved & ~control[rows.group]),
            lambda row: f"delta is {rows.delta[row]:g}, f {rows.f[row]:g}; both are 0 where eviction follows prefill",
        ),
        Problem(
            "before divergence",
            np.flatnonzero(apart),
            lambda row: f"delta is {rows.delta[row]:g}, f {rows.f[row]:g}; before the first mismatch they are the same",
        ),
    ]
    return [problem for problem in problems if problem.rows.size]


def _key_order(group: Ints, replicate: Ints, t: Ints) -> Wide | None:
    """The permutation into key order, None where rows already are."""
    low = [int(values.min()) for values in (replicate, t)]
    spans = [int(values.max()) - least + 1 for values, least in zip((replicate, t), low, strict=True)]
    if (int(group.max()) + 1) * spans[0] * spans[1] < 2**63:
        packed = group.astype(np.int64) * spans[0] + (replicate - np.int64(low[0]))
        packed = packed * spans[1] + (t - np.int64(low[1]))
        return None if np.all(packed[1:] >= packed[:-1]) else np.argsort(packed, kind="stable")
    return np.lexsort((t, replicate, group))


def _always(text: str) -> Callable[[int], str]:
    return lambda _: text


def _flaws(rows: EventRows) -> list[Problem]:
    if not rows.flaws.any():
        return []
    problems = []
    for bit, name in enumerate(VALUES):
        null, misfit = (np.flatnonzero(rows.flaws & np.uint16(1 << shift)) for shift in (bit, 8 + bit))
        problems.append(Problem("null", null, _always(f"{name} is null")))
        problems.append(
            Problem("type", misfit, _always(f"{name} is {'no int32' if name in INTEGERS else 'not 0 or 1'}"))
        )
    return problems


def _key_errors(window: Window, horizon: Ints) -> list[Problem]:
    rows = window.rows
    keyed = rows.flaws & np.uint16(0x101 << VALUES.index("replicate") | 0x101 << VALUES.index("t")) == 0
    before = np.zeros(len(rows), dtype=np.int32)  # the position before in the replicate, 0 at its start
    before[1:] = rows.t[:-1]
    before[window.pair_first] = 0
    again = np.zeros(len(rows), dtype=np.bool_)
    again[1:] = rows.t[1:] == rows.t[:-1]
    again[window.pair_first] = False
    np.maximum(before, 0, out=before)
    last = rows.t[window.pair_last]
    wanted = horizon[rows.group[window.pair_last]]
    ends = window.pair_last[(last != wanted) & (last > 0)]

    def missing(row: int) -> str:
        first, last = int(before[row]) + 1, int(rows.t[row]) - 1
        return "the position is missing" if first == last else f"positions {first}..{last} are missing"

    def short(row: int) -> str:
        return f"the replicate ends at {rows.t[row]}, but the study and model have horizon {horizon[rows.group[row]]}"

    negative = np.flatnonzero(keyed & (rows.replicate < 0))
    early = np.flatnonzero(keyed & (rows.t < 1))
    skipped = np.flatnonzero(keyed & (rows.t - before.astype(np.int64) > 1))
    return [
        Problem("replicate", negative, lambda row: f"replicate is {rows.replicate[row]}, must be at least 0"),
        Problem("position", early, lambda row: f"t is {rows.t[row]}, must be at least 1"),
        Problem("duplicate", np.flatnonzero(keyed & again), _always("the key is there more than once")),
        Problem("gap", skipped, missing, position=lambda row: int(before[row]) + 1),
        Problem("horizon", ends, short),
    ]


def _value_errors(rows: EventRows) -> list[Problem]:
    problems = []
    for name in ("delta", "f"):
        values = getattr(rows, name)
        given = rows.flaws & np.uint16(1 << VALUES.index(name)) == 0
        outside = ~((values >= 0) & (values <= 1))  # also where it is NaN
        problems.append(Problem("range", np.flatnonzero(outside & given), _outside(name, values)))
    agreed = (rows.delta == 0) & (rows.flaws == 0)
    mismatch = np.flatnonzero(agreed & (rows.x_token != rows.y_token))
    return [*problems, Problem("impossible mismatch", mismatch, _impossible(rows))]


def _outside(name: str, values: npt.NDArray[np.float32]) -> Callable[[int], str]:
    return lambda row: f"{name} is {values[row]:g}, must be within [0, 1]"


def _impossible(rows: EventRows) -> Callable[[int], str]:
    return lambda row: f"x_token {rows.x_token[row]} and y_token {rows.y_token[row]} differ where delta is 0"


def _eos_errors(window: Window) -> list[Problem]:
    rows = window.rows
    sound = window.follows & (rows.flaws == 0)
    sound[1:] &= rows.flaws[:-1] == 0
    problems = []
    ended = []  # of each side: whether it had ended before the row
    for name, flag, token in (("x", rows.x_eos, rows.x_token), ("y", rows.y_eos, rows.y_token)):
        before = np.zeros(len(rows), dtype=np.bool_)
        before[1:] = flag[:-1]
        before &= sound
        repeats = np.zeros(len(rows), dtype=np.bool_)  # so had it before the row before, whose token is then repeated
        repeats[1:] = before[:-1]
        other = np.zeros(len(rows), dtype=np.bool_)
        other[1:] = token[1:] != token[:-1]
        undone, changed = np.flatnonzero(before & ~flag), np.flatnonzero(before & repeats & flag & other)
        problems.append(Problem("EOS undone", undone, _always(f"{name}_eos is false after it was true")))
        problems.append(Problem("token after EOS", changed, _changed(name, token)))
        ended.append(before & flag)
    after_x, after_both = (
        np.flatnonzero(ended[0] & (rows.f > 0)),
        np.flatnonzero(ended[0] & ended[1] & (rows.delta > 0)),
    )
    return [
        *problems,
        Problem(
            "delta after EOS", after_both, lambda row: f"delta is {rows.delta[row]:g} after both sides' EOS, must be 0"
        ),
        Problem("f after EOS", after_x, lambda row: f"f is {rows.f[row]:g} after X's EOS, must be 0"),
    ]


def _changed(name: str, token: Ints) -> Callable[[int], str]:
    return lambda row: f"{name}_token is {token[row]} after {token[row - 1]}, but {name} has ended and repeats its EOS"
