"""The uniforms: their range and resolution, their dependences, their law, and the exact stream itself."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from kvdrift.generator.coupling.rollout import uniform_table

KEY = (7, "RULER-768-3", "snapkv-half")


def test_range_resolution_and_shape() -> None:
    table = uniform_table(*KEY, range(200), 64, 2)
    assert table.shape == (200, 64, 2)
    assert table.dtype == np.float64
    assert table.min() >= 0.0
    assert table.max() < 1.0
    scaled = table * 2.0**53
    assert np.array_equal(scaled, np.floor(scaled)), "multiples of 2**-53"
    # Of 25,600 draws about half have an odd last bit; 5 standard deviations are 400.
    assert abs((scaled % 2).sum() - table.size / 2) < 5 * np.sqrt(table.size) / 2


def test_every_part_of_the_key_matters() -> None:
    tables = [
        uniform_table(seed, document, action, [replicate], 16, 2)
        for seed, document, action, replicate in [
            (7, "a", "b", 0), (8, "a", "b", 0), (7, "A", "b", 0), (7, "a", "c", 0), (7, "a", None, 0),
            (7, "a", "null", 0), (7, "a", "", 0), (7, "ab", "", 0), (7, "", "ab", 0), (7, "a", "b", 1),
            (7, "a", "b", 2**31 - 1),
        ]
    ]  # fmt: skip
    for one, other in combinations(tables, 2):
        assert not np.intersect1d(one, other).size, "no two streams share a number"


def test_a_shorter_horizon_is_a_prefix() -> None:
    whole = uniform_table(*KEY, range(5), 129, 2)
    for horizon in (1, 2, 3, 64, 128):
        assert np.array_equal(uniform_table(*KEY, range(5), horizon, 2), whole[:, :horizon])


@pytest.mark.parametrize("asked", [[0], [6], [9, 3, 3], range(4, 8), []])
def test_replicates_do_not_depend_on_which_are_asked(asked: list[int]) -> None:
    whole = uniform_table(*KEY, range(10), 32, 2)
    assert np.array_equal(uniform_table(*KEY, asked, 32, 2), whole[list(asked)])


def test_law() -> None:
    """Kolmogorov-Smirnov over all numbers, per purpose, and over the first position of many streams.

    Neighbouring replicates, positions and purposes are uncorrelated. Seven tests at level 1e-6 each: an honest
    generator fails one of them with probability below 1e-5.
    """
    table = uniform_table(*KEY, range(2000), 32, 2)
    first = np.concatenate([uniform_table(seed, f"doc-{seed}", "a", [0], 1, 1).ravel() for seed in range(2000)])
    for sample in (table.ravel(), table[:, :, 0].ravel(), table[:, :, 1].ravel(), first):
        assert stats.kstest(sample, "uniform").pvalue > 1e-6
    neighbours = [(table[:-1], table[1:]), (table[:, :-1], table[:, 1:]), (table[:, :, :1], table[:, :, 1:])]
    for one, other in neighbours:
        assert stats.pearsonr(one.ravel(), other.ravel()).pvalue > 1e-6


def test_the_stream_itself() -> None:
    """Stored events were drawn from these numbers: a change here makes them unrepeatable, so it needs a new version."""
    pair = uniform_table(7, "RULER-768-3", "snapkv-half", [0, 41], 2, 2)
    assert [[[value.hex() for value in step] for step in row] for row in pair.tolist()] == GOLDEN_PAIR
    reference = uniform_table(0, "d", None, [1], 4, 1)
    assert [value.hex() for value in reference.ravel().tolist()] == GOLDEN_REFERENCE


GOLDEN_PAIR = [
    [["0x1.7cd10a3d7e744p-3", "0x1.68f1d35048eb0p-3"], ["0x1.f1d7fcdb1b2abp-1", "0x1.d57a64fae4401p-1"]],
    [["0x1.b086d44d2615cp-3", "0x1.29d885ba6a51ep-2"], ["0x1.33128cb145a8cp-2", "0x1.3845105363c60p-3"]],
]
GOLDEN_REFERENCE = ["0x1.61236ca605a40p-6", "0x1.cf552af99990cp-3", "0x1.fa64b8225a20cp-2", "0x1.d98d82e545f7cp-1"]
