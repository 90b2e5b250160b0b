"""Assemble one replicate whose rows come in any order, late or twice; its state is a few bytes.

This module does not use Beam. While positions are missing, the state has one byte for each position, and the rows wait
elsewhere. Once the replicate is whole, the state has a four-byte checksum of each row. The checksum tells whether a row
that comes again equals the first.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from schema.rows import repeats
from transforms.streams.packed import ROW, Rows, unpacked

_OPEN, _WHOLE = b"o", b"w"
_ODD = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)

CONTRADICTION = "rows of one position contradict each other"
LATE_CONTRADICTION = "the row contradicts one of a replicate that was whole before"


def is_whole(state: bytes | None) -> bool:
    """Tell from its state whether a replicate is whole."""
    return state is not None and state.startswith(_WHOLE)


def latest_of(state: bytes | None) -> int:
    """Return the event time of the latest row of an incomplete replicate, in microseconds."""
    return -(2**63) if state is None else int(np.frombuffer(state, np.int64, 1, offset=1)[0])


def with_positions(state: bytes | None, rows: Rows, horizon: int, latest: int) -> tuple[bytes, bool]:
    """Add rows at positions 1..H to an incomplete replicate, whose state is None before its first row.

    ``latest`` is the event time of the latest row, including these rows, in microseconds. Returns the new state, and
    whether every position is present.
    """
    there = np.zeros(horizon, np.bool_) if state is None else np.frombuffer(state, np.bool_, offset=9).copy()
    there[rows["t"] - 1] = True
    return _OPEN + np.int64(latest).tobytes() + there.tobytes(), bool(there.all())


def put_together(pieces: Iterable[bytes]) -> tuple[Rows, bool]:
    """Merge the packed rows of one replicate.

    Returns the rows by position, each once, and False; or all rows, and True, if two rows of a position differ.
    """
    rows = np.concatenate([np.empty(0, ROW), *map(unpacked, pieces)])
    ordered = rows[np.argsort(rows["t"], kind="stable")]
    again, contradicting = repeats([ordered["t"]], [ordered[name] for name in ROW.names or ()])
    return (ordered, True) if contradicting.any() else (ordered[~again], False)


def whole_state(rows: Rows) -> bytes:
    """Return the state of a whole replicate with ``rows``, [H]."""
    return _WHOLE + _checksums(rows).tobytes()


def contradicts(state: bytes, rows: Rows) -> bool:
    """Tell whether rows that come again for a whole replicate differ from the first rows."""
    known = np.frombuffer(state, np.uint32, offset=1)
    return bool((known[rows["t"] - 1] != _checksums(rows)).any())


def _checksums(rows: Rows) -> npt.NDArray[np.uint32]:
    """Return a checksum of each row, [N]: the sum of its 22 bytes as three words, each word times an odd number."""
    padded = np.zeros((len(rows), 24), np.uint8)
    padded[:, : ROW.itemsize] = rows.view(np.uint8).reshape(len(rows), ROW.itemsize)
    mixed = (padded.view("<u8") * _ODD).sum(axis=1, dtype=np.uint64)
    spread: npt.NDArray[np.uint64] = (mixed ^ (mixed >> np.uint64(29))) * _ODD[0]
    return (spread >> np.uint64(32)).astype(np.uint32)
