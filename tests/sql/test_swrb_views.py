"""The views of residual branching over a real store: from events through the derivation, against raw-event loops.

That they equal their definitions on damaged logs too, and keep their contracts, is checked with all views
(``test_views``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from fixtures.awkward_logs import Log, Row, declared_study, document, number_events
from fixtures.branched_logs import SWRB_LOGS, branched_log
from fixtures.swrb_events import Laws, plain_replicate, random_laws, swrb_replicate, unit
from oracles.coupled_paths import Analysis
from oracles.swrb_definitions import SWRB_EVALUATIONS, swrb_efficiency

from log.store import Store
from schema.tables import TABLES
from sql.catalog import Views, open_views
from sql.contracts import contracts
from transforms.pipeline import run_derivation

ACTION = {"study": "s", "model": "m", "action": "a"}


def stored(folder: Path, log: Log) -> Store:
    """A store of the log's events, one unit per document, action and estimator, derived by the pipeline."""
    store = Store.create(folder)
    for name in ("documents", "studies", "exact_values"):
        store.append_rows(name, pa.Table.from_pylist(getattr(log, name), schema=TABLES[name].schema))
    horizon = {(row["study"], row["model"]): row["horizon"] for row in log.studies}
    groups: dict[tuple[str, str, str, str, str], list[Row]] = {}
    for row in log.events:
        estimator = "plain" if row["kind"] == "coupled" else "swrb"
        groups.setdefault((row["study"], row["model"], row["doc"], row["action"], estimator), []).append(row)
    store.append_units(
        [
            unit(rows, estimator, horizon[study, model], pair_evaluations=len(rows), decode_seconds=0.25 * len(rows))
            for (study, model, _, _, estimator), rows in groups.items()
        ]
    )
    run_derivation(store.location)
    return store


def test_from_events_through_the_derivation_to_every_view(tmp_path: Path) -> None:
    log = branched_log(6, 3, damaged=False)
    store = stored(tmp_path, log)
    log.units = store.units().to_pylist()
    analysis = Analysis(number_events(log))
    with open_views(store) as views:
        for view, definition in SWRB_EVALUATIONS.items():
            grain = contracts()[view].grain
            defined = {tuple(row[name] for name in grain): row for row in definition(analysis)}
            found = {tuple(row[name] for name in grain): row for row in views.rows(view).to_pylist()}
            assert set(found) == set(defined) != set()
            for key, row in defined.items():
                # Sums of at most 30 fractions in another order; a ratio of variances, relatively.
                assert found[key] == {
                    name: pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, float) else value
                    for name, value in row.items()
                }, (view, key)


def without_eos(laws: Laws) -> Laws:
    p, q = ([np.append(law[:3] / law[:3].sum(), 0.0) for law in side] for side in (laws.p, laws.q))
    return Laws(p, q)


@pytest.fixture(scope="module")
def memoryless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Views, list[Laws]]]:
    """Four documents in two strata whose laws forget their history, 60 replicates by either estimator, horizon 6."""
    chance = np.random.default_rng(4)
    log = Log(studies=[declared_study({"study": "s", "model": "m"}, 6)])
    all_laws = []
    for number, stratum in enumerate(("x", "x", "x", "y")):
        laws = without_eos(random_laws(chance, 6, apart=0.4))
        all_laws.append(laws)
        doc = f"d{number}"
        log.documents.append(document({"study": "s", "model": "m"}, doc, "evaluation", stratum))
        risk = math.fsum(deficits(laws)) / 6
        log.exact_values.append(
            {**ACTION, "action_revision": 0, "doc": doc, "quantity": "mismatch", "x": None, "value": risk}
        )
        for simulate in (plain_replicate, swrb_replicate):
            log.events += [
                row for k in range(60) for row in simulate({**ACTION, "doc": doc, "replicate": k}, laws, chance)
            ]
    with open_views(stored(tmp_path_factory.mktemp("memoryless"), log)) as views:
        yield views, all_laws


def deficits(laws: Laws) -> list[float]:
    return [0.5 * float(np.abs(p - q).sum()) for p, q in zip(laws.p, laws.q, strict=True)]


def entries(laws: Laws) -> list[float]:
    """p_s, s = 1..H."""
    e = deficits(laws)
    return [e[s] * math.prod(1 - e[r] for r in range(s)) for s in range(len(e))]


