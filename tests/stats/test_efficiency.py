"""Estimates of residual branching: plain loops over the same draws, closed forms, the SQL views, a store analyzed."""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from fixtures.swrb_events import Row, drawn_unit, random_laws
from fixtures.table_rows import add_rows

from kvdrift.flows.estimate import estimation
from kvdrift.flows.estimate.moments import branching_moments
from kvdrift.flows.estimate.stored import analyze_stored
from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError
from kvdrift.schema.estimate_tables import RESULTS
from kvdrift.schema.tables import PLAIN, SWRB
from kvdrift.sql.catalog import open_views
from kvdrift.stats.bootstrap import COLUMNS
from kvdrift.stats.clusters import ClusterDraws
from kvdrift.stats.efficiency import (
    MEASURED,
    BranchingMoments,
    estimate_branching,
    observed_branching,
    resample_branching,
)
from kvdrift.stats.endpoints import Endpoint
from kvdrift.stats.quantities import BRANCHING_QUANTITIES, QUANTITIES, SIMULTANEOUS_GAP
from kvdrift.transforms.pipeline import run_derivation

STRATA = ["a"] * 7 + ["b"] * 4
CLUSTERS = ["q0", "q0", "q1", "q2", "q3", "q4", "q5", "r0", "r0", "r1", "r2"]


def moments(**changes: Any) -> BranchingMoments:
    """11 documents in 2 strata, 2 actions; some documents without one of the estimators, some with one replicate."""
    random = np.random.default_rng(3)
    values = {kind: {name: random.uniform(0.1, 1.0, (11, 2)) for name in MEASURED} for kind in ("plain", "swrb")}
    for name in MEASURED:
        values["swrb"][name][2, 0] = np.nan  # no SWRB replicates
        values["plain"][name][9, 1] = np.nan  # no coupled pairs
    values["swrb"]["risk_variance"][5, 1] = np.nan  # one replicate
    fields: dict[str, Any] = {
        "documents": np.array([f"doc {i:02}" for i in range(11)]),
        "strata": np.array(STRATA),
        "clusters": np.array(CLUSTERS),
        "actions": ("rare", "often"),
    }
    return BranchingMoments(**fields | values | changes)


def loop(given: BranchingMoments, action: int, stratum: str, counts: list[int]) -> dict[str, float]:
    """Return every quantity of one weighting of the documents, from sums over documents; NaN if undefined."""

    def pooled(kind: str, name: str, support: str) -> float:
        means = []
        for one in sorted({*STRATA}) if stratum == "pooled" else [stratum]:
            own = [
                (count, (given.plain if kind == "plain" else given.swrb)[name][d, action])
                for d, count in enumerate(counts)
                if given.strata[d] == one and has(d, support)
            ]
            if own:
                total = sum(count for count, _ in own)
                means.append(sum(count * value for count, value in own) / total if total else math.nan)
        return sum(means) / len(means) if means else math.nan

    def has(d: int, support: str) -> bool:
        swrb, plain = given.swrb, given.plain
        if support == "branched":
            return not math.isnan(swrb["risk"][d, action])
        return not math.isnan(swrb["risk_variance"][d, action] + plain["risk_variance"][d, action])

    def divide(above: float, below: float) -> float:
        return above / below if below else math.nan

    variance = divide(pooled("plain", "risk_variance", "both"), pooled("swrb", "risk_variance", "both"))
    evaluations = divide(pooled("swrb", "evaluations", "both"), pooled("plain", "evaluations", "both"))
    seconds = divide(pooled("swrb", "seconds", "both"), pooled("plain", "seconds", "both"))
    return {
        "swrb_mismatch": pooled("swrb", "risk", "branched"),
        "swrb_occurrence": pooled("swrb", "occurrence", "branched"),
        "swrb_occupation": pooled("swrb", "occupation", "branched"),
        "swrb_divergence_probability": pooled("swrb", "divergence_probability", "branched"),
        "plain_mismatch": pooled("plain", "risk", "branched"),
        "plain_variance": pooled("plain", "risk_variance", "both"),
        "swrb_variance": pooled("swrb", "risk_variance", "both"),
        "plain_evaluations": pooled("plain", "evaluations", "both"),
        "swrb_evaluations": pooled("swrb", "evaluations", "both"),
        "plain_seconds": pooled("plain", "seconds", "both"),
        "swrb_seconds": pooled("swrb", "seconds", "both"),
        "variance_ratio": variance,
        "evaluation_ratio": evaluations,
        "second_ratio": seconds,
        "efficiency": divide(variance, evaluations),
        "efficiency_in_seconds": divide(variance, seconds),
    }


