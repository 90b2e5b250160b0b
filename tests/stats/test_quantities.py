"""Quantities against naive sums over raw trajectories, identities, undefined cases, and the messages of bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvdrift.schema.errors import InputError
from kvdrift.schema.moments import LAG_MOMENTS, POSITION_MOMENTS, SCALAR_MOMENTS
from kvdrift.schema.windows import Windows
from kvdrift.sql.contracts import contract
from kvdrift.stats.endpoints import Endpoint
from kvdrift.stats.moments import DocumentMoments, ReplicateMoments
from kvdrift.stats.quantities import ALL_QUANTITIES, QUANTITIES, quantity_named
from kvdrift.stats.registry import Pooled
from kvdrift.stats.resampling.bootstrap import observed

H, K = 16, 3
W = Windows.of(H)  # T = 8, early lags 1..2, late lags 7..8
RUN, THRESHOLD = 3, 0.6
STRATA = ("long", "short", "short", "long", "short")  # unequal sizes: weights differ
WEIGHT = np.array([1 / 4, 1 / 6, 1 / 6, 1 / 4, 1 / 6])  # w_d = 1 / (S n_stratum(d))


class Path:
    """One simulated pair, with the definitions of its values position by position (t from 1)."""

    def __init__(self, random: np.random.Generator, rate: float) -> None:
        self.mismatch = np.concatenate([[0], random.random(H - 1) < rate]).astype(int)
        self.delta = np.concatenate([[0.0], random.random(H - 1)])
        self.f = np.concatenate([[0.0], random.random(H - 1)])
        self.eos_x, self.eos_y = random.integers(4, H + 2, size=2)  # H + 1: none
        self.e, self.e_late = sorted((self.eos_x, self.eos_y))
        hits = np.flatnonzero(self.mismatch)
        self.tau = int(hits[0]) + 1 if len(hits) else None

    @property
    def in_cohort(self) -> bool:
        """Whether tau <= T."""
        return self.tau is not None and self.tau <= W.cohort_bound

    def after(self, lags: range, values: np.ndarray, *, before_eos: bool = False) -> list[float]:
        """Return the values at tau + j, restricted to those before e if asked."""
        assert self.tau is not None
        return [values[self.tau + j - 1] for j in lags if not before_eos or self.tau + j < self.e]

    def eos_set(self, t: int) -> int:
        """Return r of the set S_r that holds t."""
        return 0 if t < self.e else 1 if t == self.e else 2 if t <= self.e_late else 3

    def agreements(self) -> str:
        """Spell the steps after tau before EOS: 'a' for an agreement, 'm' for a mismatch."""
        if not self.in_cohort:
            return ""
        return "".join("m" if self.mismatch[t - 1] else "a" for t in range(self.tau + 1, min(self.e, H + 1)))


EARLY, LATE = range(1, W.early_last + 1), range(W.late_first, W.cohort_bound + 1)
BLOCKS = (range(1, H // 4 + 1), range(H // 4 + 1, H // 2 + 1), range(H // 2 + 1, H + 1))


def scalar_moments(path: Path) -> dict[str, float]:
    """Each moment of kvdrift.schema.moments for one trajectory, by its own words."""
    tau, cohort = path.tau, path.in_cohort
    moments = {
        "mismatch": path.mismatch.sum() / H, "rollout_tv": path.delta.sum() / H, "fixed_history_tv": path.f.sum() / H,
        "diverged": float(tau is not None), "entry": tau or 0, "exposure": (H - tau) / H if tau else 0.0,
        "occupation": path.mismatch[tau:].sum() / H if tau else 0.0, "saturation": (path.delta > THRESHOLD).mean(),
        "cohort": float(cohort), "long_agreement": float("a" * RUN in path.agreements()),
        "mismatch_after_agreement": float("am" in path.agreements()),
    }  # fmt: skip
    for r in range(4):
        places = [t for t in range(1, H + 1) if path.eos_set(t) == r]
        moments[f"eos_gap_{r}"] = sum(path.delta[t - 1] - path.f[t - 1] for t in places) / H
    for name, lags in (("early", EARLY), ("late", LATE)):
        steps = path.after(lags, path.delta, before_eos=True) if cohort else []
        moments[f"{name}_delta"] = float(np.mean(path.after(lags, path.delta))) if cohort else 0.0
        moments[f"{name}_pre_eos_steps"] = len(steps)
        moments[f"{name}_pre_eos_delta"] = sum(steps)
    for number, block in enumerate(BLOCKS, start=1):
        for name in ("delta", "f", "mismatch"):
            moments[f"block_{number}_{name}"] = float(np.mean([getattr(path, name)[t - 1] for t in block]))
    moments["prefix_mismatch"] = path.mismatch[: len(BLOCKS[0])].sum() / H
    moments["prefix_diverged"] = float(tau in BLOCKS[0])
    moments["prefix_eos_x"] = float(path.eos_x in BLOCKS[0])
    moments["prefix_eos_y"] = float(path.eos_y in BLOCKS[0])
    entered = tau or H
    moments["occupation_compensator"] = path.delta[entered:].sum() / H
    moments["exposure_compensator"] = sum((H - t) * path.delta[t - 1] for t in range(1, entered + 1)) / H
    moments["written"] = min(path.e_late, H) / H
    moments["written_exposure"] = max(min(path.e_late, H) - tau, 0) / H if tau else 0.0
    return moments


def profile_moments(path: Path) -> dict[str, np.ndarray]:
    first = np.array([float(t == path.tau) for t in range(1, H + 1)])
    lags = range(1, W.cohort_bound + 1)
    none = np.zeros(W.cohort_bound)
    return {
        "delta": path.delta,
        "f": path.f,
        "mismatch": path.mismatch.astype(float),
        "first_mismatch": first,
        "cohort_delta": np.array(path.after(lags, path.delta)) if path.in_cohort else none,
        "cohort_mismatch": np.array(path.after(lags, path.mismatch)) if path.in_cohort else none,
        "cohort_pre_eos": np.array([float(path.tau + j < path.e) for j in lags]) if path.in_cohort else none,
    }


RATES = {"mild": 0.06, "harsh": 0.45}


@pytest.fixture(scope="module")
def paths() -> dict[str, list[list[Path]]]:
    """action -> document -> replicates."""
    random = np.random.default_rng(11)
    return {action: [[Path(random, rate) for _ in range(K)] for _ in STRATA] for action, rate in RATES.items()}


@pytest.fixture(scope="module")
def moments(paths: dict[str, list[list[Path]]]) -> DocumentMoments:
    def mean(of: Any, name: str) -> np.ndarray:
        rows = [[np.mean([of(p)[name] for p in paths[a][d]], axis=0) for a in RATES] for d in range(len(STRATA))]
        return np.array(rows, dtype=float)

    return DocumentMoments(
        np.array([f"d{i}" for i in range(len(STRATA))]),
        np.array(STRATA),
        np.array([f"c{i}" for i in range(len(STRATA))]),
        tuple(RATES),
        W,
        {name: mean(scalar_moments, name) for name in SCALAR_MOMENTS},
        {name: mean(profile_moments, name) for name in POSITION_MOMENTS},
        {name: mean(profile_moments, name) for name in LAG_MOMENTS},
    )


@pytest.fixture(scope="module")
def pooled(moments: DocumentMoments) -> dict[str, dict[str, np.ndarray]]:
    """action (or 'contrast') -> quantity -> values over x, pooled over strata."""
    values = observed(moments, list(QUANTITIES), [("mild", "harsh")])
    result: dict[str, dict[str, np.ndarray]] = {"mild": {}, "harsh": {}, "contrast": {}}
    for name, value in values.items():
        subjects = ("mild", "harsh") if QUANTITIES[name].kind == "action" else ("contrast",)
        for i, subject in enumerate(subjects):
            result[subject][name] = value[0, i]
    return result


def weighted(paths: list[list[Path]], value: Any, among: Any = lambda _: True) -> float:
    """Return the weighted mean over trajectories, w_d / K each, among those that satisfy a condition."""
    pairs = [(WEIGHT[d] / K, p) for d, replicates in enumerate(paths) for p in replicates if among(p)]
    return sum(w * value(p) for w, p in pairs) / sum(w for w, _ in pairs)


@pytest.mark.parametrize("action", RATES)
def test_action_quantities_are_weighted_means_over_trajectories(
    action: str, paths: dict[str, list[list[Path]]], pooled: dict[str, dict[str, np.ndarray]]
) -> None:
    p, got = paths[action], pooled[action]

    def diverged(q: Path) -> bool:
        return q.tau is not None

    def cohort(q: Path) -> bool:
        return q.in_cohort

    def steps(lags: range) -> float:
        return weighted(p, lambda q: len(q.after(lags, q.delta, before_eos=True)) if q.in_cohort else 0)

    def strict(lags: range) -> float:
        total = weighted(p, lambda q: sum(q.after(lags, q.delta, before_eos=True)) if q.in_cohort else 0)
        return total / steps(lags)

    exposure = weighted(p, lambda q: (H - q.tau) / H if q.tau else 0)
    occupation = weighted(p, lambda q: q.mismatch[q.tau :].sum() / H if q.tau else 0)
    fraction = weighted(p, cohort)
    early = weighted(p, lambda q: np.mean(q.after(EARLY, q.delta)), cohort)
    late = weighted(p, lambda q: np.mean(q.after(LATE, q.delta)), cohort)
    expected = {
        "mismatch": weighted(p, lambda q: q.mismatch.mean()),
        "rollout_tv": weighted(p, lambda q: q.delta.mean()),
        "fixed_history_tv": weighted(p, lambda q: q.f.mean()),
        "occurrence": weighted(p, diverged) / H,
        "exposure": exposure,
        "written": weighted(p, lambda q: min(q.e_late, H) / H),
        "mismatch_written": weighted(p, lambda q: q.mismatch.sum()) / weighted(p, lambda q: min(q.e_late, H)),
        "exposure_written": weighted(p, lambda q: max(min(q.e_late, H) - q.tau, 0) if q.tau else 0)
        / weighted(p, lambda q: min(q.e_late, H)),
        "occupation": occupation,
        "mismatch_rate": occupation / exposure,
        "divergence_probability": weighted(p, diverged),
        "mean_entry": weighted(p, lambda q: q.tau, diverged),
        "saturation": weighted(p, lambda q: (q.delta > THRESHOLD).mean()),
        "cohort_fraction": fraction,
        "early": early,
        "late": late,
        "late_minus_early": late - early,
        "early_pre_eos": strict(EARLY),
        "late_pre_eos": strict(LATE),
        "late_minus_early_pre_eos": strict(LATE) - strict(EARLY),
        "early_pre_eos_fraction": steps(EARLY) / (len(EARLY) * fraction),
        "late_pre_eos_fraction": steps(LATE) / (len(LATE) * fraction),
        "long_agreement": weighted(p, lambda q: "aaa" in q.agreements(), cohort),
        "mismatch_after_agreement": weighted(p, lambda q: "am" in q.agreements(), cohort),
    }
    assert set(expected) == {n for n, q in QUANTITIES.items() if q.kind == "action" and q.axis is None}
    for name, value in expected.items():
        assert got[name] == pytest.approx([value], abs=1e-12), name


@pytest.mark.parametrize("action", RATES)
def test_profiles_are_weighted_means_over_trajectories(
    action: str, paths: dict[str, list[list[Path]]], pooled: dict[str, dict[str, np.ndarray]]
) -> None:
    p, got = paths[action], pooled[action]
    for t in range(1, H + 1):
        reached = weighted(p, lambda q, t=t: q.tau is None or q.tau >= t)
        first = weighted(p, lambda q, t=t: q.tau == t)
        expected = {
            "entry_cdf": weighted(p, lambda q, t=t: q.tau is not None and q.tau <= t),
            "survival": reached,
            "hazard": first / reached if reached else np.nan,
            "generation_delta": weighted(p, lambda q, t=t: q.delta[t - 1]),
            "generation_f": weighted(p, lambda q, t=t: q.f[t - 1]),
            "generation_mismatch": weighted(p, lambda q, t=t: q.mismatch[t - 1]),
        }
        for name, value in expected.items():
            assert got[name][t - 1] == pytest.approx(value, abs=1e-12, nan_ok=True), (name, t)
    for j in range(1, W.cohort_bound + 1):
        inside = {"among": lambda q: q.in_cohort}
        assert got["branch_delta"][j - 1] == pytest.approx(weighted(p, lambda q, j=j: q.delta[q.tau + j - 1], **inside))
        one = weighted(p, lambda q, j=j: q.mismatch[q.tau + j - 1], **inside)
        assert got["branch_mismatch"][j - 1] == pytest.approx(one)
        before = weighted(p, lambda q, j=j: q.tau + j < q.e, **inside)
        assert got["branch_pre_eos_fraction"][j - 1] == pytest.approx(before)
    for r in range(4):
        part = weighted(p, lambda q, r=r: sum((q.delta - q.f)[t - 1] for t in range(1, H + 1) if q.eos_set(t) == r) / H)
        assert got["eos_gap"][r] == pytest.approx(part)


def test_contrasts_are_action_minus_baseline(pooled: dict[str, dict[str, np.ndarray]]) -> None:
    a, b, c = pooled["mild"], pooled["harsh"], pooled["contrast"]
    assert c["gap"] == pytest.approx(b["mismatch"] - a["mismatch"])
    assert c["gap"] > 0  # the sign: more mismatches under the harsh action
    terms = ("occurrence", "exposure", "rate")
    assert sum(c[f"{term}_term"] for term in terms) == pytest.approx(c["gap"])
    assert sum(c[f"{term}_share"] for term in terms) == pytest.approx([1.0])
    bar = (a["mismatch_rate"] + b["mismatch_rate"]) / 2
    assert c["exposure_term"] == pytest.approx((b["exposure"] - a["exposure"]) * bar)
    assert c["history_gap"] == pytest.approx(c["rollout_tv_gap"] - c["fixed_history_gap"])
    assert c["pre_eos"] + c["eos_related"] == pytest.approx(c["history_gap"])
    assert c["eos_share"] == pytest.approx(c["eos_related"] / c["history_gap"])
    blocks = b["generation_block_delta"] - a["generation_block_delta"]
    assert c["generation_gap"] == pytest.approx(blocks)
    assert c["generation_gap_change"] == pytest.approx([blocks[2] - blocks[0]])
    differences = [name for name in QUANTITIES if name.endswith("_difference")]
    assert len(differences) == 14
    for name in differences:
        of = name.removesuffix("_difference")
        assert c[name] == pytest.approx(b[of] - a[of]), name


def test_supporting_rows_of_calibration(
    paths: dict[str, list[list[Path]]], pooled: dict[str, dict[str, np.ndarray]]
) -> None:
    """The paper's table of uncalibrated summaries: its differences are of the TV estimator of R."""
    c, first = pooled["contrast"], len(BLOCKS[0])
    flat = {action: weighted(paths[action], lambda q: q.mismatch[:first].mean()) for action in RATES}
    prefix = {action: weighted(paths[action], lambda q: scalar_moments(q)["prefix_mismatch"]) for action in RATES}
    assert c["flat_extrapolation_gap"] == pytest.approx([flat["harsh"] - flat["mild"]])
    assert c["flat_extrapolation_gap"] == pytest.approx([H / first * (prefix["harsh"] - prefix["mild"])])
    assert c["full_minus_fixed_history"] == pytest.approx(c["rollout_tv_gap"] - c["fixed_history_gap"])
    assert c["full_minus_flat_extrapolation"] == pytest.approx(c["rollout_tv_gap"] - c["flat_extrapolation_gap"])


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
        assert set(quantity.profile) <= POSITION_MOMENTS.keys() | LAG_MOMENTS.keys()
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
    fields = ("documents", "strata", "clusters", "actions", "windows", "scalars", "positions", "lags")
    return DocumentMoments(**({name: getattr(moments, name) for name in fields} | changes))


