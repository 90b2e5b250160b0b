"""Calibration: the ridge against scikit-learn, selection, verdicts and errors on constructed data, rows in a store."""

from __future__ import annotations

import datetime as dt
import math
import random as plain_random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fixtures.awkward_logs import Log, LogPlan, add_study
from fixtures.stored_units import derive
from fixtures.swrb_events import unit
from fixtures.table_rows import add_rows
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from kvdrift.flows.estimate.moments import document_moments
from kvdrift.flows.estimate.stored import calibrate_study
from kvdrift.flows.plan.frozen_plan import FrozenPlan
from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError
from kvdrift.schema.moments import SCALAR_MOMENTS
from kvdrift.schema.tables import TABLES
from kvdrift.schema.windows import Windows
from kvdrift.sql.catalog import open_views
from kvdrift.stats.bootstrap import Request, estimate, observed
from kvdrift.stats.calibration import (
    CANDIDATES,
    OBSERVATIONS,
    Calibration,
    Sample,
    calibrate,
    cross_validated_mse,
    decide,
    folds,
    predict,
)
from kvdrift.stats.endpoints import Endpoint
from kvdrift.stats.moments import DocumentMoments

if TYPE_CHECKING:
    from pathlib import Path

SIX = [f"{source}-{length}K" for source in ("HELMET", "RULER") for length in (4, 8, 16)]
PAIR = {"baseline": "half", "action": "512"}
PREFIX = OBSERVATIONS["positions"].features


def made(strata: list[str], clusters: list[str] | None = None, name: str = "d", **scalars: Any) -> DocumentMoments:
    """Return moments of ``half`` and ``512``: the given ones as [D, 2] or [2], all others 0."""
    count = len(strata)
    documents = [f"{name}{i}" for i in range(count)]
    values = {moment: np.broadcast_to(scalars.get(moment, 0.0), (count, 2)) for moment in SCALAR_MOMENTS}
    return DocumentMoments(documents, strata, clusters or documents, ("half", "512"), Windows.of(128), values, {}, {})


def noisy(seed: int, per_stratum: int = 12, noise: float = 0.02, shift: float = 0.0, **changes: Any) -> DocumentMoments:
    """Cell means and noise for R; observations unrelated to it unless ``changes`` say otherwise."""
    random = np.random.default_rng(seed)
    strata = [name for name in SIX for _ in range(per_stratum)]
    cells = np.repeat(np.linspace(0.2, 0.5, 12).reshape(6, 2)[:, ::-1], per_stratum, axis=0)
    cells = cells + np.array([0.0, 0.25 + shift])
    target = cells + noise * random.standard_normal(cells.shape)
    scalars = {moment: random.random(cells.shape) for moment in ("fixed_history_tv", "block_1_mismatch", *PREFIX)}
    scalars = {"mismatch": target} | scalars | {n: c(target, random) for n, c in changes.items()}
    return made(strata, name=f"{seed}-", **scalars)


def verdicts(rows: tuple[Calibration, ...]) -> dict[tuple[str, str], Calibration]:
    return {(row.observation, row.candidate): row for row in rows}


# The ridge ------------------------------------------------------------------------------------------------------------


def sample(seed: int, count: int, features: int, strata: tuple[str, ...] = ("a", "b", "c")) -> Sample:
    random = np.random.default_rng(seed)
    columns = random.normal(3.0, [1e-3, 1.0, 40.0, 1.0][:features], (count, 2, features))
    names = np.array([strata[i % len(strata)] for i in range(count)])
    target = 0.5 + 0.05 * random.standard_normal((count, 2))
    return Sample(names, np.array([f"c{i}" for i in range(count)]), target, columns, target)


