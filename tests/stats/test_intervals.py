"""Studentized intervals: an independent evaluation, the textbook's case, and undefined intervals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
from oracles.plain_intervals import Document, effective_clusters, interval

from kvdrift.schema.moments import ANSWER_MOMENTS, BIN_MOMENTS, KL_BINS, LAG_MOMENTS, POSITION_MOMENTS, SCALAR_MOMENTS
from kvdrift.schema.windows import Windows
from kvdrift.stats.bootstrap import Request, estimate, observed, observed_errors, resample
from kvdrift.stats.clusters import ClusterBlocks, ClusterDraws
from kvdrift.stats.endpoints import Endpoint
from kvdrift.stats.ends import expanded_intervals
from kvdrift.stats.moments import DocumentMoments
from kvdrift.stats.pooling import Pooling
from kvdrift.stats.quantities import ALL_QUANTITIES, QUANTITIES
from kvdrift.stats.registry import Range, Scale
from kvdrift.stats.standard_errors import StandardErrors, constant_gradient, features_read

H = 8
WINDOWS = Windows.of(H)
PAIR = ("action 0", "action 1")
DRAWS = 300


def study(strata: list[str], clusters: list[str] | None = None, seed: int = 1) -> DocumentMoments:
    """Two actions; moments of no law, but for a first mismatch that has a probability."""
    random = np.random.default_rng(seed)
    count = len(strata)
    scalars = {name: random.random((count, 2)) for name in SCALAR_MOMENTS}
    first = random.random((count, 2, H))
    first *= (scalars["diverged"] / first.sum(axis=-1))[..., None]
    positions = {name: random.random((count, 2, H)) for name in POSITION_MOMENTS} | {"first_mismatch": first}
    scalars["occupation"] *= scalars["exposure"]  # a ratio of moments is a fraction
    lags = {name: random.random((count, 2, WINDOWS.cohort_bound)) for name in LAG_MOMENTS}
    lags = {name: value * scalars["cohort"][..., None] for name, value in lags.items()}
    bins = {name: random.random((count, 2, KL_BINS)) for name in BIN_MOMENTS}
    names = np.array([f"doc {number:02}" for number in range(count)])
    groups = names if clusters is None else np.array(clusters)
    return DocumentMoments(names, np.array(strata), groups, PAIR, WINDOWS, scalars, positions, lags, bins)


STUDIES = {
    "one stratum": study(["a"] * 9),
    "strata of unequal size": study(["a"] * 7 + ["b"] * 5),
    "clusters of unequal size": study(["a"] * 9 + ["b"] * 6, list("ppqrsttuv") + list("ABCDEF")),
    "linked strata": study(["a"] * 6 + ["b"] * 6 + ["c"] * 5, [*"pqrstu", *"pqrxyz", *"ABCDE"]),
}


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom else math.nan


def _first(x: int) -> str:
    return f"first_mismatch {x}"


def _rate(m: dict[str, float], side: str = "") -> float:
    return _ratio(m[f"{side}occupation"], m[f"{side}exposure"])


def _rate_term(m: dict[str, float]) -> float:
    return (_rate(m, "b ") - _rate(m, "a ")) * (m["a exposure"] + m["b exposure"]) / 2


# Quantity and x; what of a document it reads, by a name of its own; and the quantity of these, written down anew.
Case = tuple[str, int | None, dict[str, tuple[str, str, int | None]], Callable[[dict[str, float]], float]]
_OF_FIRST: dict[str, tuple[str, str, int | None]] = {_first(x): ("", "first_mismatch", x) for x in range(1, H + 1)}
_TERM_READS = {f"{side} {name}": (side, name, None) for side in "ab" for name in ("occupation", "exposure")}
CASES: tuple[Case, ...] = (
    ("mismatch", None, {"R": ("", "mismatch", None)}, lambda m: m["R"]),
    ("mismatch_rate", None, {name: ("", name, None) for name in ("occupation", "exposure")}, _rate),
    ("entry_cdf", 3, _OF_FIRST, lambda m: sum(m[_first(x)] for x in (1, 2, 3))),
    ("hazard", 5, _OF_FIRST | {"diverged": ("", "diverged", None)},
     lambda m: _ratio(m[_first(5)], 1 - m["diverged"] + sum(m[_first(x)] for x in range(5, H + 1)))),
    ("branch_delta", 2, {"delta": ("", "cohort_delta", 2), "cohort": ("", "cohort", None)},
     lambda m: _ratio(m["delta"], m["cohort"])),
    ("eos_gap", 2, {"G": ("", "eos_gap_2", None)}, lambda m: m["G"]),
    ("rate_term", None, _TERM_READS, _rate_term),
    ("mismatch_rate_difference", None, _TERM_READS, lambda m: _rate(m, "b ") - _rate(m, "a ")),
)  # fmt: skip


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("stratum", ["pooled", "a"])
@pytest.mark.by_default("pooled-linked strata", "a-clusters of unequal size")
def test_intervals_are_those_of_plain_loops(name: str, stratum: str) -> None:
    moments = STUDIES[name].in_canonical_order()
    if stratum == "a":
        assert (moments.strata == "a").any()
    result = estimate(
        moments, draws=DRAWS, seed=4, quantities=[case[0] for case in CASES], pairs=[PAIR], request=Request(0.9)
    )
    counts = ClusterDraws(moments.strata, moments.clusters).counts(4, 0, DRAWS)
    own = np.ones(len(moments.documents), dtype=bool) if stratum == "pooled" else moments.strata == stratum
    for quantity, x, reads, plain in CASES:
        contrast = QUANTITIES[quantity].kind == "contrast"
        row = result.row(Endpoint(quantity, "action 1", "action 0" if contrast else None, stratum, x))
        documents = [
            Document(
                str(moments.strata[place]), str(moments.clusters[place]),
                {key: _value(moments, place, *read) for key, read in reads.items()},
            )
            for place in np.flatnonzero(own)
        ]  # fmt: skip
        between = QUANTITIES[quantity].range.between(H)
        expected = interval(plain, documents, counts[:, own].astype(int).tolist(), 0.9, between)
        assert row["interval"] == expected.method, (quantity, row)
        assert [row["estimate"], row["low"], row["high"]] == pytest.approx(
            [expected.estimate, expected.low, expected.high], rel=1e-5, abs=1e-8
        ), quantity
        assert row["clusters"] == math.floor(effective_clusters(documents)[0] + 1e-9)


def _value(moments: DocumentMoments, place: int, side: str, name: str, x: int | None) -> float:
    action = 0 if side == "a" else 1
    if x is None:
        return float(moments.scalars[name][place, action])
    profiles = moments.positions if name in moments.positions else moments.lags
    return float(profiles[name][place, action, x - 1])


def test_a_mean_has_the_textbooks_bootstrap_t() -> None:
    """One stratum: t* = (mean* - mean) / (s* / sqrt(n)), s with divisor n - 1; no quantile is nearer than Student's."""
    moments = study(["a"] * 9).in_canonical_order()
    counts = ClusterDraws(moments.strata, moments.clusters).counts(2, 0, 1000).astype(int)
    row = estimate(moments, draws=1000, seed=2, quantities=["saturation"]).row(Endpoint("saturation", "action 0"))
    values = moments.scalars["saturation"][:, 0]
    root = math.sqrt(len(values))
    distances = []
    for one in counts:
        drawn = np.repeat(values, one)
        distances.append((drawn.mean() - values.mean()) / (drawn.std(ddof=1) / root))
    error = values.std(ddof=1) / root
    student = scipy.stats.t.ppf(0.975, 8)
    low, high = np.quantile(distances, [0.025, 0.975])
    scale = error / (values.mean() * (1 - values.mean()))
    odds = math.log(values.mean() / (1 - values.mean()))
    ends = [
        odds - min(max(high, student), 1.5 * student) * scale,
        odds + min(max(-low, student), 1.5 * student) * scale,
    ]
    assert [row["low"], row["high"]] == pytest.approx([1 / (1 + math.exp(-end)) for end in ends], rel=1e-10)
    assert observed_errors(moments, ["saturation"])["saturation"][0, 0, 0] == pytest.approx(error, rel=1e-12)


