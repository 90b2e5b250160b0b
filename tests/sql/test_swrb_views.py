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
from fixtures.awkward_logs import Log, Row, declared_study, document
from fixtures.branched_logs import SWRB_LOGS
from fixtures.swrb_events import Laws, plain_replicate, random_laws, swrb_replicate, unit
from oracles.coupled_paths import Analysis
from oracles.swrb_definitions import SWRB_EVALUATIONS, swrb_efficiency

from log.store import Store
from schema.tables import TABLES
from sql.catalog import Views, open_views
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
