"""The study of the published validation of residual branching: 24 binary systems, H = 3.

``test_finite_families`` compares the published variances and costs with those of the family, by enumeration.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from fixtures.small_study import run_of
from fixtures.study_files import load_study

from kvdrift.flows.run import stages
from kvdrift.flows.run.checks import check_study
from kvdrift.flows.run.study import run_file
from kvdrift.log.store import Store
from kvdrift.schema.progress import SILENT
from kvdrift.sql.catalog import open_views

SYSTEMS = 24
STUDY = Path(__file__).parents[2] / "studies" / "finite_state.toml"


@pytest.mark.slow
def test_the_study_of_the_published_systems(tmp_path: Path) -> None:
    """From study file to report, stage by stage; then there is nothing left to do."""
    study, store = load_study(STUDY), str(tmp_path / "store")
    run = run_of(study, store)
    check_study(run)
    stages.prepare(run)
    assert stages.develop(run) > 0
    stages.derive(run)
    stages.plan(run)
    assert stages.evaluate(run) > 0
    stages.derive(run)
    stages.check(run)
    assert stages.analyze(run) > 0
    page = stages.report(run)
    assert page.is_file()

    with open_views(Store.open(store)) as views:
        rows = views.rows("swrb_efficiency", split="evaluation").to_pylist()
        swrb = views.rows("swrb", split="evaluation", estimator="swrb").to_pylist()
    ratios = [row["variance_ratio"] for row in rows if row["doc"] is not None]
    (pooled,) = (row for row in rows if row["stratum"] == "pooled")
    assert len(ratios) == len(swrb) == SYSTEMS
    assert 30 < statistics.median(ratios) < 120
    assert min(ratios) > 1
    assert 1.2 < pooled["evaluation_ratio"] < 1.5
    assert pooled["efficiency"] > 15
    assert all(row["risk"] == pytest.approx(row["exact_risk"], abs=0.02) for row in swrb)

    versions = Store.open(store).versions()
    again = run_file([study], store, None, SILENT)
    assert (again.pages, again.did_something) == ([page], False)
    assert stages.develop(run) == stages.evaluate(run) == stages.analyze(run) == stages.derive(run) == 0
    assert Store.open(store).versions() == versions
