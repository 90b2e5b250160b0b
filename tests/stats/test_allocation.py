"""Allocation: derivatives, variance components, brute force over all (K, N), simulated variance, messages."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from typing import Any

import numpy as np
import pytest
import scipy.stats

from kvdrift.schema.errors import InputError
from kvdrift.schema.moments import ANSWER_MOMENTS, SCALAR_MOMENTS
from kvdrift.schema.windows import Windows
from kvdrift.stats.allocation import Allocation, allocate, influences, linearize
from kvdrift.stats.bootstrap import observed, resample
from kvdrift.stats.endpoints import Endpoint
from kvdrift.stats.moments import ReplicateMoments
from kvdrift.stats.quantities import QUANTITIES

W = Windows.of(16)
STRATA = ("s", "t")
# Standard deviations between documents and between replicates of the branch moments, per stratum.
BETWEEN, WITHIN = {"s": 0.05, "t": 0.12}, {"s": 0.2, "t": 0.1}


def simulate(
    random: np.random.Generator, documents: int, replicates: int, *, actions: int = 2, studies: int = 1
) -> list[ReplicateMoments]:
    """Studies of ``documents`` per stratum: cohort membership and a late TV that depend on the document."""
    strata = np.repeat(STRATA, documents)
    between = np.array([BETWEEN[s] for s in strata])[:, None, None]
    within = np.array([WITHIN[s] for s in strata])[:, None, None]
    shape = (len(strata), actions, replicates)
    result = []
    for _ in range(studies):
        effect = between * random.normal(size=(len(strata), 1, 1))  # shared by actions: contrasts are paired
        cohort = (random.random(shape) < 0.5 + effect).astype(float)
        late = 0.6 + effect + within * random.normal(size=shape)
        early = 0.5 + 0.5 * within * random.normal(size=shape)
        values = {name: random.random(shape) for name in SCALAR_MOMENTS} | {
            "cohort": cohort,
            "late_delta": late * cohort,
            "early_delta": early * cohort,
            "saturation": 0.4 + effect + within * random.normal(size=shape),
        }
        values["mismatch"] = values["saturation"] + 0.1 * np.arange(actions)[:, None]
        names = [f"d{i}" for i in range(len(strata))]
        result.append(ReplicateMoments(names, strata, names, tuple("abcd"[:actions]), W, values))
    return result


@pytest.fixture(scope="module")
def development() -> ReplicateMoments:
    return simulate(np.random.default_rng(3), 8, 5)[0]


SCALAR_QUANTITIES = [name for name, quantity in QUANTITIES.items() if not quantity.profile]


@pytest.mark.parametrize("name", SCALAR_QUANTITIES)
def test_influence_is_the_derivative_in_document_weights(name: str, development: ReplicateMoments) -> None:
    """Pushing one document's moments by h moves the estimate by h w_d times its influence: central differences."""
    quantity = QUANTITIES[name]
    x = quantity.x(W)[-1]
    endpoint = Endpoint(name, "b", "a" if quantity.kind == "contrast" else None, "pooled", x)
    subject = 0 if quantity.kind == "contrast" else 1
    influence, value = influences(development, endpoint)

    def at(push: float, document: int) -> float:
        # Moments of a document moved away from the pooled ones by a factor: a linear path through the estimate.
        means = development.document_means()
        weight = np.ones(len(means.documents))
        weight[document] += push
        pooled = {}
        for moment, v in means.scalars.items():
            parts = [np.average(v[means.strata == s], axis=0, weights=weight[means.strata == s]) for s in STRATA]
            pooled[moment] = np.broadcast_to(np.mean(parts, axis=0), v.shape)
        moved = dataclasses.replace(means, scalars=pooled)
        return float(observed(moved, [name], [("a", "b")])[name][0, subject, -1])

    assert value == pytest.approx(at(0.0, 0))
    stratum_mean = {s: np.mean(influence[development.strata == s]) for s in STRATA}
    for document in (0, 11):
        step = 1e-5
        slope = (at(step, document) - at(-step, document)) / (2 * step)
        stratum = str(development.strata[document])
        # d/dv of a weighted stratum mean at equal weights is (u_d - mean u) / n, times w_s = 1/2.
        expected = (influence[document].mean() - stratum_mean[stratum]) / 8 / 2
        assert slope == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_components_of_a_balanced_design_are_anovas(development: ReplicateMoments) -> None:
    got = linearize(development, Endpoint("saturation", "a"))
    values = development.scalars["saturation"][:, 0]
    assert got.value == pytest.approx(values.mean())
    for variance in got.variances:
        rows = values[development.strata == variance.stratum]
        f = scipy.stats.f_oneway(*rows).statistic
        within = rows.var(axis=1, ddof=1).mean()
        assert variance.between_replicates == pytest.approx(within)
        # F = MSB / MSW, and MSB = K sigma_b^2 + MSW.
        assert variance.between_documents == pytest.approx(max((f - 1) * within / 5, 0))
        assert variance.weight == 0.5