@pytest.mark.parametrize("features", [1, 4])
@pytest.mark.parametrize("strata", [("only",), ("a", "b", "c")])
def test_the_ridge_is_that_of_scikit_learn(features: int, strata: tuple[str, ...]) -> None:
    training, unseen = sample(1, 23, features, strata), sample(2, 11, features, (*strata, "unknown"))
    training.features[:, :, 0] = 0.1  # a feature without spread, as sums over an empty window are

    def rows(of: Sample) -> np.ndarray:
        stratum = np.repeat(of.strata, 2)[:, None]
        action = np.tile(["half", "512"], len(of.strata))[:, None]
        return np.concatenate([of.features.reshape(-1, features), stratum, action], axis=1, dtype=object)

    columns = ColumnTransformer([
        ("features", StandardScaler(), list(range(features))),
        ("indicators", OneHotEncoder(handle_unknown="ignore"), [features, features + 1]),
    ])  # fmt: skip
    reference = make_pipeline(columns, Ridge(alpha=10)).fit(rows(training), training.target.reshape(-1))
    unseen.features[:, :, 0] = 0.1
    expected = reference.predict(rows(unseen)).reshape(-1, 2)
    assert ((expected > 0) & (expected < 1)).all()
    np.testing.assert_allclose(predict("ridge", training, unseen), expected, rtol=0, atol=1e-9)


def test_each_prediction_is_clipped_before_the_contrast() -> None:
    """Features far outside the training range: unclipped the contrast would exceed 1."""
    strata = ["s"] * 40
    feature = np.linspace(0.3, 0.7, 80).reshape(40, 2)
    development = made(strata, mismatch=feature, fixed_history_tv=feature)
    evaluation = made(strata, name="e", mismatch=[0.5, 0.5], fixed_history_tv=[-3.0, 4.0])
    ridge = verdicts(calibrate(development, evaluation, **PAIR, draws=50, seed=1))["fixed_history", "ridge"]
    assert (ridge.predicted_gap, ridge.error) == pytest.approx((1.0, -1.0))


# Selection ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("winner", "changes"),
    [
        ("stratum_action_mean", {}),
        ("flat", {"fixed_history_tv": lambda r, _: r, "block_1_mismatch": lambda r, _: r}),
        (
            "ridge",
            {
                name: lambda r, chance: (r - 0.1) / 4 + 1e-3 * chance.random(r.shape)
                for name in (*PREFIX, "fixed_history_tv")
            },
        ),
    ],
)
def test_the_best_candidate_is_selected(winner: str, changes: dict[str, Any]) -> None:
    """R varies within cells by .15: the mean misses it, flat is right if it equals R, and ridge if it is linear."""
    noise = 0.02 if winner == "stratum_action_mean" else 0.15
    rows = calibrate(noisy(1, noise=noise, **changes), noisy(2, noise=noise, **changes), **PAIR, draws=50, seed=1)
    for observation in OBSERVATIONS:
        own = {row.candidate: row for row in rows if row.observation == observation}
        assert tuple(own) == CANDIDATES
        assert [name for name, row in own.items() if row.selected] == [winner]
        assert min(own, key=lambda name: own[name].cross_validated_mse) == winner
        assert min(own, key=lambda name: own[name].rmse) == winner  # what was selected is best on new documents too


def test_cross_validation_against_loops() -> None:
    """Held-out contrasts by explicit loops, cell means as plain averages, strata of unequal sizes."""
    strata = ["a"] * 9 + ["b"] * 4
    random = np.random.default_rng(8)
    target = random.random((13, 2))
    clusters = [f"q{i // 2}" for i in range(13)]  # q4 holds a document of each stratum
    fold = folds(np.array(strata), np.array(clusters))
    total = 0.0
    for i, stratum in enumerate(strata):
        others = [j for j in range(13) if fold[j] != fold[i] and strata[j] == stratum]
        predicted = [sum(target[j, side] for j in others) / len(others) for side in (0, 1)]
        weight = 1 / (2 * strata.count(stratum))
        total += weight * (target[i, 1] - target[i, 0] - predicted[1] + predicted[0]) ** 2
    given = Sample(np.array(strata), np.array(clusters), target, target[:, :, None], target)
    assert cross_validated_mse("stratum_action_mean", given) == pytest.approx(total, abs=1e-14)
    assert cross_validated_mse("flat", given) == 0


