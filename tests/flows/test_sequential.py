"""Sequential studies: look by look to the first that settles all, at the same one whatever is killed or happens between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.refusals import refused
from fixtures.sequential_study import begin, go_on, kept, looks_of, rows, study_run
from fixtures.stored_rows import OF_THE_RUN

from kvdrift.commands.status import status_lines
from kvdrift.dry_run.description import describe_studies
from kvdrift.flows.estimate.gate import GateQuestion, gate_stored
from kvdrift.flows.material import Material
from kvdrift.flows.plan.frozen_plan import find_plan
from kvdrift.flows.plan.making import plan_interim_looks
from kvdrift.flows.run import stages
from kvdrift.flows.run.comparison import redo_actions
from kvdrift.flows.run.study_run import StudyRun, forecast
from kvdrift.log.store import Store
from kvdrift.schema.document import Document
from kvdrift.schema.errors import InputError, PlanError
from kvdrift.schema.study import Study
from kvdrift.verification.whole_store import verify


def test_a_study_stops_at_the_look_that_settles_all(stopped_laws: Path) -> None:
    run = study_run(stopped_laws, "store")
    taken = looks_of(run)
    assert [look["all"] for look in taken.looks.documents] == [4, 8, 12, 16]
    assert (taken.reached, taken.stopped) == (2, True)
    sequence = rows(run, "sequence")
    assert [(row["look"], row["action"], row["documents"]) for row in sequence] == [
        (1, "one", 4), (2, "one", 8), (1, "two", 4), (2, "two", 8),
    ]  # fmt: skip
    assert not all(row["resolved"] for row in sequence if row["look"] == 1)
    assert all(row["high"] - row["low"] <= 0.4 for row in sequence if row["look"] == 2)
    assert {row["level"] for row in sequence} == {0.975}
    assert sorted(set(run.store.units("laws", "tables")["doc"].to_pylist())) == sorted(
        [d.doc for d in run.material.of_split("development")] + [d.doc for d in run.material.of_split("evaluation", 8)]
    )


def test_what_stopped_is_reported_with_the_interval_of_its_look(stopped_laws: Path) -> None:
    run = study_run(stopped_laws, "store")
    last = {row["action"]: row for row in rows(run, "sequence", look=2)}
    primary = [row for row in rows(run, "estimates", quantity="mismatch", stratum="pooled") if row["family"]]
    assert len(primary) == 2
    for row in primary:
        assert (row["interval"], row["status"], row["documents"]) == ("repeated", "prespecified", 8)
        assert all(row[name] == last[row["action"]][name] for name in ("estimate", "low", "high", "level"))
    others = rows(run, "estimates", quantity="mismatch", stratum="all")
    assert {row["interval"] for row in others} <= {"studentized", "skewed", "expanded"}


def test_a_study_that_stopped_has_nothing_to_do(stopped_laws: Path) -> None:
    run = study_run(stopped_laws, "store")
    found = forecast(run)
    assert found.stopped
    assert found.estimated
    assert not any(split.work for split in found.splits)
    assert (stages.evaluate(run), stages.look(run), stages.analyze(run)) == (0, False, 0)
    lines = list(status_lines(run.store))
    assert "  evaluation: 8 of 8 documents generated, 24 units" in lines
    assert "  sequential: interim look 2 of 4, 8 of 16 documents: 2 of 2 primary endpoints resolved; stopped" in lines
    assert any(line.startswith("  pending: nothing") for line in lines)
    assert "  evaluation: 8 documents, all 24 units are stored" in list(describe_studies([run.study], run.location))
    assert [str(fault) for check in verify(run.store) for fault in check.faults] == []


@pytest.mark.slow
def test_a_dry_run_stands_at_the_most_that_the_looks_may_ask_for(stopped_laws: Path) -> None:
    run = study_run(stopped_laws, "other")
    begin(run)
    stages.evaluate(run)
    (line,) = (line for line in describe_studies([run.study], run.location) if line.startswith("  evaluation"))
    assert line.startswith("  evaluation: at most 16 documents, 36 units besides 12 that are stored")


@pytest.mark.slow
def test_an_action_that_is_added_gets_the_documents_of_the_look(stopped_laws: Path) -> None:
    run = study_run(stopped_laws, "store", ("[plan]", '[[actions]]\nname = "three"\n\n[plan]'))
    begin(run)
    go_on(run)
    stages.analyze(run)
    units = run.store.units("laws", "tables").to_pylist()
    evaluated = {document.doc for document in run.material.of_split("evaluation", 8)}
    assert {row["doc"] for row in units if row["action"] == "three"} >= evaluated
    assert len({row["doc"] for row in units}) == 2 + 8
    assert looks_of(run).reached == 2
    (row,) = rows(run, "estimates", quantity="mismatch", action="three", stratum="pooled")
    assert (row["status"], row["family"], row["interval"] == "repeated") == ("exploratory", None, False)
    (one,) = rows(run, "estimates", quantity="mismatch", action="one", stratum="pooled")
    assert one["interval"] == "repeated"


@pytest.mark.slow
def test_a_look_is_taken_again_for_an_action_that_is_redone(stopped_laws: Path) -> None:
    run = study_run(stopped_laws, "store")
    redo_actions([run], ["two"])
    taken = looks_of(run)
    assert (taken.reached, taken.lacking, taken.stopped, taken.wanted) == (2, True, False, 2)
    begin(run)
    go_on(run)
    assert looks_of(run).stopped
    assert [(row["look"], row["action_revision"]) for row in rows(run, "looks", action="two")] == [(2, 1)]
    stages.analyze(run)
    assert {row["status"] for row in rows(run, "estimates", action="two", family="primary")} == {"seen"}


@pytest.mark.slow
def test_planning_anew_leaves_out_looks_at_what_was_evaluated(stopped_laws: Path) -> None:
    narrower = ("target_half_width = 0.2", "target_half_width = 0.0001")
    assert "--replan" in refused(stages.prepare, study_run(stopped_laws, "store", narrower), error=PlanError)
    run = study_run(stopped_laws, "store", narrower, replan=True)
    begin(run)
    assert [look["all"] for look in looks_of(run).looks.documents] == [8, 12, 16]
    run = study_run(stopped_laws, "store", narrower)
    go_on(run)
    assert (looks_of(run).reached, looks_of(run).stopped) == (3, True)  # at N, without having settled anything
    assert not any(row["resolved"] for row in rows(run, "sequence"))
    again = study_run(stopped_laws, "store", narrower, replan=True)
    begin(again)
    assert " is unchanged: " in again.progress.lines[-1]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_documents_that_are_added_after_a_stop_are_a_plan_of_their_own_that_has_seen_them(stopped_laws: Path) -> None:
    run = study_run(stopped_laws, "other", ("documents = 16", "documents = 8"))
    begin(run)
    go_on(run)
    stages.analyze(run)
    before = looks_of(run)
    evaluated = before.looks.documents[before.reached - 1]["all"]
    assert (before.stopped, evaluated) == (True, 6)
    assert {row["status"] for row in rows(run, "estimates", family="primary")} == {"prespecified"}
    run = study_run(stopped_laws, "other")
    begin(run)
    plan = find_plan(run.store, "laws", "tables")
    assert plan is not None
    assert (plan.revision, plan.seen, plan.evaluated) == (1, True, 6)
    assert [look["all"] for look in looks_of(run).looks.documents] == [8, 12, 16], "none before what was evaluated"
    go_on(run)
    stages.analyze(run)
    assert looks_of(run).stopped
    assert {row["status"] for row in rows(run, "estimates", family="primary")} == {"seen"}
    kept_looks = [row for row in run.store.read("looks").to_pylist() if row["plan_sha256"] == before.plan.sha256]
    assert len(kept_looks) == 2 * before.reached


def material(study: Study, **clusters: list[str]) -> Material:
    """Documents of some clusters in each stratum, in this order."""
    documents = {
        stratum: [Document(f"{stratum}{number}", stratum, cluster, "", "", ()) for number, cluster in enumerate(own)]
        for stratum, own in clusters.items()
    }
    return Material(study, {"development": {}, "evaluation": documents}, [])


def test_clusters_come_whole_and_strata_evenly(stopped_laws: Path) -> None:
    """A cluster that is met comes with all of its documents, in other strata too."""
    study = study_run(stopped_laws, "store").study
    made = plan_interim_looks(material(study, a=list("ppqqrrss"), b=list("ptuvwxyp")), 8, 0.95)
    assert made is not None
    assert [look["documents"] for look in made["looks"]] == [
        {"a": 4, "b": 5}, {"a": 6, "b": 7}, {"a": 8, "b": 8},
    ]  # fmt: skip
    assert made["order"]["b"] == ["b0", "b1", "b2", "b3", "b7", "b4", "b5", "b6"]
    assert [look["share"] for look in made["looks"]] == [9 / 16, 13 / 16, 1]


def test_looks_without_an_interval_are_left_out(stopped_laws: Path) -> None:
    study = study_run(stopped_laws, "store").study
    made = plan_interim_looks(material(study, a=list("ppppqqqq"), b=list("rstuvwxy")), 8, 0.95)
    assert made is not None
    assert [look["documents"] for look in made["looks"]] == [{"a": 8, "b": 6}, {"a": 8, "b": 8}]


def refusals() -> Iterator[tuple[str, str]]:
    stopping = 'stopping = "sequential"\n'
    yield "fixed", "plan.looks: "
    yield f'{stopping}looks = ["1/2", "1/3", "1"]', "plan.looks"
    yield f'{stopping}looks = ["half", "1"]', "plan.looks"
    yield f'{stopping}resolve = "equivalence"', "plan.margin: missing"
    yield f"{stopping}margin = 0.1", "plan.margin: "
    yield f'{stopping}interval = "percentile"', "plan.interval"
    yield f'{stopping}variance = "reduced"', "plan.variance"


@pytest.mark.parametrize(("lines", "message"), list(refusals()))
def test_keys_that_do_not_go_together(stopped_laws: Path, lines: str, message: str) -> None:
    lines = 'looks = ["1/2", "1"]' if lines == "fixed" else lines
    assert message in refused(study_run, stopped_laws, "store", ('stopping = "sequential"', lines), error=InputError)


def test_a_gate_needs_a_number_of_documents_that_is_fixed(stopped_laws: Path) -> None:
    question = GateQuestion("mismatch", "two", "one", margin=0.02)
    line = refused(gate_stored, Store.open(stopped_laws / "store"), question)
    assert "study 'laws' is sequential" in line


CYCLE = (stages.evaluate, stages.derive, stages.check, stages.look)
KILLS = {"the first look": 0, "a document": 1, "documents": 1, "derivation": 2, "the second look": 4}
"""How many stages of the second look are done at the kill; of "a document", one document is generated."""


def run_until(folder: Path, place: str) -> None:
    """Run a study to the first look and a part of the second, and leave it there; its store has all of it."""
    # 2 documents of development, and 4 of the first look
    run = study_run(folder, "killed", limit=7 if place == "a document" else None)
    begin(run)
    for stage in (*CYCLE, *CYCLE[: KILLS[place]]):
        stage(run)


def estimates(run: StudyRun) -> list[dict[str, Any]]:
    """Return all estimates, without columns that differ between two runs of one study."""
    found = [{name: value for name, value in row.items() if name not in OF_THE_RUN} for row in rows(run, "estimates")]
    return sorted(found, key=str)


@pytest.mark.slow
@pytest.mark.parametrize("place", KILLS)
def test_a_study_that_is_killed_between_looks_says_what_it_says_without_a_kill(stopped_laws: Path, place: str) -> None:
    run_until(stopped_laws, place)
    run = study_run(stopped_laws, "killed")
    assert looks_of(run).reached == (2 if place == "the second look" else 1)
    assert forecast(run).finished is False
    # Whoever estimates when the documents of a look are all there takes that look.
    look_between(run, 1 if place in {"the first look", "a document"} else 2)
    begin(run)
    go_on(run)
    stages.analyze(run)
    other = study_run(stopped_laws, "store")
    for table in ("looks", "units", "events", "trajectories"):
        assert kept(stopped_laws / "killed", table) == kept(stopped_laws / "store", table), table
    assert estimates(run) == estimates(other)


def look_between(run: StudyRun, look: int) -> None:
    """Estimate at a moment that no plan has: primary endpoints have the interval of a look, and a gate refuses."""
    stages.derive(run)
    stages.analyze(run)
    last = {row["action"]: row for row in rows(run, "sequence", look=look)}
    primary = [row for row in rows(run, "estimates", quantity="mismatch", stratum="pooled") if row["family"]]
    assert (looks_of(run).reached, len(primary)) == (look, 2)
    for row in primary:
        said = last[row["action"]]
        assert (row["interval"], row["documents"]) == ("repeated", 4 * look)
        assert all(row[name] == said[name] for name in ("estimate", "low", "high", "level"))
    question = GateQuestion("mismatch", "two", "one", margin=0.02)
    assert "is sequential" in refused(gate_stored, run.store, question)


@pytest.mark.slow
def test_documents_that_a_source_brings_after_a_stop_change_nothing(stopped_laws: Path) -> None:
    """The plan is frozen with its documents; a larger N is a plan of its own, whose findings are labelled seen."""
    run = study_run(stopped_laws, "store", ("evaluation = 16", "evaluation = 22"))
    before, looks = estimates(run), kept(stopped_laws / "store", "looks")
    begin(run)
    go_on(run)
    assert stages.analyze(run) == 0
    assert not any(split.work for split in forecast(run).splits)
    assert (looks_of(run).reached, looks_of(run).stopped) == (2, True)
    assert kept(stopped_laws / "store", "looks") == looks
    assert estimates(run) == before