def components_of(values: np.ndarray) -> tuple[float, float]:
    """The variances of a moment with values [documents, replicates], NaN without a replicate, in one stratum."""
    names = np.arange(len(values)).astype(str)
    scalars = {name: np.where(np.isnan(values), np.nan, 0.0)[:, None] for name in SCALAR_MOMENTS}
    scalars["saturation"] = values[:, None]
    development = ReplicateMoments(names, ["s"] * len(values), names, ("a",), W, scalars)
    (variance,) = linearize(development, Endpoint("saturation", "a")).variances
    return variance.between_documents, variance.between_replicates


def test_components_are_unbiased_with_unequal_replicates() -> None:
    """Means over 100 studies of 60 documents, half with 2 replicates and half with 12; 5 standard errors of the mean.

    Dividing by the mean count instead of averaging 1/K_d would be off by (0.29 - 0.14) sigma_w^2 = 0.024, which is 14
    standard errors.
    """
    random = np.random.default_rng(4)
    sigma_b, sigma_w = 0.2, 0.4
    lost = np.arange(12) >= np.repeat([2, 12], 30)[:, None]
    parts = []
    for _ in range(100):
        values = sigma_b * random.normal(size=(60, 1)) + sigma_w * random.normal(size=(60, 12))
        parts.append(components_of(np.where(lost, np.nan, values)))
    error = 5 * np.std(parts, axis=0) / math.sqrt(100)
    assert error[0] < 0.01
    between, within = np.mean(parts, axis=0)
    assert between == pytest.approx(sigma_b**2, abs=error[0])
    assert within == pytest.approx(sigma_w**2, abs=error[1])


def test_the_between_component_is_floored_at_zero() -> None:
    alternating = np.tile([[0.0, 1.0]], (6, 1))  # document means all equal: less variance than replicates alone explain
    assert components_of(alternating) == (0.0, 0.5)


def test_clusters_carry_their_design_effect(development: ReplicateMoments) -> None:
    # Every document twice, as one cluster: the estimate is no better than that of single documents, so a document
    # counts half. Replicates of the copies are equal too, which all lands in the between component.
    doubled = ReplicateMoments(
        np.concatenate([development.documents, [f"{d} again" for d in development.documents]]),
        np.tile(development.strata, 2),
        np.tile(development.clusters, 2),
        development.actions,
        W,
        {n: np.concatenate([v, v]) for n, v in development.scalars.items()},
    )
    endpoint = Endpoint("saturation", "a")
    single, double = linearize(development, endpoint), linearize(doubled, endpoint)
    for one, two in zip(single.variances, double.variances, strict=True):
        mean_variance = two.between_documents / 16 + two.between_replicates / (16 * 5)
        means = development.scalars["saturation"][development.strata == one.stratum, 0].mean(axis=1)
        assert mean_variance == pytest.approx(means.var(ddof=1) / 8)


ENDPOINTS = (
    Endpoint("late_minus_early", "a"),
    Endpoint("late_minus_early", "b"),
    Endpoint("saturation", "b"),
    Endpoint("gap", "b", "a"),
)


def plan(development: ReplicateMoments, **changes: Any) -> Allocation:
    given: dict[str, Any] = {
        "target": 0.05, "document_seconds": 7.0, "replicate_seconds": 1.5, "replicates": (1, 24), "documents": (2, 400),
    }  # fmt: skip
    return allocate(development, changes.pop("endpoints", ENDPOINTS), **given | changes)


