"""Control variates: mean 0 by enumeration, exact expectations, and coefficients compared with a plain fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from fixtures.random_systems import ACTION, random_system
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracles.exact_moments import functionals
from oracles.plain_reduction import coefficients, control_variate, weights

from kvdrift.generator.finite.enumeration import PairPaths, pair_paths
from kvdrift.schema.moments import SCALAR_MOMENTS
from kvdrift.schema.windows import Windows
from kvdrift.stats.allocation import Allocation, allocate
from kvdrift.stats.endpoints import Endpoint
from kvdrift.stats.moments import DocumentMoments, ReplicateMoments
from kvdrift.stats.quantities import QUANTITIES
from kvdrift.stats.reduction import (
    CONTROLS,
    FEWEST_CLUSTERS,
    PENALTIES,
    REDUCED,
    control_variates,
    fit_coefficients,
    is_reduced,
    reduced_documents,
    reduced_replicates,
    reduced_scalars,
    saving,
)

Array = NDArray[np.float64]
SYSTEMS = [(2, 6, (), "near"), (2, 6, (0,), "far"), (3, 4, (2,), "sparse"), (2, 1, (), "far")]
TOKENS = {  # what only tokens decide, written out
    "mismatch", "occurrence", "exposure", "occupation", "mismatch_rate", "divergence_probability", "mean_entry",
    "cohort_fraction", "long_agreement", "mismatch_after_agreement", "generation_block_mismatch", "gap",
    "occurrence_term", "exposure_term", "rate_term", "occurrence_share", "exposure_share", "rate_share",
    "flat_extrapolation_gap", "divergence_probability_difference", "mean_entry_difference", "mismatch_rate_difference",
    "cohort_fraction_difference", "long_agreement_difference", "mismatch_after_agreement_difference",
}  # fmt: skip


def moments_of(paths: PairPaths, windows: Windows) -> dict[str, Array]:
    """Every scalar moment of every path; NaN of one over an empty window."""
    found = functionals(paths, windows)
    return {name: found.get(name, np.full(len(paths.probability), np.nan)) for name in SCALAR_MOMENTS}


@pytest.mark.parametrize("made", SYSTEMS, ids=str)
def test_control_variates_have_mean_0_and_are_those_of_the_definitions(
    made: tuple[int, int, tuple[int, ...], str],
) -> None:
    alphabet, horizon, eos, kind = made
    paths = pair_paths(random_system(alphabet, horizon, eos, kind), ACTION)
    windows = Windows.of(horizon)
    got = control_variates(moments_of(paths, windows), windows)
    plain = {
        name: np.array([
            control_variate(weight, apart, delta) for apart, delta in zip(paths.mismatch, paths.delta, strict=True)
        ])
        for name, weight in weights(horizon, windows.blocks).items()
    }  # fmt: skip
    for name, values in plain.items():
        assert abs(paths.mean(values)) < 1e-15 * len(values), name
    for place, name in enumerate(CONTROLS):
        assert got[:, place] == pytest.approx(plain[name], abs=1e-6), "delta is stored in 32 bits"
    assert got[:, :3].sum(axis=1) == pytest.approx(plain["all"], abs=1e-6)
    assert horizon * (got[:, :3].sum(axis=1) - got[:, 3]) == pytest.approx(plain["divergence"], abs=1e-5)


def replicates_of(
    paths: Sequence[PairPaths], windows: Windows, replicates: int, seed: int, *, clusters: Sequence[str] | None = None
) -> ReplicateMoments:
    """Replicates of documents that are drawn from enumerated pairs, two documents a stratum."""
    random = np.random.default_rng(seed)
    found = []
    for own in paths:
        moments = moments_of(own, windows)
        chosen = random.choice(len(own.probability), size=replicates, p=own.probability / own.probability.sum())
        found.append({name: values[chosen] for name, values in moments.items()})
    names = [f"d{number}" for number in range(len(paths))]
    scalars = {name: np.stack([one[name] for one in found])[:, None] for name in SCALAR_MOMENTS}
    strata = [f"s{number // 2}" for number in range(len(paths))]
    return ReplicateMoments(names, strata, clusters or names, (ACTION,), windows, scalars)


@pytest.fixture(scope="module")
def paths() -> list[PairPaths]:
    return [pair_paths(random_system(2, 8, (), "near", seed), ACTION) for seed in range(6)]


def test_reduced_estimates_have_the_exact_expectation_and_less_variance(paths: list[PairPaths]) -> None:
    """Coefficients of some documents, expectation and variance on others by enumeration."""
    windows = Windows.of(8)
    beta = fit_coefficients(replicates_of(paths[:4], windows, 200, seed=1))[ACTION]
    assert np.abs(beta).max() > 0.1
    for other in paths[4:]:
        moments = moments_of(other, windows)
        reduced = reduced_scalars(moments, control_variates(moments, windows), beta)
        for name in REDUCED:
            assert other.mean(reduced[name]) == pytest.approx(float(other.mean(moments[name])), abs=1e-6), name
        for name in ("mismatch", "exposure", "occupation", "diverged", "entry"):
            assert other.variance(reduced[name]) < 0.8 * other.variance(moments[name]), name
        for name in set(SCALAR_MOMENTS) - set(REDUCED):
            assert reduced[name] is moments[name], name
        assert reduced["diverged"] / 8 + reduced["occupation"] == pytest.approx(reduced["mismatch"]), "R = O + E C"
        assert reduced["diverged"] - reduced["entry"] / 8 == pytest.approx(reduced["exposure"])


@pytest.mark.parametrize("clusters", [None, ["a", "a", "b", "c", "d", "d"]], ids=["documents", "clusters"])
def test_coefficients_are_those_of_a_plain_fit(paths: list[PairPaths], clusters: list[str] | None) -> None:
    windows = Windows.of(8)
    development = replicates_of(paths, windows, 7, seed=3, clusters=clusters)
    names = [str(name) for name in development.clusters]
    controls = control_variates(development.scalars, windows)[:, 0]
    moments = np.nan_to_num(np.stack([development.scalars[name][:, 0] for name in REDUCED], axis=-1))
    whole, left_out = coefficients(list(controls), list(moments), names, PENALTIES)
    assert fit_coefficients(development)[ACTION] == pytest.approx(whole, rel=1e-8, abs=1e-10)
    reduced = reduced_replicates(development)
    for document, name in enumerate(names):
        expected = moments[document] - controls[document] @ left_out[name]
        got = np.nan_to_num(np.stack([reduced.scalars[one][document, 0] for one in REDUCED], axis=-1))
        assert got == pytest.approx(expected, rel=1e-8, abs=1e-10), name


def test_too_few_documents_have_no_coefficients(paths: list[PairPaths]) -> None:
    windows = Windows.of(8)
    for count, replicates in ((FEWEST_CLUSTERS - 1, 100), (6, 4), (6, 1)):
        development = replicates_of(paths[:count], windows, replicates, seed=5)
        assert fit_coefficients(development) == {}
        assert reduced_documents(development.document_means(), {}) is None
        kept = reduced_replicates(development)
        assert all(np.array_equal(kept.scalars[name], development.scalars[name], equal_nan=True) for name in REDUCED)


def test_a_log_that_is_not_of_the_coupling_has_no_coefficients(paths: list[PairPaths]) -> None:
    """Tokens of one path with the distances of another: delta is not the chance of a mismatch."""
    windows = Windows.of(8)
    development = replicates_of(paths, windows, 200, seed=1)
    assert fit_coefficients(development)
    wrong = {name: values * (0.2 if "delta" in name or "compensator" in name else 1) for name, values in
             development.scalars.items()}  # fmt: skip
    assert fit_coefficients(ReplicateMoments(**{**vars_of(development), "scalars": wrong})) == {}


def vars_of(moments: ReplicateMoments) -> dict[str, object]:
    return {name: getattr(moments, name) for name in ReplicateMoments.__dataclass_fields__}


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.sampled_from(["random", "greedy", "control", "apart"]))
def test_any_pairs_of_tokens(seed: int, horizon: int, kind: str) -> None:
    """For any tokens the identities hold, and values without chance are not changed."""
    random = np.random.default_rng(seed)
    delta = random.random((4, 6, horizon))
    if kind in {"greedy", "control", "apart"}:
        delta = {"greedy": delta.round(), "control": delta * 0, "apart": delta * 0 + 1}[kind]
    apart = random.random(delta.shape) < delta
    windows = Windows.of(horizon)
    scalars = {name: value[:, None] for name, value in token_moments(apart, delta, windows).items()}
    names = list("abcd")
    development = ReplicateMoments(names, ["s"] * 4, names, (ACTION,), windows, scalars)
    beta = fit_coefficients(development)
    assert set(beta) <= {ACTION}
    documents = development.document_means()
    reduced = reduced_documents(documents, beta)
    if reduced is None:
        return
    if kind != "random":
        assert all(np.array_equal(reduced.scalars[name], documents.scalars[name], equal_nan=True) for name in REDUCED)
    m = reduced.scalars
    assert m["diverged"] / horizon + m["occupation"] == pytest.approx(m["mismatch"], abs=1e-9)
    assert m["diverged"] - m["entry"] / horizon == pytest.approx(m["exposure"], abs=1e-9)
    assert all(np.isfinite(m[name]).all() or np.isnan(documents.scalars[name]).all() for name in REDUCED)


def token_moments(apart: NDArray[np.bool_], delta: Array, windows: Windows) -> dict[str, Array]:
    """The moments of arrays [D, K, H] that this page is about, the others 0."""
    horizon, t = windows.horizon, np.arange(1, windows.horizon + 1)
    tau = np.where(apart.any(axis=-1), apart.argmax(axis=-1) + 1, horizon + 1)
    diverged, after = tau <= horizon, t > tau[..., None]
    found = {name: np.zeros(tau.shape) for name in SCALAR_MOMENTS} | {
        "mismatch": apart.sum(axis=-1) / horizon,
        "diverged": diverged.astype(float),
        "entry": np.where(diverged, tau, 0.0),
        "exposure": np.where(diverged, horizon - tau, 0) / horizon,
        "occupation": (apart & after).sum(axis=-1) / horizon,
        "occupation_compensator": (delta * after).sum(axis=-1) / horizon,
        "exposure_compensator": (delta * ~after * (horizon - t)).sum(axis=-1) / horizon,
    }
    for block, (first, last) in enumerate(windows.blocks, start=1):
        for name, values in (("mismatch", apart), ("delta", delta)):
            own = values[..., first - 1 : last]
            found[f"block_{block}_{name}"] = own.mean(axis=-1) if last >= first else np.full(tau.shape, np.nan)
    return found


def test_a_plan_is_made_from_the_variance_of_what_it_plans_for(paths: list[PairPaths]) -> None:
    """An endpoint of tokens is planned by its reduced moments if given, an endpoint of total variation by its own."""
    development = replicates_of(paths, Windows.of(8), 40, seed=4)
    reduced = reduced_replicates(development)
    endpoints = [Endpoint("mismatch", ACTION), Endpoint("saturation", ACTION)]

    def planned(moments: ReplicateMoments, less: ReplicateMoments | None = None) -> Allocation:
        costs = {"document_seconds": 1.0, "replicate_seconds": 0.01}
        return allocate(
            moments, endpoints, target=0.02, replicates=(2, 64), documents=(2, 10_000), reduced=less, **costs
        )

    plain, less = planned(development), planned(development, reduced)
    assert less.endpoints == (planned(reduced).endpoints[0], plain.endpoints[1])
    assert less.endpoints[0].components[1] < 0.8 * plain.endpoints[0].components[1]
    assert planned(development, None) == plain


@pytest.mark.parametrize(
    ("reduced", "variance", "line"),
    [
        ((9, 12), "reduced", "9 replicates instead of 14, 64% of the time"),
        ((14, 12), "reduced", ""),
        ((9, 10), "plain", "9 replicates instead of 14, 10 documents per stratum instead of 12, 54% of the time"),
    ],
)  # fmt: skip
def test_what_is_saved_is_said(reduced: tuple[int, int], variance: str, line: str) -> None:
    sizes = {
        name: {"replicates": k, "documents_per_stratum": n, "reachable": True, "seconds": float(k * n)}
        for name, (k, n) in (("plain", (14, 12)), ("reduced", reduced))
    }
    would = 'with variance = "reduced" ' if variance == "plain" else ""
    assert saving({"variance": variance, "sizes": sizes}) == would + line
    assert saving({}) == "", "no plan"


def test_quantities_of_tokens_alone_are_reduced(paths: list[PairPaths]) -> None:
    windows = Windows.of(8)
    moments = replicates_of(paths, windows, 4, seed=2).document_means()
    reduced = {name for name, quantity in QUANTITIES.items() if is_reduced(quantity, moments)}
    assert reduced >= TOKENS
    assert not reduced & {
        "rollout_tv",
        "fixed_history_tv",
        "saturation",
        "early",
        "late",
        "eos_gap",
        "entry_cdf",
        "eos_share",
    }


def test_documents_keep_their_places(paths: list[PairPaths]) -> None:
    """An action without coefficients is left out; a document that the action lacks stays missing."""
    windows = Windows.of(8)
    one = replicates_of(paths, windows, 40, seed=2)
    means = one.document_means()
    both = {name: np.concatenate([value, value], axis=1) for name, value in means.scalars.items()}
    for value in both.values():
        value[2, 0] = np.nan
    moments = DocumentMoments(means.documents, means.strata, means.clusters, (ACTION, "b"), windows, both, {}, {})
    reduced = reduced_documents(moments, fit_coefficients(one))
    assert reduced is not None
    assert reduced.actions == (ACTION,)
    assert reduced.documents.tolist() == moments.documents.tolist()
    assert reduced.present[:, 0].tolist() == moments.present[:, 0].tolist()