def test_every_draw_is_a_plain_loop_over_its_documents() -> None:
    given = moments()
    draws = resample_branching(given, draws=300, seed=8)
    counts = ClusterDraws(given.strata, given.clusters).counts(8, 0, 300).astype(int).tolist()
    undefined = 0
    for i in range(0, 300, 7):
        for row, stratum in enumerate(("pooled", "a", "b")):
            for action in (0, 1):
                expected = loop(given, action, stratum, counts[i])
                assert set(expected) == set(draws)
                for name, value in expected.items():
                    # Sums of 11 numbers in another order.
                    assert draws[name][i, row, action] == pytest.approx(value, rel=1e-13, nan_ok=True), name
                    undefined += math.isnan(value)
    assert undefined > 0
    points = observed_branching(given)
    for row, stratum in enumerate(("pooled", "a", "b")):
        for action in (0, 1):
            for name, value in loop(given, action, stratum, [1] * 11).items():
                assert points[name][row, action] == pytest.approx(value, rel=1e-13, nan_ok=True), name


def test_an_action_has_the_same_bits_alone() -> None:
    given = moments()
    whole = pa.table(estimate_branching(given, draws=300, seed=1).columns)
    for action in given.actions:
        alone = pa.table(estimate_branching(given.of_actions([action]), draws=300, seed=1).columns)
        assert alone.equals(whole.filter(pc.equal(whole["action"], action))), action


def test_rows_fit_the_results_table_and_count_their_documents() -> None:
    result = estimate_branching(moments(), draws=100, seed=1)
    kept = [RESULTS.schema.field(name) for name in COLUMNS]
    table = pa.table(result.columns, schema=pa.schema(kept))
    for column, spec in zip(table.columns, kept, strict=True):
        assert spec.nullable or column.null_count == 0, spec.name
    assert table.num_rows == len(BRANCHING_QUANTITIES) * 3 * 2
    counts = {(row["quantity"], row["action"], row["stratum"]): row["documents"] for row in table.to_pylist()}
    assert counts["swrb_mismatch", "rare", "pooled"] == 10
    assert counts["swrb_mismatch", "often", "pooled"] == 11
    assert counts["efficiency", "rare", "a"] == 6
    assert counts["efficiency", "often", "pooled"] == 9


def test_what_is_unknown_is_null_and_what_is_absent_has_no_row() -> None:
    given = moments()
    swrb = {name: value.copy() for name, value in given.swrb.items()}
    plain = {name: value.copy() for name, value in given.plain.items()}
    for name in MEASURED:
        swrb[name][7:, 1] = np.nan  # the second action was not branched in stratum b
    plain["seconds"][0, 0] = np.nan  # a unit that does not say its time
    swrb["risk_variance"][:, 1] = np.where(np.isnan(swrb["risk_variance"][:, 1]), np.nan, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = estimate_branching(moments(plain=plain, swrb=swrb), draws=100, seed=1)
    with pytest.raises(InputError, match=r"no estimate of swrb_mismatch of often \(b\)"):
        result.row(Endpoint("swrb_mismatch", "often", stratum="b"))
    for name, action, stratum, known in (
        ("second_ratio", "rare", "pooled", False),
        ("second_ratio", "rare", "b", True),
        ("evaluation_ratio", "rare", "pooled", True),
        ("variance_ratio", "often", "pooled", False),  # nothing is divided by a variance of 0
        ("efficiency", "often", "a", False),
        ("plain_mismatch", "often", "a", True),
    ):
        row = result.row(Endpoint(name, action, stratum=stratum))
        assert (row["estimate"] is not None) is known, name
        assert (row["low"] is not None) is known, name
        assert (row["high"] is not None) is known, name


def test_messages() -> None:
    given = moments()
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: moments(plain={}), "plain: the moment 'divergence_probability' is missing"),
        (lambda: moments(plain=given.plain | {"rsk": given.plain["risk"]}), "plain: the moment 'rsk' is unknown"),
        (lambda: moments(actions=("rare", "rare")), "action 'rare' is given twice"),
    ]
    for call, message in cases:
        with pytest.raises(InputError, match=message) as error:
            call()
        assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------------- a whole store