def test_folds_keep_clusters_whole_and_spread_strata() -> None:
    strata = np.array([name for name in SIX for _ in range(6)])
    own = np.array([f"d{i}" for i in range(36)])
    fold = folds(strata, own)
    assert {(f, s) for f, s in zip(fold.tolist(), strata.tolist(), strict=True)} == {
        (f, s) for f in range(6) for s in SIX
    }
    assert not np.array_equal(fold, np.tile(np.arange(6), 6)), "dealt by hash, not by name"
    random = np.random.default_rng(3)
    for _ in range(20):
        count = int(random.integers(1, 40))
        strata = random.choice(SIX, count)
        clusters = random.choice([f"c{i}" for i in range(20)], count)
        fold = folds(strata, clusters)
        order = random.permutation(count)
        assert (folds(strata[order], clusters[order]) == fold[order]).all()
        of_cluster = dict(zip(clusters.tolist(), fold.tolist(), strict=True))
        assert all(of_cluster[c] == f for c, f in zip(clusters.tolist(), fold.tolist(), strict=True))
        sizes = np.bincount(list(of_cluster.values()))
        assert len(sizes) == min(6, len(of_cluster))
        assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize(("clusters", "number"), [(["q", "q", "q"], 1), (["q", "q", "r"], 2), (["q", "r", "s"], 3)])
def test_fewer_than_six_clusters(clusters: list[str], number: int) -> None:
    assert folds(np.array(["s"] * 3), np.array(clusters)).max() + 1 == number
    development = made(["s"] * 3, clusters, mismatch=[[0.1, 0.2], [0.2, 0.4], [0.1, 0.3]])
    rows = calibrate(development, noisy(2), **PAIR, draws=20, seed=1)
    assert sum(row.selected for row in rows) == (0 if number == 1 else 2)
    assert all(math.isnan(row.cross_validated_mse) == (number == 1) for row in rows)
    assert all(row.decision for row in rows)


# Verdicts on evaluation documents -------------------------------------------------------------------------------------


def test_the_margin_belongs_to_equivalence() -> None:
    assert decide(-0.02, 0.02, 0.02) == "equivalent"
    assert decide(-0.0201, 0.02, 0.02) == decide(0.02, 0.03, 0.02) == decide(-1, 1, 0.02) == "unresolved"
    assert decide(0.0201, 0.03, 0.02) == decide(-0.03, -0.0201, 0.02) == "different"
    assert decide(math.nan, 0.03, 0.02) is None


def test_errors_by_hand() -> None:
    """Cell means: in a .1 and .3, in b .2 and .6. Errors: in a +.1 and -.3, in b +.2; weights 1/4, 1/4, 1/2."""
    development = made(["a", "a", "b"], mismatch=[[0.0, 0.3], [0.2, 0.3], [0.2, 0.6]])
    evaluation = made(["a", "b", "a"], mismatch=[[0.1, 0.4], [0.1, 0.7], [0.5, 0.4]])
    row = verdicts(calibrate(development, evaluation, **PAIR, draws=20, seed=1))["fixed_history", "stratum_action_mean"]
    assert row.gap == pytest.approx(0.3 / 4 + 0.6 / 2 - 0.1 / 4)
    assert row.predicted_gap == pytest.approx((0.2 + 0.4) / 2)
    assert row.error == pytest.approx(0.1 / 4 - 0.3 / 4 + 0.2 / 2)
    assert row.mae == pytest.approx(0.1 / 4 + 0.3 / 4 + 0.2 / 2)
    assert row.rmse == pytest.approx(math.sqrt(0.01 / 4 + 0.09 / 4 + 0.04 / 2))