@pytest.mark.parametrize("target", [0.035, 0.05, 0.2])
@pytest.mark.parametrize("seconds", [(7.0, 1.5), (0.0, 1.0), (40.0, 0.01)])
def test_least_cost_by_brute_force(development: ReplicateMoments, target: float, seconds: tuple[float, float]) -> None:
    got = plan(development, target=target, document_seconds=seconds[0], replicate_seconds=seconds[1])
    z = scipy.stats.norm.isf(0.05 / 4 / 2)
    best = (math.inf, 0, 0)
    for k in range(1, 25):
        for n in range(2, 401):
            widths = [
                z
                * math.sqrt(sum(0.25 * (v.between_documents / n + v.between_replicates / (n * k)) for v in e.variances))
                for e in got.endpoints
            ]
            if all(w <= target for w in widths):
                best = min(best, (n * 2 * (seconds[0] + k * seconds[1]), k, n))
                break
    assert (got.seconds, got.replicates, got.documents_per_stratum) == pytest.approx(best)
    assert got.reachable
    assert all(w <= target for w in got.half_widths)
    assert [choice.replicates for choice in got.curve] == list(range(1, 25))
    assert "all targets are met" in got.reason


@pytest.mark.parametrize("noise", [0.0, 0.002])
def test_a_margin_of_two_points_asks_for_its_documents_in_advance(noise: float) -> None:
    """No failure among 24 development documents; a share of failures below 2% takes log .025 / log .98 documents."""
    values = np.random.default_rng(2).uniform(0, noise or 1e-300, (24, 2, 4)) * (noise > 0)
    names = np.array([f"d{number:02}" for number in range(24)])
    scalars = {name: values if name == "mismatch" else np.zeros(values.shape) for name in SCALAR_MOMENTS}
    strata = np.repeat(["a", "b"], 12)
    development = ReplicateMoments(names, strata, names, ("mine", "base"), Windows.of(16), scalars)

    def size(within: float) -> int:
        return allocate(
            development, [Endpoint("gap", "mine", "base")], target=0.02, document_seconds=1.0, replicate_seconds=1.0,
            replicates=(4, 4), documents=(2, 400), alike_within=within,
        ).documents_per_stratum  # fmt: skip

    assert size(0.02) == pytest.approx(math.log(0.025) / math.log(0.98) / 2, abs=2 if not noise else 12)
    assert size(0.0) == (2 if noise else size(0.02))


@pytest.mark.slow
def test_simulated_half_width_is_the_promised_one() -> None:
    """Plan from a large development set, simulate evaluations of the planned size: z times their sd.

    The sd of 1,500 studies has a standard error of 1.8%; components from 2,400 documents and the linearization of the
    ratio add about 2%. Tolerance 12%: more than four of both together, for 3 endpoints a false failure below 1e-3.
    """
    random = np.random.default_rng(6)
    endpoints = (Endpoint("late_minus_early", "a"), Endpoint("saturation", "b"), Endpoint("gap", "b", "a"))
    got = plan(simulate(random, 1200, 4)[0], endpoints=endpoints, target=0.04, replicates=(1, 8))
    assert got.reachable
    values: dict[str, list[float]] = {}
    for study in simulate(random, got.documents_per_stratum, got.replicates, studies=1500):
        means = study.document_means()
        result = observed(means, [e.quantity for e in endpoints], [("a", "b")])
        for e in endpoints:
            subject = 0 if e.baseline else "ab".index(e.action)
            values.setdefault(e.quantity, []).append(float(result[e.quantity][0, subject, 0]))
    z = scipy.stats.norm.isf((1 - got.level) / 2)
    for e, width in zip(endpoints, got.half_widths, strict=True):
        assert z * np.std(values[e.quantity]) == pytest.approx(width, rel=0.12), e


