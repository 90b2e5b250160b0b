"""Rows cut into runs, against Python's own grouping."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from schema.rows import run_begins


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_runs_are_those_of_itertools(count: int) -> None:
    generator = np.random.default_rng(count)
    group, flag = generator.integers(3, size=count), generator.random(count) < 0.5
    rows = list(zip(group.tolist(), flag.tolist(), strict=True))
    lengths = [len(list(run)) for _, run in itertools.groupby(rows)]
    assert np.flatnonzero(run_begins(group, flag)).tolist() == np.cumsum([0, *lengths])[:-1].tolist()
    assert run_begins(group).sum() == len(list(itertools.groupby(group.tolist())))
