"""A whole study through the command: result, second run, kills, growth, refusals. Real store, real flow, real model."""

from __future__ import annotations

import re
import signal
import time
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from fixtures.command import call
from fixtures.finished_studies import OWN_LINES
from fixtures.processes import Command, run_command
from fixtures.small_study import evaluate, run_of, write_study
from fixtures.stored_rows import assert_same, content
from fixtures.study_files import load_study

import kvdrift
from kvdrift.flows.plan.frozen_plan import find_plan
from kvdrift.flows.run import stages
from kvdrift.flows.run.study_run import StudyRun
from kvdrift.log.last_times import FOLDER, last_times
from kvdrift.log.store import Store, Unit
from kvdrift.schema.errors import ControlError, InputError, OperationError, PlanError
from kvdrift.schema.tables import EVENTS


def test_second_run_does_nothing_and_says_so(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    started = datetime.now(UTC).replace(microsecond=0)  # times of runs are recorded in whole seconds
    code, out, err = call(capsys, "run", write_study(tmp_path), "--store", finished)
    after = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    assert (code, err) == (0, "")
    assert "nothing to do" in out
    (changed,) = (path for path in after if before.get(path) != after[path])
    assert changed.parent == finished / FOLDER, "that there was a run is a change of no table"
    (last_run,) = last_times(str(finished)).runs.values()
    assert last_run >= started


def test_nothing_but_our_own_lines_on_standard_error(unbroken: tuple[Path, str, str]) -> None:
    _, out, err = unbroken
    assert [line for line in err.splitlines() if not re.match(OWN_LINES, line)] == []
    assert [line.split(":")[0] for line in out.splitlines()] == ["store", "report"]


@pytest.mark.parametrize("stopped", ["killed", "limited, planned and killed"])
@pytest.mark.slow
def test_limited_and_killed_runs_go_on_and_give_the_events_of_an_unbroken_run(
    finished: Path, tmp_path: Path, stopped: str
) -> None:
    """Stopped by its limit, stopped after its plan, killed amid generation, ended before its page."""
    study, location = write_study(tmp_path), tmp_path / "store"
    if stopped != "killed":
        _limit_and_plan(study, location)
    _kill(study, location)
    run = run_of(load_study(study), location)
    evaluate(run)
    assert stages.score(run) > 0
    stages.check(run)
    assert stages.analyze(run) > 0
    assert not stages.is_finished(run)
    stages.report(run)
    assert stages.is_finished(run)
    assert_same(location, finished)


def _limit_and_plan(study: Path, location: Path) -> None:
    """Generate one document, then all development documents."""
    code, out, err = run_command("run", study, "--store", location, "--limit", "1")
    assert code == 0, err
    assert "stopped at --limit 1: 3 documents " in out
    assert "report:" not in out
    assert content(location, "trajectories").num_rows == 2 * 4 + 2  # what is there can be queried
    code, out, err = run_command("run", study, "--store", location, "--plan-only")
    assert code == 0, err
    plan = find_plan(Store.open(location), "small", "kvdrift/tiny")
    assert plan is not None
    assert f"SHA-256 {plan.sha256}" in out
    assert Store.open(location).units().num_rows == 4 * 3  # development documents alone


def _kill(study: Path, location: Path) -> None:
    """Run the command until there is another file of events, halt it for ad hoc SQL beside it, and kill it."""
    before = set((location / "events").rglob("*.parquet"))
    command = Command("run", study, "--store", location)
    while command.running:
        if set((location / "events").rglob("*.parquet")) > before:
            command.signal(signal.SIGSTOP)
            with kvdrift.open(location) as views:
                assert views.sql("select count(*) from events").fetchall()
            command.kill()
            break
        time.sleep(0.01)
    assert command.end()[0] != 0, "killed too late"


def test_evaluation_without_a_plan_is_refused(prepared: StudyRun) -> None:
    with pytest.raises(PlanError, match="no frozen plan"):
        stages.evaluate(prepared)
    assert prepared.store.read("events").num_rows == 0


def test_a_control_that_moved_fails_the_study(prepared: StudyRun) -> None:
    document = prepared.material.of_split("development")[0]
    prepared.store.append_units([_unit(document.doc, "full", delta=1e-7)])
    with pytest.raises(InputError, match="1 controls of study 'small' are not derived: kvdrift derive"):
        stages.check(prepared)
    stages.derive(prepared)
    where = rf"control moved in document '{document.doc}', replicate 0 \(delta 1e-07, f 0 at position 1\)"
    with pytest.raises(ControlError, match=where):
        stages.check(prepared)


def test_unequal_bytes_at_equal_retention_fail_the_study(prepared: StudyRun) -> None:
    document = prepared.material.of_split("development")[0]
    for action, size in (("snapkv-half", 1000), ("recent-half", 1001)):
        prepared.store.append_units([_unit(document.doc, action, kept_entries=100, payload_bytes=size)])
    with pytest.raises(OperationError, match="payload_bytes should be equal"):
        stages.check(prepared)


def _unit(doc: str, action: str, *, delta: float = 0.0, **measured: int) -> Unit:
    """One replicate, whose first position has a distance."""
    names = {"study": "small", "model": "kvdrift/tiny", "doc": doc, "action": action}
    row = {"replicate": 0, "x_token": 5, "y_token": 5, "f": 0.0, "x_eos": False, "y_eos": False, "kind": "coupled"}
    rows = [names | row | {"t": t, "delta": delta if t == 1 else 0.0} for t in range(1, 13)]
    record = names | {"first_replicate": 0, "replicates": 1, "horizon": 12, **measured}
    return Unit(record, pa.Table.from_pylist(rows, schema=EVENTS.schema))


def test_the_plan_is_frozen_before_evaluation_and_hashed(finished: Path) -> None:
    plan = find_plan(Store.open(finished), "small", "kvdrift/tiny")
    assert plan is not None
    (row,) = Store.open(finished).read("plans").to_pylist()
    with kvdrift.open(finished) as views:
        splits = views.sql("select distinct split from documents semi join events using (study, model, doc)").fetchall()
    assert {split for (split,) in splits} == {"development", "evaluation"}
    frozen_events = Store.open(finished).read("events", version=row["events_version"])
    development = {d["doc"] for d in Store.open(finished).read("documents").to_pylist() if d["split"] == "development"}
    assert set(frozen_events["doc"].to_pylist()) == development  # no evaluation event existed when it was frozen
    assert plan.replicates == 5
    assert {e["quantity"] for e in plan.content["primary_endpoints"]} == {"gap", "mismatch"}