def test_occurrence_and_capacity_are_exact_where_laws_forget(memoryless: tuple[Views, list[Laws]]) -> None:
    """Then no scan's weights vary: O and B_L come out of one replicate as they are."""
    views, all_laws = memoryless
    rows = views.rows("swrb", estimator="swrb").to_pylist()
    assert [row["doc"] for row in rows] == ["d0", "d1", "d2", "d3"]
    for row, laws in zip(rows, all_laws, strict=True):
        assert row["divergence_probability"] == pytest.approx(math.fsum(entries(laws)), abs=1e-14)
        assert row["occurrence"] == pytest.approx(math.fsum(entries(laws)) / 6, abs=1e-14)
        assert row["exact_risk"] == pytest.approx(math.fsum(deficits(laws)) / 6, abs=1e-15)
    weights = [1 / 6, 1 / 6, 1 / 6, 1 / 2]
    for row in views.rows("swrb_windows", stratum="pooled").to_pylist():
        exact = math.fsum(
            weight * p * max(0, 6 - s - row["depth"] + 1) / 6
            for weight, laws in zip(weights, all_laws, strict=True)
            for s, p in enumerate(entries(laws), start=1)
        )
        assert row["capacity"] == pytest.approx(exact, abs=1e-14)


def test_both_estimators_are_near_the_exact_risk(memoryless: tuple[Views, list[Laws]]) -> None:
    """By Hoeffding a mean of 60 values within [0, 1] is .3 off with probability below 2 exp(-10.8) = 4e-5, and there are 8."""
    views, _ = memoryless
    rows = views.rows("swrb").to_pylist()
    assert len(rows) == 8
    assert all(row["risk"] == pytest.approx(row["exact_risk"], abs=0.3) for row in rows)
    (pooled,) = views.rows("swrb_risk", stratum="pooled").to_pylist()
    plain = views.rows("decomposition", stratum="pooled").to_pylist()
    assert pooled["plain_mismatch"] == pytest.approx(plain[0]["mismatch"], abs=1e-12)  # the same documents and weights
    # By Chebyshev further than 20 standard errors with probability below 1/400; the laws and draws are fixed.
    assert abs(pooled["mismatch"] - pooled["plain_mismatch"]) < 20 * pooled["monte_carlo_error"]


def test_pooled_efficiency_is_a_ratio_of_means(memoryless: tuple[Views, list[Laws]]) -> None:
    views, _ = memoryless
    (efficiency,) = views.rows("swrb_efficiency", stratum="pooled").to_pylist()
    variances = {
        estimator: [row["risk_variance"] for row in views.rows("swrb", estimator=estimator).to_pylist()]
        for estimator in ("plain", "swrb")
    }

    def mean(values: list[float]) -> float:
        return (math.fsum(values[:3]) / 3 + values[3]) / 2

    assert efficiency["variance_ratio"] == pytest.approx(mean(variances["plain"]) / mean(variances["swrb"]), rel=1e-12)
    assert efficiency["second_ratio"] == pytest.approx(efficiency["evaluation_ratio"], rel=1e-12)
    assert efficiency["documents"] == 4


def test_logs_have_what_views_must_tell_apart() -> None:
    """The comparison of ``test_views`` is worth only as much as the cases in its logs."""
    found: set[Any] = set()
    for build in SWRB_LOGS.values():
        analysis = Analysis(build())
        for row in swrb_efficiency(analysis):
            level = "pooled" if row["stratum"] == "pooled" else "document" if row["doc"] else "stratum"
            found |= {
                (level, name, row[name] is None) for name in ("variance_ratio", "efficiency", "efficiency_in_seconds")
            }
        for row in SWRB_EVALUATIONS["swrb_risk"](analysis):
            found |= {("risk", name, row[name] is None) for name in ("plain_mismatch", "monte_carlo_error")}
        for row in SWRB_EVALUATIONS["swrb"](analysis):
            named = ("exact_risk", "evaluations", "seconds", "risk_variance")
            found |= {("document", row["estimator"], name, row[name] is None) for name in named}
    for level in ("pooled", "document", "stratum"):
        for name in ("variance_ratio", "efficiency", "efficiency_in_seconds"):
            assert {(level, name, True), (level, name, False)} <= found
    for name in ("plain_mismatch", "monte_carlo_error"):
        assert {("risk", name, True), ("risk", name, False)} <= found
    for name in ("exact_risk", "evaluations", "seconds", "risk_variance"):
        assert {("document", "swrb", name, True), ("document", "swrb", name, False)} <= found