def test_promise_agrees_with_the_bootstrap_of_the_same_data() -> None:
    """At the development set's own K and N the half-width is z times the bootstrap's sd (up to (n - 1)/n)."""
    study = simulate(np.random.default_rng(7), 150, 4)[0]
    draws = resample(study.document_means(), ["late_minus_early"], seed=1, draws=6000, pairs=[])
    expected = draws["late_minus_early"].draws[:, 0, 0, 0].std()
    got = linearize(study, Endpoint("late_minus_early", "a")).half_width(4, 150, 1.0)
    assert got == pytest.approx(expected, rel=0.05)  # sd of 6,000 draws: 0.9%


def test_a_stratums_endpoint_has_its_own_variance_alone(development: ReplicateMoments) -> None:
    got = linearize(development, Endpoint("saturation", "a", stratum="t"))
    assert [(v.stratum, v.weight) for v in got.variances] == [("t", 1.0)]
    pooled = linearize(development, Endpoint("saturation", "a"))
    assert got.variances[0].between_documents == pytest.approx(pooled.variances[1].between_documents)


def test_out_of_reach_takes_the_upper_bounds_and_says_so(development: ReplicateMoments) -> None:
    got = plan(development, target=0.001)
    assert (got.replicates, got.documents_per_stratum, got.reachable) == (24, 400, False)
    assert got.seconds == 400 * 2 * (7.0 + 24 * 1.5)
    assert "targets out of reach: at the upper bounds, K = 24, N = 400 per stratum, the half-width of " in got.reason
    assert f"is expected to be {max(got.half_widths):.3g} instead of 0.001; intervals hold" in got.reason
    assert "more evaluation documents would make them narrower" in got.reason
    assert all(width > 0.001 for width in got.half_widths)
    empty = dataclasses.replace(
        development, scalars={**development.scalars, "cohort": np.zeros_like(development.scalars["cohort"])}
    )
    undefined = plan(empty)
    assert (undefined.replicates, undefined.documents_per_stratum, undefined.reachable) == (24, 400, False)
    assert undefined.reason.startswith("late_minus_early of a (pooled) is undefined on the development documents")
    assert math.isnan(undefined.half_widths[0])


def test_endpoints_of_answers_are_planned_from_documents_with_answers(development: ReplicateMoments) -> None:
    random = np.random.default_rng(8)
    right = (random.random(development.present.shape) < 0.7).astype(float)
    lost = right * (random.random(right.shape) < 0.4)
    scalars = {**development.scalars, **dict.fromkeys(ANSWER_MOMENTS, lost), "reference_right": right}
    answers = dataclasses.replace(development, scalars=scalars)
    endpoints = [Endpoint("lost_share", "a"), Endpoint("saturation", "a")]
    asked = {
        "target": 0.1,
        "document_seconds": 1.0,
        "replicate_seconds": 0.1,
        "replicates": (2, 9),
        "documents": (2, 99),
    }
    got = allocate(development, endpoints, **asked, answers=answers)
    assert got.endpoints == (linearize(answers, endpoints[0]), linearize(development, endpoints[1]))
    strata = [development.strata == name for name in STRATA]
    pooled = [statistics.fmean(float(value[own, 0].mean()) for own in strata) for value in (lost, right)]
    assert got.endpoints[0].value == pytest.approx(pooled[0] / pooled[1])
    with pytest.raises(InputError, match="no development document has answers that are scored"):
        allocate(development, endpoints, **asked)


def test_family_and_serialization(development: ReplicateMoments) -> None:
    alone, family = plan(development), plan(development, family_size=8)
    assert (alone.level, family.level) == (1 - 0.05 / 4, 1 - 0.05 / 8)
    assert family.seconds > alone.seconds
    assert json.loads(json.dumps(dataclasses.asdict(alone)))["replicates"] == alone.replicates


def test_messages(development: ReplicateMoments) -> None:
    one = dataclasses.replace(development, scalars={n: v[:, :, :1] for n, v in development.scalars.items()})
    for given, message in (
        ({"alpha": 1.0}, "alpha 1.0"),
        ({"family_size": 2}, "4 endpoints but a size of 2"),
        ({"endpoints": (Endpoint("hazard", "a", x=3),)}, "it needs moments at every position or lag"),
        ({"endpoints": (Endpoint("saturation", "c"),)}, "no action 'c'"),
    ):
        with pytest.raises(InputError, match=message) as error:
            plan(development, **given)
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="too few development documents or replicates"):
        plan(one)
