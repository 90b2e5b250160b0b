"""Quantities against loops over events, their identities and undefined cases, and the messages of bad input."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from fixtures.awkward_logs import Row, awkward_log
from oracles.coupled_paths import Analysis
from oracles.unit_moment_definitions import profiles
from oracles.view_definitions import EVALUATIONS

from kvdrift.schema.errors import InputError
from kvdrift.schema.moments import BIN_MOMENTS, KL_BINS, LAG_MOMENTS, POSITION_MOMENTS, SCALAR_MOMENTS
from kvdrift.schema.windows import Windows
from kvdrift.sql.contracts import contract
from kvdrift.stats.bootstrap import estimate, observed
from kvdrift.stats.endpoints import Endpoint
from kvdrift.stats.moments import DocumentMoments, ReplicateMoments
from kvdrift.stats.pooling import Pooling
from kvdrift.stats.quantities import ALL_QUANTITIES, QUANTITIES, median_entry, quantity_named
from kvdrift.stats.registry import Pooled

H = 16
W = Windows.of(H)  # T = 8, early lags 1..2, late lags 7..8
STRATA = ("long", "short", "short", "long", "short")
RATES = ("mild", "harsh")
TOLERANCE = 1e-9
PAIRED = ["one document each", "long agreements", "several studies", "horizon 3"]  # logs with contrasts


@dataclass(frozen=True)
class Measured:
    """Moments of the documents of one split of a study, and the rows of views, all from loops over events."""

    moments: DocumentMoments
    rows: Callable[[str], list[Row]]


def measured(name: str) -> Iterator[Measured]:
    """Yield every split of every study of a log."""
    analysis = Analysis(awkward_log(name))
    windows = {(row["study"], row["model"]): Windows.from_row(row) for row in EVALUATIONS["windows"](analysis)}
    evaluated = functools.cache(lambda view: [*(EVALUATIONS | {"profiles": profiles})[view](analysis)])
    for key in sorted({(row["study"], row["model"], row["split"]) for row in evaluated("moments")}):

        def rows(view: str, key: tuple[str, ...] = key) -> list[Row]:
            return [row for row in evaluated(view) if (row["study"], row["model"], row["split"]) == key]

        yield Measured(document_moments(rows, windows[key[:2]]), rows)


def document_moments(rows: Callable[[str], list[Row]], windows: Windows) -> DocumentMoments:
    known = {row["doc"]: row for row in rows("moments")}
    docs, actions = sorted(known), sorted({row["action"] for row in rows("moments")})

    def spread(view: str, name: str, axis: str | None, length: int) -> np.ndarray:
        values = np.full((len(docs), len(actions), length), np.nan)
        for row in rows(view):
            place = row[axis] - 1 if axis else 0
            values[docs.index(row["doc"]), actions.index(row["action"]), place] = row[name]
        return values if axis else values[:, :, 0]

    binned = np.full((len(docs), len(actions), KL_BINS), np.nan)
    for row in rows("profiles"):
        binned[docs.index(row["doc"]), actions.index(row["action"])] = np.array(row["bin_kl"]) / row["replicates"]
    return DocumentMoments(
        docs, [known[doc]["stratum"] for doc in docs], [known[doc]["cluster"] for doc in docs], actions, windows,
        {name: spread("moments", name, None, 1) for name in SCALAR_MOMENTS},
        {name: spread("position_moments", name, "t", windows.horizon) for name in POSITION_MOMENTS},
        {name: spread("lag_moments", name, "lag", windows.cohort_bound) for name in LAG_MOMENTS},
        {"kl": binned},
    )  # fmt: skip


@pytest.mark.parametrize("log", [*PAIRED, "no divergence", "horizon 1"])
def test_quantities_are_the_columns_of_their_views(log: str) -> None:
    """The functions of moments against plain loops over events, which evaluate each view by its definition."""
    compared = set()
    for study in measured(log):
        values = observed(study.moments, list(QUANTITIES))
        pooling = Pooling.of(study.moments)
        for name, quantity in QUANTITIES.items():
            if quantity.view is None:
                continue
            grain = ("stratum", "baseline", "action", quantity.axis)
            expected = {
                tuple(row.get(part) for part in grain): row[quantity.column] for row in study.rows(quantity.view)
            }
            for row, stratum in enumerate(pooling.rows):
                for subject, (baseline, action) in enumerate(pooling.subjects(quantity)):
                    for place, x in enumerate(quantity.x(study.moments.windows)):
                        value = float(values[name][row, subject, place])
                        wanted = expected.pop((stratum, baseline, action, x), None)
                        assert same(value, wanted), (name, stratum, baseline, action, x, value, wanted)
                        compared |= {name} if wanted is not None else set()
            assert not expected, name
    if log == "long agreements":
        assert compared == {name for name, quantity in QUANTITIES.items() if quantity.view is not None}


def same(value: float, wanted: float | None) -> bool:
    return np.isnan(value) if wanted is None else abs(value - wanted) <= TOLERANCE * max(1, abs(wanted))


@pytest.fixture(scope="module")
def moments() -> DocumentMoments:
    (study,) = measured("long agreements")
    return study.moments


@pytest.fixture(scope="module")
def pooled(moments: DocumentMoments) -> dict[str, dict[str, np.ndarray]]:
    """action (or 'contrast') -> quantity -> values over x, pooled over strata."""
    values = observed(moments, list(QUANTITIES), [("one", "two")])
    result: dict[str, dict[str, np.ndarray]] = {"one": {}, "two": {}, "contrast": {}}
    for name, value in values.items():
        subjects = ("one", "two") if QUANTITIES[name].kind == "action" else ("contrast",)
        for i, subject in enumerate(subjects):
            result[subject][name] = value[0, i]
    return result


def test_contrasts_are_action_minus_baseline(
    moments: DocumentMoments, pooled: dict[str, dict[str, np.ndarray]]
) -> None:
    a, b, c = pooled["one"], pooled["two"], pooled["contrast"]
    differences = [name for name in QUANTITIES if name.endswith("_difference")]
    assert len(differences) == 14
    for name in differences:
        of = name.removesuffix("_difference")
        assert c[name] == pytest.approx(b[of] - a[of], nan_ok=True), name
    assert c["history_gap"] == pytest.approx(c["rollout_tv_gap"] - c["fixed_history_gap"])
    # The paper's table of uncalibrated summaries: its differences are of the TV estimator of R.
    share = moments.windows.horizon / moments.windows.first_block_last
    flat = [weighted(moments.scalars["prefix_mismatch"][:, action], moments.strata) * share for action in (0, 1)]
    assert c["flat_extrapolation_gap"] == pytest.approx([flat[1] - flat[0]])
    assert c["full_minus_fixed_history"] == pytest.approx(c["rollout_tv_gap"] - c["fixed_history_gap"])
    assert c["full_minus_flat_extrapolation"] == pytest.approx(c["rollout_tv_gap"] - c["flat_extrapolation_gap"])


def weighted(values: np.ndarray, strata: np.ndarray) -> float:
    return float(np.mean([values[strata == stratum].mean() for stratum in sorted(set(strata.tolist()))]))


def scalars(**given: float) -> Pooled:
    return Pooled({name: np.array(given.get(name, 0.0)) for name in SCALAR_MOMENTS}, {}, W)


def test_nothing_diverges() -> None:
    never = scalars()
    value = {n: q.function(never) for n, q in QUANTITIES.items() if q.kind == "action" and not q.profile}
    assert value["mismatch_rate"] == 0  # C = 0 when E = 0
    for name in ("mean_entry", "early", "late_minus_early", "early_pre_eos", "late_pre_eos_fraction", "long_agreement"):
        assert np.isnan(value[name]), name
    same = {n: q.function(never, never) for n, q in QUANTITIES.items() if q.kind == "contrast"}
    assert same["gap"] == same["exposure_term"] == 0
    assert np.isnan([same["exposure_share"], same["eos_share"], same["mean_entry_difference"]]).all()


def test_hazard_is_undefined_once_everything_has_diverged() -> None:
    first = np.zeros(H)
    first[[1, 2, 5]] = 0.1, 0.2, 0.7  # these sum to 1 - 1e-16 in floating point
    hazard = QUANTITIES["hazard"].function(Pooled({"diverged": np.array(1.0)}, {"first_mismatch": first}, W))
    assert hazard[5] == pytest.approx(1.0)
    assert np.isnan(hazard[6:]).all()
    assert hazard[1:3] == pytest.approx([0.1, 0.2 / 0.9])


def test_the_median_entry() -> None:
    """Against the standard library's median of grouped data, over an odd number of pairs."""
    random = np.random.default_rng(8)
    for _ in range(50):
        tau = random.integers(1, H + 3, size=11)  # beyond H: the pair never diverges
        first = np.array([np.mean(tau == t) for t in range(1, H + 1)])
        found = float(median_entry(Pooled({}, {"first_mismatch": first}, W)))
        if np.mean(tau <= H) < 0.5:
            assert np.isnan(found)
        else:
            assert found == pytest.approx(min(statistics.median_grouped(tau.tolist(), interval=1), H))
    for given, expected in (([5] * 4, 5.0), ([3, 99], 3.5), ([H, 99], H), ([1, 1, 1, 99], 1.1666666666666667)):
        first = np.array([np.mean(np.array(given) == t) for t in range(1, H + 1)])
        assert float(median_entry(Pooled({}, {"first_mismatch": first}, W))) == pytest.approx(expected)