def branched_units(horizon: int = 5) -> tuple[list[Row], list[Any]]:
    """Documents of two strata, and units of both estimators: one action rarely diverges, the other nearly always."""
    chance = np.random.default_rng(11)
    documents, units = [], []
    for number in range(6):
        names = {"study": "s", "model": "m", "doc": f"d{number}"}
        documents.append(names | {"stratum": "xy"[number % 2], "cluster": f"c{number // 4}"})
        for action, apart in (("rare", 0.1), ("often", 0.9)):
            laws = random_laws(chance, horizon, apart=apart)
            for estimator in (PLAIN, SWRB):
                if (number, action, estimator) == (5, "often", SWRB):
                    continue
                made = drawn_unit(names | {"action": action}, estimator, laws, chance, range(5))
                rows = made.events.num_rows
                made.record.update(pair_evaluations=rows, decode_seconds=0.25 * rows)
                units.append(made)
    return documents, units


@pytest.fixture(scope="module")
def branched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with events of both estimators, derived and not analyzed; tests that write to it take a copy."""
    store = Store.create(tmp_path_factory.mktemp("branched") / "store")
    documents, units = branched_units()
    add_rows(store, "documents", *documents)
    store.append_units(units)
    run_derivation(store.location)
    return Path(store.location)


def test_estimates_are_the_views_numbers(branched: Path) -> None:
    with open_views(Store.open(branched)) as views:
        given = branching_moments(views, "s", "m", "evaluation")
        assert given is not None
        points = observed_branching(given)
        rows = {
            (view, row["stratum"], row["action"]): row
            for view in ("swrb_risk", "swrb_efficiency")
            for row in views.rows(view, study="s", model="m").to_pylist()
            if row.get("doc") is None
        }
        compared = 0
        for name, quantity in BRANCHING_QUANTITIES.items():
            if quantity.view is None:
                continue
            for i, stratum in enumerate(("pooled", "x", "y")):
                for j, action in enumerate(given.actions):
                    expected = rows[quantity.view, stratum, action][quantity.column]
                    # Means in another order; a variance of 5 replicates cancels some digits.
                    assert points[name][i, j] == pytest.approx(expected, rel=1e-9), (name, stratum, action)
                    compared += 1
        assert compared == 10 * 3 * 2
        assert branching_moments(views, "s", "m", "development") is None


def test_an_analysis_appends_them_in_one_commit(
    branched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were there two commits, a kill in between would leave an analysis that counts as done and lacks a half."""
    monkeypatch.setattr(estimation, "EXPLORATORY_DRAWS", 150)
    shutil.copytree(branched, tmp_path / "store")
    store = Store.open(tmp_path / "store")
    before = store.version("results")
    count = analyze_stored(store, "s", "m")
    assert store.version("results") == before + 1
    results = store.read("results").to_pylist()
    assert len(results) == count
    names = {row["quantity"] for row in results}
    assert names == {*QUANTITIES, *BRANCHING_QUANTITIES, SIMULTANEOUS_GAP}
    own = [row for row in results if row["quantity"] in BRANCHING_QUANTITIES]
    assert {row["status"] for row in own} == {"exploratory"}
    assert {row["draws"] for row in own} == {150}
    assert {row["events_version"] for row in own} == {store.version("events")}
    documents = {(row["action"], row["stratum"]): row["documents"] for row in own if row["quantity"] == "efficiency"}
    assert documents["often", "pooled"] == 5
    assert documents["rare", "pooled"] == 6
    assert analyze_stored(store, "s", "m") == 0