def test_the_interval_is_that_of_the_bootstrap() -> None:
    """Flat on F has the error gap - fixed_history_gap, which is also an estimate if both estimators of R are equal."""
    evaluation = noisy(2, per_stratum=5)
    values = {name: value.copy() for name, value in evaluation.scalars.items()}
    values["rollout_tv"] = values["mismatch"]
    for value in values.values():
        value[3, 0] = value[11, 1] = value[20] = np.nan  # documents that an action lacks
    clusters = [f"q{i % 5}" if i < 10 else f"d{i}" for i in range(30)]  # two strata share their clusters
    evaluation = DocumentMoments(
        evaluation.documents, evaluation.strata, clusters, ("half", "512"), evaluation.windows, values, {}, {}
    )
    flat = verdicts(calibrate(noisy(1), evaluation, **PAIR, draws=600, seed=9, alpha=0.2))["fixed_history", "flat"]
    quantity = "full_minus_fixed_history"
    estimates = estimate(evaluation, draws=600, seed=9, request=Request(0.95), quantities=[quantity])
    row = estimates.row(Endpoint(quantity, "512", "half"))
    assert flat.documents == row["documents"] == 27
    assert (flat.error, flat.low, flat.high) == pytest.approx((row["estimate"], row["low"], row["high"]), abs=1e-12)
    assert (flat.level, flat.margin, flat.decision) == (0.95, 0.02, decide(flat.low, flat.high, 0.02))


# What is undefined ----------------------------------------------------------------------------------------------------


def test_an_empty_window_leaves_the_flat_extrapolation_undefined() -> None:
    nothing = {name: lambda r, _: np.zeros_like(r) for name in PREFIX}
    nothing["block_1_mismatch"] = lambda r, _: np.full_like(r, np.nan)
    rows = verdicts(calibrate(noisy(1, **nothing), noisy(2, **nothing), **PAIR, draws=50, seed=1))
    flat = rows["positions", "flat"]
    assert np.isnan([flat.error, flat.predicted_gap, flat.low, flat.mae, flat.rmse, flat.cross_validated_mse]).all()
    assert flat.decision is None
    assert not flat.selected
    assert flat.gap == rows["positions", "ridge"].gap
    assert rows["positions", "stratum_action_mean"].selected
    assert not math.isnan(rows["positions", "ridge"].error)


def test_a_stratum_that_development_lacks_takes_the_mean_of_the_others() -> None:
    development = made(["a", "a", "b"], mismatch=[[0.1, 0.3], [0.3, 0.3], [0.6, 0.8]])
    evaluation = made(["new", "b"], mismatch=[[0.0, 0.0], [0.0, 0.0]])
    row = verdicts(calibrate(development, evaluation, **PAIR, draws=20, seed=1))["positions", "stratum_action_mean"]
    assert row.predicted_gap == pytest.approx(((0.55 - 0.4) + (0.8 - 0.6)) / 2)


def test_nothing_to_compare() -> None:
    apart = made(["a", "a"])
    values = {name: np.where(np.eye(2, dtype=bool), value, np.nan) for name, value in apart.scalars.items()}
    apart = DocumentMoments(apart.documents, apart.strata, apart.clusters, apart.actions, apart.windows, values, {}, {})
    assert calibrate(apart, noisy(2), **PAIR, draws=10, seed=1) == ()
    assert calibrate(noisy(1), apart, **PAIR, draws=10, seed=1) == ()
    for change, message in (({"action": "521"}, "no action is named '521'; did you mean '512'"),):
        with pytest.raises(InputError, match=message):
            calibrate(noisy(1), noisy(2), **({**PAIR, "draws": 10, "seed": 1} | change))


# In a store -----------------------------------------------------------------------------------------------------------


def stored_log(location: Path, splits: tuple[str, ...]) -> Store:
    """A store with simulated trajectories of three actions and a control, derived."""
    log = Log()
    plan = LogPlan(
        "s", "m", 16, {"x": 4, "y": 3}, ("full", "half", "512", "recent"), 4, splits=splits, missing=0.0
    )  # fmt: skip
    add_study(log, plan, plain_random.Random(5))  # noqa: S311 - test data
    store = Store.create(location)
    add_rows(store, "documents", *log.documents)
    units: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in log.events:
        units.setdefault((event["doc"], event["action"]), []).append(event)
    store.append_units([unit(events, "plain", 16) for events in units.values()])
    derive(store)
    return store