def test_standard_errors_do_not_depend_on_what_else_is_estimated() -> None:
    moments = STUDIES["linked strata"]
    names = list(QUANTITIES)
    whole = resample(moments, names, seed=3, draws=300, studentized=True)
    for own in (["hazard", "gap"], ["eos_gap"]):
        alone = resample(moments, own, seed=3, draws=280, pairs=[PAIR], studentized=True)
        for name in own:
            subjects = slice(None) if QUANTITIES[name].kind == "action" else [0]
            same = whole[name].distances[:280, :, subjects]
            np.testing.assert_array_equal(alone[name].distances, same, err_msg=name)
    one = resample(moments.of_actions(["action 1"]), ["survival"], seed=3, draws=300, studentized=True)
    np.testing.assert_array_equal(one["survival"].distances, whole["survival"].distances[:, :, 1:])


def test_one_action_is_estimated_and_has_no_contrasts() -> None:
    """Each difference of two actions has no subjects then: arrays without elements."""
    moments = STUDIES["one stratum"].of_actions(["action 1"])
    of_actions = [name for name, quantity in QUANTITIES.items() if quantity.kind == "action"]
    alone, whole = (estimate(moments, draws=256, seed=3, quantities=names) for names in (of_actions, [*QUANTITIES]))
    assert set(whole.columns["baseline"]) == {None}
    assert len(whole) == len(alone)