def test_messages(moments: DocumentMoments) -> None:
    def given(name: str, value: Any) -> dict[str, Any]:
        return {**moments.scalars, name: value}

    hole = moments.scalars["early_delta"].copy()
    hole[2, 1] = np.nan
    bad: list[tuple[dict[str, Any], str]] = [
        ({"scalars": given("mismach", hole)}, "no moment is named 'mismach'; did you mean 'mismatch'"),
        ({"scalars": {"diverged": hole}}, "the moment 'mismatch' is missing"),
        ({"scalars": given("entry", hole[:2])}, r"'entry' has shape \(2, 2\), not \(5, 2\)"),
        ({"scalars": given("early_delta", hole)}, "'early_delta' of document 'd2' under 'harsh' is null where"),
        ({"scalars": given("entry", np.full((5, 2), np.inf))}, "infinite"),
        ({"positions": {"delta": moments.positions["delta"]}}, "the moment 'f' is missing"),
        ({"strata": np.array(["s"])}, "strata has shape"),
        ({"strata": np.array(["pooled"] * 5)}, "cannot be named 'pooled'"),
        ({"documents": np.array(["d"] * 5)}, "document 'd' is given twice"),
        ({"actions": ("mild", "mild")}, "action 'mild' is given twice"),
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
        (Endpoint("saturation", "mild", x=1), "x must be one of null"),
    ):
        with pytest.raises(InputError, match=message):
            endpoint.check(tuple(RATES), ("long", "short"), W)
    assert str(Endpoint("gap", "harsh", "mild")) == "gap of harsh against mild (pooled)"


def test_replicate_means_are_document_moments(paths: dict[str, list[list[Path]]], moments: DocumentMoments) -> None:
    values = {}
    for name in SCALAR_MOMENTS:
        rows = [[[scalar_moments(p)[name] for p in paths[a][d]] for a in RATES] for d in range(len(STRATA))]
        values[name] = np.array(rows, dtype=float)
    replicates = ReplicateMoments(
        moments.documents, moments.strata, moments.clusters, moments.actions, moments.windows, values
    )
    means = replicates.document_means()
    for name in SCALAR_MOMENTS:
        np.testing.assert_allclose(means.scalars[name], moments.scalars[name], atol=1e-15)
