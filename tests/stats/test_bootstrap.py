"""The document bootstrap: messages, invariance, theory, scipy as outside reference, coverage.

Data are history-independent mismatches: I_t ~ Bernoulli(e_d) at every position, for which R, O, E, Pi and C are known
in closed form.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import scipy.special
import scipy.stats

from kvdrift.schema.errors import InputError
from kvdrift.schema.estimate_tables import RESULTS
from kvdrift.schema.moments import BIN_MOMENTS, KL_BINS, LAG_MOMENTS, POSITION_MOMENTS, SCALAR_MOMENTS
from kvdrift.schema.windows import Windows
from kvdrift.stats.bootstrap import BLOCK, COLUMNS, Request, estimate, groups, observed, planned_status, resample
from kvdrift.stats.clusters import ClusterDraws
from kvdrift.stats.endpoints import Endpoint, Family
from kvdrift.stats.ends import percentile_intervals
from kvdrift.stats.moments import DocumentMoments
from kvdrift.stats.pooling import pooled_means
from kvdrift.stats.quantities import QUANTITIES

if TYPE_CHECKING:
    from collections.abc import Sequence

H = 16


def bernoulli_scalars(random: np.random.Generator, rate: np.ndarray, replicates: int) -> dict[str, np.ndarray]:
    """Token moments [D, A] of history-independent mismatches with the given rate [D, A]; other moments are 0."""
    hit = random.random((*rate.shape, replicates, H), dtype=np.float32) < rate[..., None, None]
    diverged = hit.any(axis=-1)
    tau = np.where(diverged, hit.argmax(axis=-1) + 1, 0)
    total = hit.sum(axis=-1)
    values = {
        "mismatch": total / H,
        "diverged": diverged.astype(float),
        "entry": tau.astype(float),
        "exposure": np.where(diverged, H - tau, 0) / H,
        "occupation": np.maximum(total - 1, 0) / H,
    }
    zeros = np.zeros(rate.shape)
    return {name: values[name].mean(axis=-1) if name in values else zeros for name in SCALAR_MOMENTS}


def make(
    scalars: dict[str, np.ndarray],
    strata: Sequence[str],
    clusters: Sequence[str] | None = None,
    *,
    profiles: bool = False,
    windows: Windows | None = None,
) -> DocumentMoments:
    count, actions = scalars["diverged"].shape
    windows = windows or Windows.of(H)
    random = np.random.default_rng(count)

    def profile(names: Any, length: int) -> dict[str, np.ndarray]:
        missing = np.where(np.isnan(scalars["diverged"]), np.nan, 1.0)[:, :, None]
        return {n: random.random((count, actions, length)) / length * missing for n in names} if profiles else {}

    return DocumentMoments(
        np.array([f"doc {i:03}" for i in range(count)]),
        np.array(strata),
        np.array([f"cluster {i:03}" for i in range(count)] if clusters is None else clusters),
        tuple(f"action {i}" for i in range(actions)),
        windows,
        scalars,
        profile(POSITION_MOMENTS, windows.horizon),
        profile(LAG_MOMENTS, windows.cohort_bound),
        profile(BIN_MOMENTS, KL_BINS),
    )


@pytest.fixture(scope="module")
def study() -> DocumentMoments:
    """36 documents in 3 strata of unequal size, 3 actions, profiles, every scalar moment filled."""
    random = np.random.default_rng(5)
    rate = random.uniform(0.05, 0.4, size=(36, 1)) + np.array([0.0, 0.1, 0.3])
    scalars = bernoulli_scalars(random, rate, 4)
    filled = {n: v if v.any() else random.random(v.shape) for n, v in scalars.items()}
    return make(filled, ["a"] * 18 + ["b"] * 12 + ["c"] * 6, profiles=True)


PAIR = [("action 0", "action 1")]
PERCENTILES = Request(interval="percentile")


def test_more_draws_leave_the_bits_of_the_first_ones(study: DocumentMoments) -> None:
    whole = resample(study, list(QUANTITIES), seed=3, draws=700)
    for draws in (1, 100, BLOCK, 600):
        fewer = resample(study, list(QUANTITIES), seed=3, draws=draws)
        for name, value in whole.items():
            np.testing.assert_array_equal(fewer[name].draws, value.draws[:draws], err_msg=name)
    other = resample(study, ["mismatch"], seed=4, draws=700)["mismatch"].draws
    assert (other != whole["mismatch"].draws).mean() > 0.9


@pytest.mark.parametrize(
    "shape", [(256, 1, 1), (256, 48, 384), (256, 300, 65), (256, 900, 70), (1, 9, 200), (100, 48, 3)]
)
def test_means_of_many_weightings_are_products(shape: tuple[int, int, int]) -> None:
    """Whatever the tiles that the products are cut into."""
    random = np.random.default_rng(0)
    weights = random.integers(0, 5, size=shape[:2]).astype(float)
    weights[:, 0] += 1  # no weighting is empty
    values = random.random(shape[1:])
    means = pooled_means(values[:, None], np.ones((shape[1], 1), dtype=bool), [np.arange(shape[1])], weights)
    np.testing.assert_allclose(means[:, 0, 0], weights @ values / weights.sum(axis=1, keepdims=True), rtol=1e-13)


def test_document_order_does_not_matter(study: DocumentMoments) -> None:
    order = np.random.default_rng(0).permutation(36)
    shuffled = DocumentMoments(
        study.documents[order],
        study.strata[order],
        study.clusters[order],
        study.actions,
        study.windows,
        {n: v[order] for n, v in study.scalars.items()},
        {n: v[order] for n, v in study.positions.items()},
        {n: v[order] for n, v in study.lags.items()},
        {n: v[order] for n, v in study.bins.items()},
    )
    names = ["mismatch", "late_minus_early", "hazard", "gap", "eos_gap", "kl_fixed_history_p99"]
    found, expected = (estimate(one, draws=100, seed=1, quantities=names) for one in (shuffled, study))
    assert found.columns == expected.columns


def test_identities_hold_on_every_draw(study: DocumentMoments) -> None:
    v = {name: one.draws for name, one in resample(study, list(QUANTITIES), seed=2, draws=400).items()}
    np.testing.assert_allclose(v["mismatch"], v["occurrence"] + v["exposure"] * v["mismatch_rate"], atol=1e-14)
    np.testing.assert_allclose(v["gap"], v["occurrence_term"] + v["exposure_term"] + v["rate_term"], atol=1e-14)
    # A contrast's draws are the difference of its actions' draws: documents are paired across actions.
    a, b = zip(*[(a, b) for a in range(3) for b in range(3) if a != b], strict=True)
    np.testing.assert_allclose(v["gap"], v["mismatch"][:, :, b] - v["mismatch"][:, :, a], atol=1e-14)
    # Strata have equal weight in every draw.
    np.testing.assert_allclose(v["mismatch"][:, 0], v["mismatch"][:, 1:].mean(axis=1), atol=1e-14)


def test_clusters_move_together_and_sets_of_strata_keep_their_size() -> None:
    # a and b share q2, b and c share q4: five clusters of one set. d and e stand alone; e has a cluster of two.
    strata = ["a", "a", "a", "b", "b", "b", "c", "d", "d", "e", "e", "e"]
    clusters = ["q0", "q1", "q2", "q2", "q3", "q4", "q4", "r0", "r1", "s0", "s0", "s1"]
    moments = make(dict.fromkeys(SCALAR_MOMENTS, np.ones((12, 1))), strata, clusters).in_canonical_order()
    counts = ClusterDraws(moments.strata, moments.clusters).counts(7, 0, 500)
    np.testing.assert_array_equal(counts[:, [2, 5, 9]], counts[:, [3, 6, 10]])
    assert (counts[:, [0, 1, 2, 4, 5]].sum(axis=1) == 5).all()
    assert (counts[:, 7:9].sum(axis=1) == 2).all()
    assert (counts[:, [9, 11]].sum(axis=1) == 2).all()
    assert len(np.unique(counts[:, 0] + counts[:, 1])) > 3
    # Each cluster is drawn once on average; a mean of 500 has a standard error of at most 0.04.
    assert counts.mean(axis=0) == pytest.approx(np.ones(12), abs=0.2)


def test_a_document_in_two_strata_moves_in_both() -> None:
    # The same 8 questions at two lengths with equal moments: pooling the two must not narrow the interval.
    random = np.random.default_rng(8)
    one = bernoulli_scalars(random, np.full((8, 1), 0.3), 2)
    questions = [f"q{i}" for i in range(8)]
    two = {name: np.concatenate([value, value]) for name, value in one.items()}
    linked = make(two, ["a"] * 8 + ["b"] * 8, questions * 2)
    value = resample(linked, ["mismatch"], seed=1, draws=400, pairs=[])["mismatch"].draws
    np.testing.assert_array_equal(value[:, 1], value[:, 2])
    np.testing.assert_allclose(value[:, 0], value[:, 1], rtol=1e-15)
    apart = make(two, ["a"] * 8 + ["b"] * 8)
    value = resample(apart, ["mismatch"], seed=1, draws=2000, pairs=[])["mismatch"].draws
    assert value[:, 0].std() / value[:, 1].std() == pytest.approx(1 / np.sqrt(2), rel=0.1)


def test_contrasts_take_the_documents_that_both_actions_have(study: DocumentMoments) -> None:
    gone = {name: value.copy() for name, value in study.scalars.items()}
    for value in gone.values():
        value[:4, 0] = np.nan
        value[30:, 1] = np.nan  # action 1 has nothing in stratum c
    partial = make(gone, study.strata.tolist())
    result = estimate(partial, draws=200, seed=1, quantities=["mismatch", "gap"], pairs=PAIR)
    gap = result.row(Endpoint("gap", "action 1", "action 0"))
    assert gap["documents"] == 36 - 4 - 6
    both = {name: value[4:30, :2] for name, value in study.scalars.items()}
    expected = observed(make(both, study.strata[4:30].tolist()), ["gap"], PAIR)["gap"][0, 0, 0]
    assert gap["estimate"] == pytest.approx(expected, rel=1e-13)
    assert gap["low"] < gap["estimate"] < gap["high"]
    assert result.row(Endpoint("mismatch", "action 0"))["documents"] == 32
    assert result.row(Endpoint("mismatch", "action 1"))["documents"] == 30
    with pytest.raises(InputError, match="no estimate of mismatch of action 1"):
        result.row(Endpoint("mismatch", "action 1", stratum="c"))  # no row over no document


def test_rows_fit_the_results_table(study: DocumentMoments) -> None:
    result = estimate(study, draws=64, seed=1)
    assert [name for name in RESULTS.columns if name in COLUMNS] == list(COLUMNS)
    kept = [RESULTS.schema.field(name) for name in COLUMNS]
    table = pa.table(result.columns, schema=pa.schema(kept))
    assert table.num_rows == len(result)
    for column, spec in zip(table.columns, kept, strict=True):
        assert spec.nullable or column.null_count == 0, spec.name
    keys = list(zip(*(result.columns[n] for n in COLUMNS[:5]), strict=True))
    assert len(set(keys)) == len(keys)
    subjects = {"action": 3, "contrast": 6}
    expected = sum(4 * subjects[q.kind] * len(q.x(study.windows)) for q in QUANTITIES.values())
    assert len(result) == expected


def test_levels_families_and_status(study: DocumentMoments) -> None:
    members = (Endpoint("saturation", "action 0"), Endpoint("gap", "action 1", "action 0"))
    family = Family("primary", members, alpha=0.05, size=8)
    request = Request(0.9, (family,), ("action 0", "action 1"), seen=("action 1",))
    names = ["saturation", "gap", "mismatch"]
    result = estimate(study, draws=500, seed=1, request=request, quantities=names, pairs=None)
    for endpoint in members:
        row = result.row(endpoint)
        status = "seen" if endpoint.quantity == "gap" else "prespecified"
        assert (row["level"], row["family"], row["status"]) == (1 - 0.05 / 8, "primary", status)
        plain = estimate(study, draws=500, seed=1, quantities=names).row(endpoint)
        assert row["low"] < plain["low"] < plain["high"] < row["high"]
        assert plain["level"] == 0.95
    assert planned_status(("action 0",), "action 1", "action 0") == "seen"
    row = result.row(Endpoint("gap", "action 2", "action 0"))
    assert (row["level"], row["family"], row["status"], row["draws"]) == (0.9, None, "exploratory", 500)
    assert result.row(Endpoint("mismatch", "action 1"))["status"] == "exploratory"


def test_percentiles_are_numpys() -> None:
    random = np.random.default_rng(0)
    sample = random.normal(size=(501, 700))
    levels = random.choice([0.5, 0.95, 0.99375], size=700)
    low, high = percentile_intervals(sample, levels)
    for i in range(700):
        ends = np.percentile(sample[:, i], [50 * (1 - levels[i]), 50 * (1 + levels[i])])
        np.testing.assert_allclose([low[i], high[i]], ends, rtol=1e-12)


def test_intervals_over_undefined_draws() -> None:
    sample = np.random.default_rng(0).normal(size=(1000, 3))
    sample[:25, 0] = np.nan  # 2.5%: as many as one tail of a 95% interval holds
    sample[:26, 1] = np.nan
    sample[:, 2] = np.nan
    low, high = percentile_intervals(sample, np.full(3, 0.95))
    assert [low[0], high[0]] == pytest.approx(np.nanpercentile(sample[:, 0], [2.5, 97.5]))
    assert np.isnan([low[1:], high[1:]]).all()
    # One of six documents diverges: a draw misses it with probability (5/6)^6 = 0.33, so mean entry may be anything.
    scalars = {name: np.zeros((6, 1)) for name in SCALAR_MOMENTS}
    scalars["diverged"][0] = scalars["entry"][0] = 1.0
    result = estimate(make(scalars, ["s"] * 6), draws=300, seed=1, quantities=["mean_entry", "exposure"])
    row = result.row(Endpoint("mean_entry", "action 0"))
    assert (row["estimate"], row["low"], row["high"]) == (1.0, 1.0, 16.0)
    never = result.row(Endpoint("exposure", "action 0"))
    assert (never["estimate"], never["low"], never["high"] > 0) == (0.0, 0.0, True)


def test_scipys_bootstrap_per_stratum(study: DocumentMoments) -> None:
    """Paired percentile intervals of scipy on one stratum: same method, other random numbers.

    An end is a quantile of B = 10,000 draws with standard error sqrt(p (1 - p) / B) / density = 2.67 sd / 100; the
    difference of two such is 3.8% of the bootstrap sd. Tolerance 20%: 5 standard errors, so 12 ends fail falsely with
    probability < 1e-5.
    """
    draws = 10_000
    names = ["mismatch_rate", "mean_entry", "gap"]
    result = estimate(study, draws=draws, seed=9, quantities=names, pairs=PAIR, request=PERCENTILES)
    s = study.scalars

    def rate(*columns: np.ndarray, axis: int) -> np.ndarray:
        return columns[0].mean(axis=axis) / columns[1].mean(axis=axis)

    def difference(*columns: np.ndarray, axis: int) -> np.ndarray:
        return columns[1].mean(axis=axis) - columns[0].mean(axis=axis)

    for stratum in ("a", "b"):
        rows = study.strata == stratum
        cases = [
            (
                Endpoint("mismatch_rate", "action 1", None, stratum),
                rate,
                (s["occupation"][rows, 1], s["exposure"][rows, 1]),
            ),
            (Endpoint("mean_entry", "action 0", None, stratum), rate, (s["entry"][rows, 0], s["diverged"][rows, 0])),
            (Endpoint("gap", "action 1", "action 0", stratum), difference, tuple(s["mismatch"][rows, :2].T)),
        ]
        for endpoint, statistic, data in cases:
            reference = scipy.stats.bootstrap(
                data, statistic, paired=True, vectorized=True, n_resamples=draws, method="percentile", rng=1
            )
            row = result.row(endpoint)
            tolerance = 0.2 * reference.standard_error
            assert row["low"] == pytest.approx(reference.confidence_interval.low, abs=tolerance), endpoint
            assert row["high"] == pytest.approx(reference.confidence_interval.high, abs=tolerance), endpoint


def test_groups_hold_every_quantity_once(study: DocumentMoments) -> None:
    assert [name for group in groups(study, 1000) for name in group] == list(QUANTITIES)
    assert len(groups(study, 1_000_000)) > len(groups(study, 1000))
    bare = make(dict(study.scalars), study.strata.tolist())
    assert "hazard" not in groups(bare, 10)[0]


def test_messages(study: DocumentMoments) -> None:
    member = Endpoint("gap", "action 1", "action 0")
    cases: list[tuple[Any, str]] = [
        (lambda: resample(study, ["gpa"], seed=0, draws=1), "no quantity is named 'gpa'; did you mean 'gap'"),
        (lambda: observed(study, ["gap"], [("action 0", "acton 1")]), "no action is named 'acton 1'; did you mean"),
        (lambda: observed(study, ["gap"], [("action 0", "action 0")]), "against itself"),
        (lambda: observed(make(dict(study.scalars), study.strata.tolist()), ["hazard"]), "no profile 'first_mismatch'"),
        (lambda: Request(level=95), "level 95 is not between 0 and 1"),
        (lambda: Request(interval="bca"), "interval 'bca' is neither 'studentized' nor 'percentile'"),
        (lambda: Family("f", (member,), alpha=0), "alpha 0"),
        (lambda: Family("f", (member, member)), "names endpoint gap of action 1 against action 0 \\(pooled\\) twice"),
        (lambda: Request(families=(Family("f", (member,)), Family("g", (member,)))), "in two families"),
        (lambda: Request(families=(Family("f", (member,)),), prespecified=("action 0",)), "exploratory"),
        (
            lambda: estimate(
                study,
                draws=1,
                seed=0,
                quantities=["gap"],
                pairs=[("action 1", "action 0")],
                request=Request(families=(Family("f", (member,)),)),
            ),
            "its contrast is not requested",
        ),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call, message in cases:
            with pytest.raises(InputError, match=message) as error:
                call()
            assert "\n" not in str(error.value)
