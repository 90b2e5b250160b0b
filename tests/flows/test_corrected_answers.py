"""Answers, scoring and clusters can be corrected: stored events are scored and estimated again."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures.command import call
from fixtures.heard import Heard
from fixtures.own_files import prompts, write_own_study
from fixtures.small_study import run_of
from fixtures.study_files import load_study

from kvdrift.flows.estimate.gate import GateQuestion, gate_stored
from kvdrift.flows.estimate.scores import Scoring
from kvdrift.flows.run import stages
from kvdrift.flows.run.comparison import check_agrees
from kvdrift.flows.run.study_run import StudyRun, forecast
from kvdrift.generator.embedded import vocabulary
from kvdrift.sql.catalog import open_views
from kvdrift.verification.whole_store import verify

Rows = list[dict[str, Any]]
PLAN = (
    ('primary = ["mismatch"]', 'primary = ["mismatch", "gap", "accuracy"]'),
    ("development = 2\nevaluation = 2", "development = 2\nevaluation = 4"),
    ("\ndocuments = 2", "\ndocuments = 4"),
    ("[plan]", '[[actions]]\nname = "recent-30"\nselector = "recent"\nkeep = 30\n\n[plan]'),
)


def own_run(folder: Path, rows: Rows, *changes: tuple[str, str]) -> StudyRun:
    folder.mkdir(exist_ok=True)
    return run_of(load_study(write_own_study(folder, rows, *PLAN, *changes)), folder / "store")


def finish(run: StudyRun) -> None:
    """Run a study to its estimates; if its plan names quantities of answers, development documents are scored first."""
    stages.prepare(run)
    stages.develop(run)
    stages.derive(run)
    stages.score(run)
    stages.plan(run)
    more = True
    while more:
        stages.evaluate(run)
        stages.derive(run)
        stages.score(run)
        more = stages.look(run)
    stages.analyze(run)


def rows_of(run: StudyRun, view: str, **equal: Any) -> Rows:
    with open_views(run.store) as views:
        return views.rows(view, study="own", **equal).to_pylist()


def answered(run: StudyRun, replicate: int) -> dict[str, str]:
    """Return two consecutive tokens of X as text, by document, for a corrected answer to ask for."""
    events = [
        row for row in run.store.read("events").to_pylist() if row["replicate"] == replicate and row["t"] in {1, 2}
    ]
    tokens: dict[str, dict[int, int]] = {}
    for row in events:
        tokens.setdefault(row["doc"], {})[row["t"]] = row["x_token"]
    return {doc: vocabulary.to_text([own[1], own[2]]) for doc, own in tokens.items()}


def is_done(run: StudyRun) -> bool:
    found = forecast(run)
    work = [split.work for split in found.splits]
    return not (check_agrees(run) or any(work) or found.unscored) and found.estimated


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rows]:
    """A finished study whose documents have answers that hardly any continuation states."""
    folder, rows = tmp_path_factory.mktemp("own"), [row | {"answers": ["k00 k01 k02"]} for row in prompts(24)]
    finish(own_run(folder, rows))
    return folder, rows


@pytest.fixture
def study(finished_once: tuple[Path, Rows], tmp_path: Path) -> tuple[Path, Rows]:
    """A copy of the study, to write to."""
    folder, rows = finished_once
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return tmp_path, rows


def corrected(run: StudyRun, rows: Rows) -> Rows:
    """Give every document the answer that X gave in replicate 0, and evaluation documents that of replicate 1 too."""
    first, second = answered(run, 0), answered(run, 1)
    evaluation = {document.doc for document in run.material.of_split("evaluation")}
    return [
        row | {"answers": [first[doc], *([second[doc]] if doc in evaluation else [])]} if (doc := row["id"]) in first
        else row for row in rows
    ]  # fmt: skip


@pytest.mark.slow
def test_the_page_the_gate_and_show_follow_present_answers(
    study: tuple[Path, Rows], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, rows = study
    question = GateQuestion("accuracy", "recent-30", "recent-half", 0.5)
    before = own_run(folder, rows)
    assert gate_stored(before.store, question).status == "exploratory", "the plan names accuracy, not its difference"
    events, edited = before.store.version("events"), corrected(before, rows)
    run = replace(own_run(folder, edited), progress=(heard := Heard()))
    assert "answers of document 'p" in str(check_agrees(run)[0])
    stages.prepare(run)  # and killed after it
    begun, scoring = forecast(run), Scoring.stored(run.store, "own", "model")
    assert (begun.unscored, begun.estimated) == (36, False)
    assert scoring.unscored_pairs.total() == sum(scoring.unscored["replicates"].to_pylist())
    assert rows_of(run, "scores") == [], "no view shows what was scored by earlier answers"
    finish(run)
    assert any(line.startswith("scored 36 pairs against their documents' answers") for line in heard.lines)
    assert is_done(own_run(folder, edited))
    assert run.store.version("events") == events, "nothing is generated"
    primary = rows_of(run, "estimates", stratum="pooled", family="primary")
    assert {(row["quantity"], row["status"]) for row in primary} == {
        ("mismatch", "prespecified"), ("gap", "prespecified"), ("accuracy", "seen"),
    }  # fmt: skip
    pairs = sum(row["replicates"] for row in rows_of(run, "units"))
    assert len(rows_of(run, "scores")) == pairs < run.store.row_count("scores"), "earlier scores stay in the log"
    assert [fault for check in verify(run.store) for fault in check.faults] == []
    assert "answers of their documents were corrected" in stages.report(run).read_text()
    answers = rows_of(run, "answers", stratum="pooled", split="evaluation")
    accuracy = {row["action"]: row["accuracy"] for row in answers}
    gap = accuracy["recent-30"] - accuracy["recent-half"]
    assert gate_stored(run.store, question).estimate == pytest.approx(gap, abs=1e-12)
    doc = run.material.of_split("evaluation")[0].doc
    code, out, _ = call(capsys, "show", folder / "store", doc, "recent-half", "0")
    assert code == 0
    assert all(answer in out for row in edited if row["id"] == doc for answer in row["answers"])


@pytest.mark.slow
def test_a_look_is_taken_again_by_present_answers(study: tuple[Path, Rows]) -> None:
    folder, rows = study
    looks = ("documents = 4", 'documents = 4\nstopping = "sequential"\nlooks = ["1/2", "1"]')
    run = own_run(folder / "looks", rows, looks)
    finish(run)
    before = {row["look"]: row["estimate"] for row in rows_of(run, "sequence", quantity="accuracy", action="recent-30")}
    edited = corrected(run, rows)
    again = own_run(folder / "looks", edited, looks)
    stages.prepare(again)
    assert not forecast(again).stopped
    finish(again)
    after = {
        row["look"]: row["estimate"] for row in rows_of(again, "sequence", quantity="accuracy", action="recent-30")
    }
    assert set(after) == {max(before)}
    assert after[max(before)] != before[max(before)]
    assert forecast(again).stopped
