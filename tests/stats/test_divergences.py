"""KL quantities of pooled moments: the 99% quantile from bins, its interval, and numbers without an upper bound."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvdrift.schema.moments import BIN_MOMENTS, KL_BINS, KL_EDGES, SCALAR_MOMENTS, Replicates
from kvdrift.schema.windows import Windows
from kvdrift.stats.bootstrap import Endpoint, estimate, observed
from kvdrift.stats.moments import DocumentMoments
from kvdrift.stats.quantities import tail_divergence
from kvdrift.stats.registry import Pooled

W = Windows.of(16)
Array = NDArray[np.float64]


def binned(values: Array) -> Array:
    """The bins of each replicate's values, [K, H] -> [K, KL_BINS], as the derivation counts them."""
    unused = dict.fromkeys(Replicates.__dataclass_fields__, np.zeros(0))
    counts = BIN_MOMENTS["kl"].of(Replicates(**unused | {"kl": values}))  # type: ignore[arg-type]
    return np.asarray(counts, dtype=np.float64)


def tail(values: list[float] | Array) -> float:
    counts = binned(np.array([values], dtype=np.float64))[0]
    return float(tail_divergence(Pooled({}, {"kl": counts}, W)))


def test_bins_have_their_upper_edges() -> None:
    for place, edge in enumerate(KL_EDGES, start=1):
        at, above = (int(binned(np.array([[value]]))[0].argmax()) for value in (edge, 1.0001 * edge))
        assert (at, above) == (place, place + 1)
    assert np.flatnonzero(binned(np.array([[0.0, np.inf, np.nan]]))[0]).tolist() == [0, KL_BINS - 1]
    assert KL_EDGES[-1] > -np.log(5e-324), "the largest logarithm of a ratio of probabilities"


def test_the_quantile_of_many_values_is_theirs() -> None:
    random = np.random.default_rng(1)
    for scale in (1e-9, 1e-3, 1.0):
        for values in (scale * random.lognormal(0, 2, 20_000), scale * random.exponential(size=20_000)):
            assert tail(values) == pytest.approx(np.quantile(values, 0.99), rel=0.02)


def test_the_quantile_of_few_values_is_in_the_bin_of_one() -> None:
    assert tail([0.0] * 100) == tail([0.0] * 99 + [np.inf]) == 0.0
    assert np.isnan(tail([0.0] * 98 + [np.inf] * 2))
    assert np.isnan(tail([np.nan] * 3))
    assert 2**-0.25 < tail([1e-5] * 98 + [1.0] * 2) <= 1.0
    assert 0 < tail([1e-14] * 4) <= 2**-40


def study(kl: Array) -> DocumentMoments:
    """Documents of one action and stratum with KL along X at some positions, [documents, positions]."""
    documents = [f"d{number:03}" for number in range(len(kl))]
    scalars = {name: np.zeros((len(kl), 1)) for name in SCALAR_MOMENTS}
    scalars["kl_positions"] = scalars["kl_finite"] = np.full((len(kl), 1), float(kl.shape[1]))
    scalars["kl_sum"] = kl.sum(axis=1)[:, None]
    return DocumentMoments(
        documents, ["s"] * len(kl), documents, ("x",), W, scalars, {}, {}, {"kl": binned(kl)[:, None]}
    )


@pytest.mark.slow
def test_intervals_hold_the_quantile() -> None:
    """log KL = a_d + e, a_d of a document, both normal: the law of all positions is lognormal, with a known quantile.

    24 documents; 400 studies. Percentile intervals of a tail's quantile are a little narrow.
    """
    random, spread = np.random.default_rng(2), 0.5
    truth = np.exp(2.3263478740408408 * np.sqrt(1 + spread**2))
    held = 0
    for number in range(400):
        kl = np.exp(spread * random.standard_normal((24, 1)) + random.standard_normal((24, 300)))
        found = estimate(study(kl), draws=500, seed=number, quantities=["kl_fixed_history_p99"])
        row = found.row(Endpoint("kl_fixed_history_p99", "x"))
        assert row["interval"] == "expanded"
        held += row["low"] <= truth <= row["high"]
    assert 0.91 < held / 400 < 0.985


def test_documents_without_any_divergence_bound_nothing() -> None:
    """KL has no largest value, so 20 documents at 0 say nothing of the mean over others, and there is no interval."""
    rows = estimate(
        study(np.zeros((20, 30))), draws=200, seed=1, quantities=["kl_fixed_history", "kl_fixed_history_p99"]
    )
    for name in ("kl_fixed_history", "kl_fixed_history_p99"):
        row = rows.row(Endpoint(name, "x"))
        assert (row["estimate"], row["low"], row["high"]) == (0.0, None, None)


def test_unknown_divergences_are_undefined() -> None:
    nothing = study(np.zeros((20, 30)))
    scalars = nothing.scalars | {name: np.zeros((20, 1)) for name in ("kl_positions", "kl_finite")}
    without = DocumentMoments(
        nothing.documents,
        nothing.strata,
        nothing.clusters,
        ("x",),
        W,
        scalars,
        {},
        {},
        {"kl": np.zeros((20, 1, KL_BINS))},
    )
    names = ["kl", "kl_fixed_history", "kl_fixed_history_p99", "top1_agreement", "kl_infinite", "kl_own_infinite"]
    assert all(np.isnan(value).all() for value in observed(without, names, []).values())


def test_a_mean_has_a_studentized_interval() -> None:
    random = np.random.default_rng(3)
    row = estimate(study(random.exponential(size=(30, 40))), draws=500, seed=1, quantities=["kl_fixed_history"]).row(
        Endpoint("kl_fixed_history", "x")
    )
    assert row["interval"] == "studentized"
    assert row["low"] < row["estimate"] < row["high"]
