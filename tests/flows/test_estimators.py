"""A study's estimator: the units it makes, the text of its plan, and that both estimators measure the same risk."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from fixtures.small_study import evaluate, run_of, write_study
from fixtures.study_files import load_study
from fixtures.table_systems import study_of_tables, table_system, write_systems

from kvdrift.flows.plan.frozen_plan import find_plan
from kvdrift.flows.run import stages
from kvdrift.flows.run.study_run import StudyRun
from kvdrift.schema.errors import InputError
from kvdrift.sql.catalog import open_views

SWRB = ("replicates = 5", 'estimator = "swrb"\nreplicates = 5')
TABLES = (
    study_of_tables(8, 4, 3, "rarely", "never")
    + """
[plan]
estimator = "hybrid"
baseline = "rarely"
primary = ["mismatch"]
replicates = 3
documents = 3
development_replicates = 64
draws = 100
exploratory_draws = 100
"""
)


def units_of(run: StudyRun, split: str) -> Counter[tuple[str, str]]:
    documents = {document.doc for document in run.material.of_split(split)}
    rows = run.store.units(run.study.name).to_pylist()
    return Counter((row["action"], row["estimator"]) for row in rows if row["doc"] in documents)


def test_hybrid_branches_where_development_says_that_it_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One action parts from the reference once in a hundred steps, so branching pays; the other action never parts."""
    monkeypatch.chdir(tmp_path)
    write_systems(tmp_path / "tables.json", [table_system(8, 0.5, {"rarely": 0.51, "never": 0.5})] * 7)
    (tmp_path / "study.toml").write_text(TABLES)
    done = run_of(load_study(tmp_path / "study.toml"), tmp_path / "store")
    evaluate(done)
    plan = find_plan(done.store, done.study.name, done.study.model.id)
    assert plan is not None
    planned = plan.content["residual_branching"]
    efficiency = plan.content["measured"]["residual_branching"]["development_efficiency_in_seconds"]
    assert set(planned["actions"]) == {name for name, value in efficiency.items() if (value or 0) > 1}
    assert units_of(done, "development")["rarely", "swrb"] == 4
    branched = {name for name, estimator in units_of(done, "evaluation") if estimator == "swrb"}
    assert branched == set(planned["actions"]) == {"rarely"}


@pytest.mark.slow
def test_both_estimators_mean_one_risk(tmp_path: Path) -> None:
    """On the embedded model, same documents: the difference within 4 of its Monte Carlo standard errors.

    Two actions, pooled: a right estimator fails with probability 1e-4, and the seed is fixed.
    """
    done = run_of(load_study(write_study(tmp_path, SWRB, ("replicates = 5", "replicates = 48"))), tmp_path / "store")
    evaluate(done)
    for split, documents in (("development", 4), ("evaluation", 6)):
        measured = {(name, kind): documents for name in ("snapkv-half", "recent-half") for kind in ("plain", "swrb")}
        assert units_of(done, split) == {**measured, ("full", "plain"): documents}
    assert stages.evaluate(done) == 0
    stages.check(done)
    with open_views(done.store) as views:
        rows = views.rows("swrb_risk", study=done.study.name, split="evaluation", stratum="pooled").to_pylist()
        decomposition = views.rows(
            "decomposition", study=done.study.name, split="evaluation", stratum="pooled"
        ).to_pylist()
    plain = {row["action"]: row for row in decomposition}
    assert {row["action"] for row in rows} == {"snapkv-half", "recent-half"}
    for row in rows:
        assert row["plain_mismatch"] == pytest.approx(plain[row["action"]]["mismatch"], abs=1e-12)
        assert row["monte_carlo_error"] > 0
        assert abs(row["mismatch"] - row["plain_mismatch"]) < 4 * row["monte_carlo_error"]
        assert row["mismatch"] == pytest.approx(row["occurrence"] + row["occupation"], abs=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('id = "kvdrift/tiny"', 'id = "x"\nkind = "finite-state"'), "family and alphabet, or tables"),
        (('id = "kvdrift/tiny"', 'id = "x"\nkind = "finite-state"\nfamily = "mixture"\nalphabet = 2'), "source = 'embedded'"),
        (('id = "kvdrift/tiny"', 'id = "kvdrift/tiny"\nalphabet = 2'), 'write kind = "finite-state" with it'),
        (('id = "kvdrift/tiny"', 'id = "kvdrift/tiny"\nkind = "finite"'), "'transformer' or 'finite-state'"),
        (("length = 384\n", ""), r"documents\[0\].length: missing"),
        (('selector = "snapkv"\n', ""), r"actions\[0\].selector: missing"),
        (("replicates = 5", 'estimator = "branching"\nreplicates = 5'), "'plain', 'swrb' or 'hybrid'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_study(write_study(tmp_path, change))