def test_quantities_over_x_are_functions_of_the_same_x() -> None:
    """A derivative may therefore be taken once: a profile at x changes only the quantity at x."""
    moments = STUDIES["one stratum"]
    smooth = {name: quantity for name, quantity in QUANTITIES.items() if quantity.smooth}
    for name, quantity in smooth.items():
        if quantity.axis not in ("t", "lag"):
            assert all(feature.kind == "scalar" for _, feature in features_read(quantity, moments)), name
    linear = {name for name, one in smooth.items() if constant_gradient(one, moments, features_read(one, moments))}
    assert {"mismatch", "gap", "entry_cdf", "survival", "generation_delta", "eos_related", "eos_gap"} <= linear
    assert not linear & {"hazard", "mismatch_rate", "rate_term", "occurrence_share", "early", "branch_delta"}


def test_every_quantity_has_a_range_that_its_values_keep_to() -> None:
    moments = STUDIES["linked strata"]
    values = observed(moments, list(QUANTITIES))
    for name, quantity in ALL_QUANTITIES.items():
        low, high = quantity.range.between(H)
        assert low < high, name
        of_a_contrast = name.endswith("_share") and quantity.kind == "contrast"
        assert (quantity.range is Range.UNBOUNDED) == of_a_contrast, name
        if quantity.scale is Scale.TOKENS:
            assert math.isfinite(high - low)
        # Shares of positions of this study are of no law: only what is bounded for any moments in [0, 1] is held here.
        if name in values and quantity.range is Range.FRACTION and name in ("mismatch", "survival", "entry_cdf"):
            assert ((values[name] >= low) & (values[name] <= high)).all(), name
    assert QUANTITIES["occurrence"].range.between(H) == (0, 1 / H)
    assert QUANTITIES["mean_entry_difference"].range.between(H) == (1 - H, H - 1)
    assert QUANTITIES["late_minus_early_difference"].range.between(H) == (-2, 2)