def test_the_interval_of_a_median_that_some_draws_do_not_reach() -> None:
    """Of 20 documents 10 diverge at 4, 2 at 9, and 8 never: in some resamples fewer than half diverge."""
    tau = np.array([4] * 10 + [99] * 8 + [9] * 2)
    first = (tau[:, None, None] == np.arange(1, H + 1)).astype(float)
    names = [f"d{number}" for number in range(20)]
    zeros = {name: np.zeros((20, 1)) for name in SCALAR_MOMENTS}
    positions = {name: np.zeros((20, 1, H)) for name in POSITION_MOMENTS} | {"first_mismatch": first}
    lags = {name: np.zeros((20, 1, W.cohort_bound)) for name in LAG_MOMENTS}
    given = DocumentMoments(names, ["s"] * 20, names, ("x",), W, zeros, positions, lags)
    row = estimate(given, draws=500, seed=1, quantities=["median_entry"]).row(Endpoint("median_entry", "x"))
    assert (row["estimate"], row["interval"]) == (4.5, "expanded")
    assert 3.9 < row["low"] < 4.5
    assert row["high"] == H
    never = replace(given, positions=positions | {"first_mismatch": np.zeros_like(first)})
    row = estimate(never, draws=500, seed=1, quantities=["median_entry"]).row(Endpoint("median_entry", "x"))
    assert (row["estimate"], row["low"], row["high"]) == (None, None, None)


