"""The assembler of replicates against plain loops: rows in any order, repeated, contradicting, ended, from three places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from kvdrift.ingestion.event_rows import VALUES, EventRows, converted
from kvdrift.transforms.streams.assembly import NEW, STORED, WAITING, assemble

H = 4
Row = dict[str, Any]


def row(replicate: int, t: int, ended: bool, token: int) -> Row:  # noqa: FBT001
    distance = 0.0 if ended else 0.5
    return {
        "replicate": replicate, "t": t, "x_token": token, "y_token": token, "delta": distance, "f": distance,
        "x_eos": ended, "y_eos": ended,
    }  # fmt: skip


def compared(given: Row) -> tuple[Any, ...]:
    """What tells rows of one position apart: not the token that repeats after both ends."""
    return tuple(value for name, value in given.items() if not (given["x_eos"] and name in {"x_token", "y_token"}))


def plainly(earlier: list[Row], new: list[Row], *, stored: bool) -> tuple[list[Row], list[Row], list[Row]]:
    """Whole, waiting and conflicting rows of one replicate."""
    there = {given["t"]: given for given in earlier}
    for given in new:
        if compared(there.setdefault(given["t"], given)) != compared(given):
            return [], [], new
    length = 0
    while length + 1 in there:
        length += 1
    if length < H and not (length and there[length]["x_eos"]):
        waits = [given for t, given in there.items() if t not in {old["t"] for old in earlier}]
        return [], waits, []
    if any(t > length and not given["x_eos"] for t, given in there.items()):
        return [], [], new
    return [] if stored else [there[t] for t in range(1, length + 1)], [], []


def rows_of(rows: EventRows) -> list[tuple[Any, ...]]:
    return sorted(zip(*(getattr(rows, name).tolist() for name in VALUES), strict=True))


def expected(rows: list[Row]) -> list[tuple[Any, ...]]:
    return sorted(tuple(given[name] for name in VALUES) for given in rows)


def test_it_is_its_plain_twin() -> None:
    chance = np.random.default_rng(3)
    came = np.zeros(3, np.int64)
    for _ in range(400):
        everything, origins, wanted = list[Row](), list[int](), tuple[list[Row], list[Row], list[Row]](([], [], []))
        for replicate in range(3):
            end = int(chance.integers(1, 8))
            right = [row(replicate, t, t >= end, int(chance.integers(2)) if t > end else 9) for t in range(1, H + 1)]
            stored = chance.random() < 0.2
            earlier = right if stored else [given for given in right if chance.random() < 0.3]
            new = [dict(given) for given in right if chance.random() < 0.7]
            new += [dict(given) for given in new if chance.random() < 0.2]
            for given in new:
                if chance.random() < 0.08:
                    given.update(row(replicate, given["t"], bool(chance.random() < 0.5), 7))
            if not stored and plainly([], earlier, stored=False)[1] != earlier:
                earlier = []  # they would not wait
            new = [new[place] for place in chance.permutation(len(new))]
            everything += [*new, *earlier]
            origins += [NEW] * len(new) + [STORED if stored else WAITING] * len(earlier)
            for rows, own in zip(wanted, plainly(earlier, new, stored=stored), strict=True):
                rows.extend(own)
        if not everything:
            continue
        table = pa.Table.from_pylist(everything)
        found = assemble(
            converted(table, np.zeros(len(everything), np.int32)), np.array(origins, np.int32), np.array([H], np.int32)
        )
        parts = (found.whole, found.waiting, found.conflicting)
        assert [rows_of(part) for part in parts] == [expected(rows) for rows in wanted]
        pairs = {number for number, flag in zip(found.conflicting.replicate, found.conflict, strict=True) if flag}
        assert pairs == set(found.conflicting.replicate), "each replicate that is set aside has a row to name"
        came += [len(part) for part in parts]
    assert came.min() > 50
