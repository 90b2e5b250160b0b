"""Assemble replicates whose rows come in any order, late or twice, from files and from Beam.

This module does not use Beam. A replicate is whole if it has the positions 1..H, or 1..m if both sides have ended at m.
What follows then is known (``kvdrift.ingestion.event_rows.filled``), and rows that came of it count as repeats. A row
that repeats an earlier row, with equal key and values, counts once. Rows are compared with those that came from an
earlier place (``STORED``, then ``WAITING``), which stay; if new rows contradict these or each other, the new rows of
the replicate are set aside.

Between its rows, a runner keeps a state of a replicate: one byte for each position while positions are missing, and
afterwards a four-byte checksum of each row, which tells whether a row that comes again equals the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvdrift.ingestion.event_rows import VALUES, EventRows, only_repeats, without_tokens
from kvdrift.schema.rows import Flags, Ints, Wide, repeats, run_begins
from kvdrift.transforms.streams.packed import ROW, Rows, packed, rows_of

STORED, WAITING, NEW = 0, 1, 2
"""The origin of a row: table ``events``, the rows that wait, or what came just now."""

CONTRADICTION = "rows of one position contradict each other"
LATE_CONTRADICTION = "the row contradicts one of a replicate that was whole before"

_OPEN, _WHOLE = b"o", b"w"
_ODD = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)


@dataclass(frozen=True)
class Assembled:
    """Rows of replicates, divided by what happens to them; all in key order."""

    whole: EventRows  # all rows of the replicates that have become whole
    waiting: EventRows  # new rows of replicates that still lack positions
    conflicting: EventRows  # new rows that are set aside
    conflict: Flags  # [rows of ``conflicting``] whether the row contradicts another row
    collapsed: int  # the number of new rows that repeat an earlier row


def assemble(rows: EventRows, origin: Ints, horizon: Ints) -> Assembled:
    """Assemble new rows of some replicates with all earlier rows of these replicates.

    Args:
        rows: N rows at positions 1..H.
        origin: [N] ``STORED``, ``WAITING`` or ``NEW``.
        horizon: H of each group.
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
    """Tell for each row whether a row of its replicate has a flag, [N]."""
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