def test_empty_windows_are_undefined() -> None:
    tiny = Windows.of(4)  # an eighth of 4 is 0 lags
    assert (tiny.cohort_bound, tiny.early_lags, tiny.late_lags) == (2, 0, 0)
    shape = (3, 1)
    values = {name: np.full(shape, 0.5) for name in SCALAR_MOMENTS} | {
        name: np.full(shape, np.nan) for name in ("early_delta", "late_delta")
    }
    moments = DocumentMoments(["a", "b", "c"], ["s"] * 3, ["a", "b", "c"], ("x",), tiny, values, {}, {})
    got = observed(moments, ["early", "late_minus_early", "early_pre_eos_fraction", "mismatch"], [])
    assert np.isnan([got["early"], got["late_minus_early"], got["early_pre_eos_fraction"]]).all()
    assert (got["mismatch"] == 0.5).all()
    without = scalars(block_1_mismatch=np.nan)  # W = 0
    assert np.isnan(QUANTITIES["flat_extrapolation_gap"].function(without, without))
    assert np.isnan(QUANTITIES["full_minus_flat_extrapolation"].function(without, without))
    assert QUANTITIES["full_minus_fixed_history"].function(without, without) == 0


def test_registry_is_named_like_the_views() -> None:
    without_a_view = {
        "rollout_tv_gap", "fixed_history_gap", "flat_extrapolation_gap", "full_minus_fixed_history",
        "full_minus_flat_extrapolation",
    }  # fmt: skip
    for name, quantity in QUANTITIES.items():
        assert quantity.name == name
        assert quantity.label
        assert quantity.meaning
        assert set(quantity.profile) <= POSITION_MOMENTS.keys() | LAG_MOMENTS.keys() | BIN_MOMENTS.keys()
        assert (quantity.view is None) == (name.endswith("_difference") or name in without_a_view)
    sources = [(q.view, q.column) for q in QUANTITIES.values() if q.view]
    assert len(set(sources)) == len(sources)
    assert quantity_named("hazard").x(W) == tuple(range(1, H + 1))
    assert quantity_named("eos_gap").x(W) == (0, 1, 2, 3)
    with pytest.raises(InputError, match="no quantity is named 'mismach'; did you mean 'mismatch'"):
        quantity_named("mismach")


