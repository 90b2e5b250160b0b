"""Rows cut into runs, against Python's own grouping."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest

from kvdrift.schema.rows import row_hashes, run_begins


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_runs_are_those_of_itertools(count: int) -> None:
    generator = np.random.default_rng(count)
    group, flag = generator.integers(3, size=count), generator.random(count) < 0.5
    rows = list(zip(group.tolist(), flag.tolist(), strict=True))
    lengths = [len(list(run)) for _, run in itertools.groupby(rows)]
    assert np.flatnonzero(run_begins(group, flag)).tolist() == np.cumsum([0, *lengths])[:-1].tolist()
    assert run_begins(group).sum() == len(list(itertools.groupby(group.tolist())))


def test_hashes_are_equal_where_all_values_are() -> None:
    chance = np.random.default_rng(5)
    names = [None, "", "a", "b", "ab"]
    lists = [None, [], ["a"], ["b"], ["a", "b"], ["b", "a"], ["a", "a"], ["ab"], ["a", "b", "a"]]
    rows = [tuple(one[chance.integers(len(one))] for one in (names, names, lists, range(3))) for _ in range(2000)]
    types = (pa.string(), pa.dictionary(pa.int32(), pa.string()), pa.list_(pa.string()), pa.int32())
    # Columns in chunks, whose dictionaries may be in another order in a second table.
    tables = [
        pa.table(
            [
                pa.chunked_array([part[:700], part[700:]], kind)
                for part, kind in zip(zip(*order, strict=True), types, strict=True)
            ],
            names="abcd",
        )
        for order in (rows, rows[::-1])
    ]
    first, second = (row_hashes(table.unify_dictionaries().columns) for table in tables)
    assert first.tolist() == second[::-1].tolist()
    by_row = dict(zip(map(repr, rows), first.tolist(), strict=True))
    assert [by_row[repr(row)] for row in rows] == first.tolist()
    assert len(set(by_row.values())) == len(by_row)  # 675 rows that differ: two are equal by chance once in 10^14 times
    assert row_hashes(tables[0].slice(0, 0).columns).tolist() == []