def _constant(value: float, strata: list[str], clusters: list[str] | None = None) -> DocumentMoments:
    moments = study(strata, clusters)
    return DocumentMoments(
        moments.documents, moments.strata, moments.clusters, PAIR, WINDOWS,
        {name: np.full((len(strata), 2), value) for name in SCALAR_MOMENTS}, {}, {},
    )  # fmt: skip


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1.0])
def test_documents_that_are_all_alike_leave_open_what_they_do_not_show(value: float) -> None:
    """None of 16 documents differs: up to 1 - .025^(1/16) = 20.6% of others may, at either end of the range."""
    names = ["mismatch", "gap", "rate_term"]
    result = estimate(_constant(value, ["a"] * 9 + ["b"] * 9), draws=200, seed=1, quantities=names, pairs=[PAIR])
    share = 1 - 0.025 ** (1 / 18)
    for name in names:
        baseline = "action 0" if QUANTITIES[name].kind == "contrast" else None
        least, most = QUANTITIES[name].range.between(H)
        row = result.row(Endpoint(name, "action 1", baseline))
        assert row["interval"] == "alike"
        point = row["estimate"]
        expected = [point - share * (point - least), point + share * (most - point)]
        assert [row["low"], row["high"]] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_few_unlike_documents_bound_how_many_there_are() -> None:
    """One document of nine differs, by .4: at most 48% of all do (Clopper and Pearson), by no more than .4."""
    moments = _constant(0.2, ["a"] * 9)
    moments.scalars["mismatch"][4, 0] = 0.6
    distances = resample(moments, ["mismatch"], seed=1, draws=2000, studentized=True)["mismatch"].distances
    assert np.isnan(distances[:, 0, 0, 0]).mean() == pytest.approx((8 / 9) ** 9, abs=0.05)
    row = estimate(moments, draws=2000, seed=1, quantities=["mismatch"]).row(Endpoint("mismatch", "action 0"))
    assert row["interval"] == "alike"
    share = scipy.stats.beta.ppf(0.975, 2, 8)
    assert (row["low"], row["high"]) == pytest.approx((0.2 - share * 0.2, 0.2 + share * 0.4))


def test_a_ratio_is_alike_over_the_documents_that_have_its_denominator() -> None:
    """None of the five right answers of nine is lost: a share of at most 1 - .025^(1/5)."""
    moments = _answered(right=[1, 1, 0, 1, 0, 1, 1, 0, 0], lost=[0] * 9)
    row = estimate(moments, draws=200, seed=1, quantities=["lost_share"]).row(Endpoint("lost_share", "action 0"))
    assert (row["estimate"], row["low"], row["interval"]) == (0, 0, "alike")
    assert row["high"] == pytest.approx(1 - 0.025 ** (1 / 5))
    few = _answered(right=[1, 0, 0, 1, 0, 1, 1, 0, 0], lost=[0] * 9)
    row = estimate(few, draws=200, seed=1, quantities=["lost_share"]).row(Endpoint("lost_share", "action 0"))
    assert (row["low"], row["high"]) == (0, 1), "the denominator may be 0"


def test_strata_that_differ_and_documents_that_do_not_have_a_width() -> None:
    moments = _constant(0.0, ["a"] * 12 + ["b"] * 12)
    moments.scalars["mismatch"][12:] = 0.5
    row = estimate(moments, draws=200, seed=1, quantities=["mismatch"]).row(Endpoint("mismatch", "action 0"))
    share = 1 - 0.025 ** (1 / 24)
    assert (row["low"], row["high"]) == pytest.approx((0.25 - share * 0.25, 0.25 + share * 0.75))


def _answered(right: list[int], lost: list[int]) -> DocumentMoments:
    base = _constant(0.0, ["a"] * len(right))
    scalars = dict(base.scalars) | {name: np.zeros((len(right), 2)) for name in ANSWER_MOMENTS}
    scalars |= {"reference_right": np.array([right] * 2).T.astype(float), "lost": np.array([lost] * 2).T.astype(float)}
    return DocumentMoments(base.documents, base.strata, base.clusters, PAIR, WINDOWS, scalars, {}, {})


def test_few_clusters_and_none() -> None:
    for documents, clusters, method, there in (
        (5, None, "studentized", True), (4, None, "expanded", True), (9, list("aabbccddd"), "expanded", True),
        (20, None, "studentized", True), (2, None, "expanded", True), (1, None, "expanded", False), (3, list("aaa"), "expanded", False),
    ):  # fmt: skip
        moments = study(["s"] * documents, clusters)
        row = estimate(moments, draws=500, seed=1, quantities=["mismatch"]).row(Endpoint("mismatch", "action 0"))
        assert (row["interval"], row["low"] is not None, row["high"] is not None) == (method, there, there), documents
        assert row["clusters"] == {"aabbccddd": 3, "aaa": 1}.get("".join(clusters or ""), documents)