def frozen(**changes: Any) -> FrozenPlan:
    content = {"baseline": "half", "alpha": 0.05, "seed": 3, "draws": 400, "actions": ["half", "512"]}
    content |= {"calibration": {"margin": 0.02}, "interval": "percentile"} | changes
    return FrozenPlan("s", "m", "f" * 64, dt.datetime(2026, 1, 2, tzinfo=dt.UTC), content)


def test_a_study_is_calibrated_and_the_view_has_the_newest_rows(tmp_path: Path) -> None:
    store = stored_log(tmp_path / "store", ("development", "evaluation"))
    other = frozen(draws=200, calibration={"margin": 0.03})
    with open_views(store) as views:
        moments = {split: document_moments(views, "s", "m", split) for split in ("development", "evaluation")}
        fewer = {split: one.of_actions(["half", "512"]) for split, one in moments.items()}
        assert calibrate_study(store, views, frozen(), 6, fewer) == 2 * 3
        assert calibrate_study(store, views, frozen(), 7, moments) == 2 * 3, "of the action that was added"
        assert calibrate_study(store, views, frozen(), 7, moments) == 0, "nothing changed"
        assert store.read("calibration").num_rows == 6 + 12
        assert calibrate_study(store, views, other, 8, moments, ("half",)) == 12
        gaps = {
            row["action"]: row
            for row in views.rows("contrasts", stratum="pooled", split="evaluation", baseline="half").to_pylist()
        }
        history = {
            row["action"]: row["fixed_history_tv"]
            for row in views.rows("decomposition", stratum="pooled", split="evaluation").to_pylist()
        }
    assert store.read("calibration").num_rows == 6 + 12 + 12
    with open_views(store) as views:
        rows = views.rows("calibration").to_pylist()
    stored = [row for row in store.read("calibration").to_pylist() if row["events_version"] == 8]
    key = TABLES["calibration"].key
    assert sorted(rows, key=lambda row: [row[k] for k in key]) == sorted(stored, key=lambda row: [row[k] for k in key])
    assert {(row["action"], row["status"]) for row in rows} == {("512", "seen"), ("recent", "exploratory")}
    assert {(row["baseline"], row["plan_sha256"], row["draws"]) for row in rows} == {("half", "f" * 64, 200)}
    for action in ("512", "recent"):
        given = {
            "baseline": "half",
            "action": action,
            "draws": 200,
            "seed": 3,
            "margin": 0.03,
            "interval": "percentile",
        }
        expected = verdicts(calibrate(moments["development"], moments["evaluation"], **given))
        for row in (row for row in rows if row["action"] == action):
            judged = expected[row["observation"], row["candidate"]]
            assert {name: row[name] for name in vars(judged)} == vars(judged)
            assert row["gap"] == pytest.approx(gaps[action]["gap"], abs=1e-12)
            if (row["observation"], row["candidate"]) == ("fixed_history", "flat"):
                assert row["predicted_gap"] == pytest.approx(history[action] - history["half"], abs=1e-12)
            if (row["observation"], row["candidate"]) == ("positions", "flat"):
                pair = [("half", action)]
                flat = observed(moments["evaluation"], ["flat_extrapolation_gap"], pair)["flat_extrapolation_gap"]
                assert row["predicted_gap"] == pytest.approx(flat[0, 0, 0], abs=1e-12)


@pytest.mark.parametrize("split", ["development", "evaluation"])
@pytest.mark.by_default("development")
def test_a_study_with_one_split_is_not_calibrated(tmp_path: Path, split: str) -> None:
    store = stored_log(tmp_path / "store", (split,))
    with open_views(store) as views:
        moments = {split: document_moments(views, "s", "m", split)}
        assert calibrate_study(store, views, frozen(), 1, moments) == 0
    assert store.read("calibration").num_rows == 0