def test_every_view_column_of_a_quantity_is_in_its_contract() -> None:
    for quantity in ALL_QUANTITIES.values():
        if quantity.view is not None:
            promised = contract(quantity.view).columns
            needed = {quantity.column, "stratum", "action"} | ({quantity.axis} - {None})
            needed |= {"baseline"} if quantity.kind == "contrast" else set()
            assert needed <= set(promised), quantity.name


def rebuilt(moments: DocumentMoments, **changes: Any) -> DocumentMoments:
    fields = ("documents", "strata", "clusters", "actions", "windows", "scalars", "positions", "lags", "bins")
    return DocumentMoments(**({name: getattr(moments, name) for name in fields} | changes))


def test_messages(moments: DocumentMoments) -> None:
    def given(name: str, value: Any) -> dict[str, Any]:
        return {**moments.scalars, name: value}

    hole = moments.scalars["early_delta"].copy()
    hole[2, 1] = np.nan
    missing = moments.documents[2]
    absent = moments.scalars["diverged"].copy()
    absent[2, 1] = np.nan
    bad: list[tuple[dict[str, Any], str]] = [
        ({"scalars": given("mismach", hole)}, "the moment 'mismach' is unknown"),
        ({"scalars": given("entry", hole[:2])}, r"'entry' has shape \(2, 2\), must be .* \(3, 2\)"),
        ({"scalars": given("early_delta", hole)}, f"'early_delta' of document '{missing}' under 'two' and"),
        ({"scalars": given("diverged", absent)}, f"of document '{missing}' under 'two' and 'diverged' are not"),
        ({"scalars": given("entry", np.full((3, 2), np.inf))}, "finite"),
        ({"positions": {"delta": moments.positions["delta"]}}, "the moment 'f' is missing"),
        ({"strata": np.array(["s"])}, "strata has shape"),
        ({"strata": np.array(["pooled"] * 3)}, "cannot be named 'pooled'"),
        ({"documents": np.array(["d"] * 3)}, "document 'd' is given twice"),
        ({"actions": ("one", "one")}, "action 'one' is given twice"),
        ({"documents": [], "strata": [], "clusters": []}, "nothing to estimate"),
    ]
    for changes, message in bad:
        with pytest.raises(InputError, match=message) as error:
            rebuilt(moments, **changes)
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="'mismatch' has shape"):
        ReplicateMoments(["d"], ["s"], ["c"], ("a",), W, {n: np.zeros((1, 1)) for n in SCALAR_MOMENTS})


def test_endpoint_messages() -> None:
    for endpoint, message in (
        (Endpoint("saturation", "mild", "harsh"), "takes no baseline"),
        (Endpoint("gap", "mild"), "needs a baseline"),
        (Endpoint("gap", "mild", "mild"), "against itself"),
        (Endpoint("gap", "mild", "hars"), "no action 'hars'; did you mean 'harsh'"),
        (Endpoint("saturation", "mild", stratum="sort"), "no stratum 'sort'; did you mean 'short'"),
        (Endpoint("eos_gap", "mild", x=4), "x must be one of 0..3"),
        (Endpoint("saturation", "mild", x=1), "x must be null, since the quantity is a single number"),
    ):
        with pytest.raises(InputError, match=message):
            endpoint.check(tuple(RATES), ("long", "short"), W)
    assert str(Endpoint("gap", "harsh", "mild")) == "gap of harsh against mild (pooled)"


def test_replicate_means_are_document_moments() -> None:
    random = np.random.default_rng(3)
    values = {name: random.random((len(STRATA), 2, 3)) for name in SCALAR_MOMENTS}
    values = {name: np.where(np.arange(3) < [[[3], [2]]], value, np.nan) for name, value in values.items()}
    docs = [f"d{number}" for number in range(len(STRATA))]
    means = ReplicateMoments(docs, STRATA, docs, RATES, W, values).document_means()
    for name, value in values.items():
        np.testing.assert_allclose(means.scalars[name], np.nanmean(value, axis=2), atol=1e-15)