def test_expanded_percentiles_are_the_definitions() -> None:
    sample = np.random.default_rng(0).normal(size=(4000, 2))
    low, high = expanded_intervals(sample, np.array([0.95, 0.9]), np.array([4, 9]), np.array([1, 2]))
    # Phi(sqrt(4/3) t_3(.025)) = Phi(-3.6748), Phi(sqrt(9/8) t_7(.05)) = Phi(-2.0095)
    for column, tail in ((0, 1.19e-4), (1, 0.022241)):
        ends = np.quantile(sample[:, column], [tail, 1 - tail])
        assert [low[column], high[column]] == pytest.approx(ends, abs=2e-3)


def test_a_denominator_that_may_be_0_leaves_the_whole_range() -> None:
    scalars = {name: np.zeros((8, 2)) for name in SCALAR_MOMENTS}
    scalars["diverged"][0] = scalars["entry"][0] = 1.0
    strata = ["s"] * 8
    base = study(strata)
    moments = DocumentMoments(base.documents, base.strata, base.clusters, PAIR, WINDOWS, scalars, {}, {})
    row = estimate(moments, draws=300, seed=1, quantities=["mean_entry"]).row(Endpoint("mean_entry", "action 0"))
    assert (row["estimate"], row["low"], row["high"]) == (1.0, 1.0, H), "one document diverges: tau may be any"


def test_ends_stay_in_the_range() -> None:
    """Values near 1, or 0, with a tail away from it: an interval of a fraction ends before, and a difference is cut."""
    moments = study(["s"] * 12)
    near = np.array([0.9, 0.95, 0.97, 0.98, 0.99, 0.99, 0.995, 0.995, 0.998, 0.999, 1.0, 1.0])
    for values in (near, 1 - near):
        moments.scalars["mismatch"][:, 0], moments.scalars["mismatch"][:, 1] = values, 1 - values
        names = ["mismatch", "gap"]
        result = estimate(moments, draws=2000, seed=1, quantities=names, pairs=[PAIR], request=Request(0.999))
        row = result.row(Endpoint("mismatch", "action 0"))
        assert row["interval"] == "skewed"
        assert 0 < row["low"] < row["estimate"] < row["high"] < 1
        row = result.row(Endpoint("gap", "action 1", "action 0"))
        assert -1 <= row["low"] < row["estimate"] < row["high"] <= 1


def test_a_stratum_without_an_action_counts_no_cluster() -> None:
    moments = study(["a"] * 6 + ["b"] * 6)
    for values in (moments.scalars, moments.positions, moments.lags, moments.bins):
        for value in values.values():
            value[6:, 1] = np.nan
            value[0, 0] = np.nan
    moments = replace(moments)  # which documents an action has is found once
    pooling = Pooling.of(moments.in_canonical_order(), [PAIR])
    clusters, sets = ClusterBlocks(pooling).counts_of(QUANTITIES["gap"])
    assert clusters.tolist() == [[5], [5], [0]]
    assert sets.tolist() == [[1], [1], [0]]
    row = estimate(moments, draws=300, seed=1, quantities=["gap"], pairs=[PAIR]).row(
        Endpoint("gap", "action 1", "action 0")
    )
    shared = study(["a"] * 6)
    gap = (moments.scalars["mismatch"][:, 1] - moments.scalars["mismatch"][:, 0])[1:6]
    error = StandardErrors(ClusterBlocks(pooling), QUANTITIES["gap"])
    ones = np.ones((1, 12))
    found = error(pooling.pool([QUANTITIES["gap"]], ones)["gap"], ones)[0, :2, 0, 0]
    assert found == pytest.approx([gap.std(ddof=1) / math.sqrt(5)] * 2)
    assert row["clusters"] == 5 == len(shared.documents) - 1
