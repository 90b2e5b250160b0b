"""Looks at a growing study: critical constants against the normal law of all looks, repeated intervals by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from oracles.plain_looks import ever_outside, spent, student_interval
from scipy.stats import norm

from kvdrift.schema.errors import InputError
from kvdrift.schema.moments import SCALAR_MOMENTS
from kvdrift.schema.windows import Windows
from kvdrift.stats.bootstrap import observed_errors, resample
from kvdrift.stats.endpoints import Endpoint
from kvdrift.stats.moments import DocumentMoments
from kvdrift.stats.repeated import RepeatedInterval, draws_of, repeated_intervals
from kvdrift.stats.sequential import EQUIVALENCE, HALF_WIDTH, SIGN, Resolution, critical_constants

MISMATCH = Endpoint("mismatch", "one")


def moments(*strata: list[float]) -> DocumentMoments:
    """Documents of one action with these mismatches, stratum by stratum."""
    values = np.concatenate([np.array(one, dtype=float) for one in strata])[:, None]
    names = np.array([f"d{number:03}" for number in range(len(values))])
    of = np.repeat([f"s{number}" for number in range(len(strata))], [len(one) for one in strata])
    scalars = {name: values if name == "mismatch" else np.full_like(values, 0.5) for name in SCALAR_MOMENTS}
    return DocumentMoments(names, of, names, ("one",), Windows.of(16), scalars, {}, {})


def at_look(measured: DocumentMoments, constant: float, *, draws: int = 2_000, last: bool = False) -> RepeatedInterval:
    (found,) = repeated_intervals(measured, [MISMATCH], constant=constant, draws=draws, seed=1, last=last)
    return found


def test_small_noise_is_no_evidence_that_documents_do_not_fail() -> None:
    """Of 24 documents that vary by less than a margin of 2 points, as many as 1 - .025^(1/24) = 14% may fail."""
    noise = np.random.default_rng(3).uniform(0.0, 0.002, 24).tolist()
    measured = moments(noise[:12], noise[12:])
    plain = at_look(measured, 1.96)
    (wide,) = repeated_intervals(
        measured, [MISMATCH], constant=1.96, draws=500, seed=1, last=True, alike_within=0.02
    )  # fmt: skip
    assert plain.high < 0.002
    assert wide.method == "alike"
    assert wide.high == pytest.approx(0.143, abs=0.002)
    assert not Resolution(EQUIVALENCE, 0.02).holds(wide.low, wide.high)


def test_constants_are_the_published_ones() -> None:
    assert np.round(critical_constants([0.25, 0.5, 0.75, 1], 0.05), 3).tolist() == [4.333, 2.963, 2.359, 2.014]


@pytest.mark.parametrize(
    ("shares", "alpha"),
    [([0.25, 0.5, 0.75, 1.0], 0.05), ([0.1, 0.35, 0.8, 1.0], 0.05 / 6), ([0.3, 0.32, 1.0], 0.2), ([0.5, 1.0], 0.01)],
)
def test_what_is_spent_by_each_look_is_what_may_be(shares: list[float], alpha: float) -> None:
    constants = list(critical_constants(shares, alpha))
    for look in range(1, len(shares) + 1):
        outside = ever_outside(shares[:look], constants[:look])
        assert math.isclose(outside, spent(shares[look - 1], alpha), rel_tol=1e-3, abs_tol=1e-7)


def test_one_look_is_the_fixed_design() -> None:
    assert math.isclose(critical_constants([1], 0.05)[0], norm.ppf(0.975), rel_tol=1e-10)


def test_a_look_at_almost_nothing_spends_almost_nothing() -> None:
    first, *rest = critical_constants([0.001, 0.5, 1], 0.05)
    assert first > 30
    np.testing.assert_allclose(rest, critical_constants([0.5, 1], 0.05), rtol=1e-9)


@pytest.mark.parametrize("shares", [[], [0.5, 0.5, 1], [0.5], [0, 1], [0.5, 1, 0.75]])
def test_shares_grow_to_the_whole(shares: list[float]) -> None:
    with pytest.raises(InputError, match="these shares must increase, from above 0 to 1"):
        critical_constants(shares, 0.05)


def test_intervals_of_far_tails_are_students() -> None:
    values = np.random.default_rng(4).uniform(0.4, 0.5, 12).tolist()
    found = at_look(moments(values), 4.333)
    assert (found.method, found.draws, found.documents, found.clusters) == ("student", 0, 12, 12)
    assert (found.low, found.high) == pytest.approx(student_interval(values, 4.333), rel=1e-9)


def test_draws_are_as_many_as_say_where_a_tail_begins() -> None:
    assert draws_of(0.022, 10_000, last=False) == 10_000
    assert draws_of(0.0016, 10_000, last=False) == 31_250
    assert [draws_of(tail, 10_000, last=False) for tail in (0.001, 0.0)] == [0, 0]
    assert draws_of(0.001, 10_000, last=True) == 10_000  # for numbers that Student's law says nothing of


@pytest.mark.parametrize("skewed", [True, False])
def test_intervals_of_near_tails_are_the_bootstraps_or_students(*, skewed: bool) -> None:
    """Each end is the farther of the two; for skewed documents one end is the bootstrap's, the other Student's."""
    random = np.random.default_rng(5)
    values = (random.exponential(0.05, 24) if skewed else random.uniform(0.1, 0.9, 24)).tolist()
    measured = moments(values)
    found = at_look(measured, 2.014, draws=4_000)
    low, high = student_interval(values, 2.014)
    assert found.method == "studentized"
    sample = resample(measured, ["mismatch"], seed=1, draws=4_000, studentized=True)
    tail = float(norm.sf(2.014))
    error = observed_errors(measured, ["mismatch"])["mismatch"][0, 0, 0]
    below, above = np.quantile(sample["mismatch"].distances[:, 0, 0, 0], [1 - tail, tail]) * error
    ends = found.estimate - below, found.estimate - above
    assert (found.low, found.high) == pytest.approx((min(low, ends[0]), max(high, ends[1])), rel=1e-9)
    if skewed:  # each has one of the ends
        assert low < ends[0]
        assert high < ends[1]


def test_intervals_stay_in_the_range() -> None:
    found = at_look(moments([0.0, 0.0, 0.0, 0.2]), 4.333)
    assert (found.method, found.low, found.high) == ("student", 0, 1)


def test_documents_that_are_all_alike_leave_open_what_they_do_not_show_at_every_look() -> None:
    alike = moments([0.25] * 8)
    for constant, last in ((4.333, False), (2.359, False), (2.014, True)):
        found = at_look(alike, constant, last=last)
        share = 1 - float(norm.sf(constant)) ** (1 / 8)
        assert found.method == "alike"
        assert (found.low, found.high) == pytest.approx((0.25 - share * 0.25, 0.25 + share * 0.75))


def test_one_cluster_a_stratum_has_no_interval() -> None:
    assert at_look(moments([0.2], [0.4]), 2.014, last=True).method is None


@pytest.mark.parametrize(
    ("rule", "interval", "resolved"),
    [
        (HALF_WIDTH, (0.1, 0.3), True),
        (HALF_WIDTH, (0.1, 0.31), False),
        (SIGN, (0.01, 0.9), True),
        (SIGN, (-0.9, -0.01), True),
        (SIGN, (0.0, 0.1), False),
        (EQUIVALENCE, (-0.09, 0.09), True),
        (EQUIVALENCE, (0.11, 0.4), True),
        (EQUIVALENCE, (-0.4, -0.11), True),
        (EQUIVALENCE, (0.05, 0.15), False),
        (HALF_WIDTH, (math.nan, math.nan), False),
        (SIGN, (math.nan, math.nan), False),
        (EQUIVALENCE, (math.nan, math.nan), False),
    ],
)
def test_what_resolves_an_endpoint(rule: str, interval: tuple[float, float], *, resolved: bool) -> None:
    assert Resolution(rule, 0.0 if rule == SIGN else 0.1).holds(*interval) is resolved
