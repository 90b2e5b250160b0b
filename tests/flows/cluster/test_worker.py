"""A cluster's worker handles a task, in this process: it checks whether it fits, generates and stores."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pyarrow.compute as pc
import pytest
from fixtures.finite_study import write_finite_study
from fixtures.small_study import run_of, write_study
from fixtures.stored_units import killed_in
from fixtures.study_files import load_study

from kvdrift.flows.cluster import worker
from kvdrift.flows.cluster.connection import facts, other_versions
from kvdrift.flows.cluster.generator import check_stored
from kvdrift.flows.cluster.worker import Group
from kvdrift.flows.generate.local import LocalGenerator, named
from kvdrift.flows.generate.storing import stored_identities
from kvdrift.flows.run import stages
from kvdrift.flows.run.study_run import StudyRun, of_all_laws, pending_development
from kvdrift.generator.generation import Work
from kvdrift.generator.identity import ActionIdentity, GpuKinds
from kvdrift.log.store import Unit
from kvdrift.log.units import commits
from kvdrift.schema.errors import InputError, OperationError
from kvdrift.schema.study import Study, load_studies


@pytest.fixture
def at_work(monkeypatch: pytest.MonkeyPatch) -> worker.Kept:
    """Return the state of a worker that has done nothing yet, in this process."""
    dask = SimpleNamespace(address="tcp://there:1", state=SimpleNamespace(nthreads=1))
    monkeypatch.setattr(worker, "get_worker", lambda: dask)
    monkeypatch.setattr(worker, "KEPT", worker.Kept())
    return worker.KEPT


def assigned(
    run: StudyRun, documents: int = 1, seconds: float = 60.0, **changes: Any
) -> tuple[Group, worker.Assignment]:
    """Return the first development documents of the run, and the assignment of its workers."""
    work = pending_development(run.store, run.material)
    known = known_of(run)
    told = worker.Assignment(uuid4().hex, run.study, run.location, facts(run.location), GpuKinds.of_units([]), known)
    return Group(named(work[:documents]), seconds), replace(told, **changes)


def new_units(answer: Any) -> int:
    """Return the number of new units that a worker reports."""
    assert isinstance(answer, worker.Stored)
    return answer.units


def known_of(run: StudyRun) -> dict[tuple[str, str, int], ActionIdentity]:
    """Return the identity of each study, action and revision, as the store has it."""
    found = stored_identities(run.store, run.study.name, run.study.model.id)
    return {(run.study.name, *key): identity for key, identity in found.items()}


def refused(run: StudyRun, **changes: Any) -> str:
    """Return the line of a worker that refuses its assignment."""
    answer = worker.generate_group(*assigned(run, **changes))
    assert isinstance(answer, InputError)
    assert len(run.store.units()) == 0
    line = str(answer)
    assert line.startswith("worker tcp://there:1 on ")
    assert "\n" not in line
    return line.partition(": ")[2]


@pytest.fixture
def waiting(tmp_path: Path) -> StudyRun:
    """A run with nothing generated."""
    run = run_of(load_study(write_finite_study(tmp_path)), tmp_path / "store")
    stages.prepare(run)
    return run


@pytest.mark.usefixtures("at_work")
def test_a_worker_with_something_else_is_refused(
    waiting: StudyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = facts(waiting.location)
    assert refused(waiting, facts=replace(here, source="0")).startswith("runs another version")
    assert refused(waiting, facts=replace(here, store="0")).startswith("has another store ")
    nowhere = str(tmp_path / "nowhere")
    assert nowhere in refused(waiting, location=nowhere)
    assert re.match(r"does not see .* \(nothing://there.*\); .* AWS_", refused(waiting, location="nothing://there"))
    with monkeypatch.context() as here_too:
        here_too.setattr(worker, "gpu_here", lambda _: "NVIDIA X")
        line = refused(waiting, gpus=GpuKinds.at("worker tcp://first:1", "NVIDIA Y"))
        assert line.startswith("computes on NVIDIA X, worker tcp://first:1 on NVIDIA Y; ")
    known = known_of(waiting)
    for column in ("weights_sha256", "selector_sha256"):
        other = {key: replace(identity, **{column: "0" * 64}) for key, identity in known.items()}
        line = refused(waiting, known=other)
        assert re.match(rf"{column} of action '\w+' is [0-9a-f]{{12}} on this worker, but 0{{12}} ", line)


def test_another_dask_is_one_line() -> None:
    same = {"packages": {"python": "3.11.7", "dask": "2026.8.0", "distributed": "2026.8.0", "lz4": None}}
    other = {"packages": same["packages"] | {"distributed": "2026.7.1", "lz4": "4"}}
    found: dict[str, Any] = {"client": same, "scheduler": same, "workers": {"tcp://a:1": same, "tcp://b:1": same}}
    assert other_versions(found) is None
    found["workers"]["tcp://b:1"] = other
    assert str(other_versions(found)).startswith("worker tcp://b:1 has distributed 2026.7.1, not 2026.8.0; ")
    assert str(other_versions(found | {"scheduler": other})).startswith("the scheduler has distributed 2026.7.1, not ")


def test_a_worker_serves_one_study_after_another(at_work: worker.Kept, waiting: StudyRun, tmp_path: Path) -> None:
    """The model is kept; a study of the same description with other systems gets another model."""
    group, told = assigned(waiting)
    assert new_units(worker.generate_group(group, told)) == 2
    model = at_work.local.model(waiting.study)
    assert new_units(worker.generate_group(group, replace(told, token=uuid4().hex))) == 0  # they are there
    assert at_work.local.model(waiting.study) is model
    (tmp_path / "other").mkdir()
    study = load_study(
        write_finite_study(tmp_path / "other", ("development = 4", "development = 9"), ("seed = 24", "seed = 3"))
    )
    other = run_of(study, tmp_path / "other" / "store")
    stages.prepare(other)
    assert new_units(worker.generate_group(*assigned(other))) == 2


@pytest.mark.usefixtures("at_work")
def test_a_group_is_one_commit(waiting: StudyRun) -> None:
    before = waiting.store.version("events")
    group, told = assigned(waiting, documents=3)
    stored = worker.generate_group(group, told)
    assert isinstance(stored, worker.Stored)
    assert (stored.documents, stored.units) == ({document.doc for document, _ in group.part}, 6)
    assert waiting.store.version("events") == before + 1


@pytest.mark.usefixtures("at_work")
def test_the_documents_after_a_groups_seconds_are_left(waiting: StudyRun) -> None:
    group, told = assigned(waiting, documents=3, seconds=0.0)
    stored = worker.generate_group(group, told)
    assert isinstance(stored, worker.Stored)
    assert (stored.documents, stored.units) == ({group.part[0][0].doc}, 2)


@pytest.mark.usefixtures("at_work")
def test_units_that_are_stored_are_not_generated_again(waiting: StudyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker ended before its commit was reported; events without rows count, too."""
    group, told = assigned(waiting, documents=3)
    with killed_in(monkeypatch, commits, "as_rows"):
        worker.generate_group(group._replace(seconds=0.0), told)  # the first of them
    monkeypatch.setattr(worker, "KEPT", worker.Kept())
    generated = list[str]()

    def noted(local: LocalGenerator, study: Study, part: Work) -> list[list[Unit]]:
        generated.extend(document.doc for document, _ in part)
        return generate_part(local, study, part)

    generate_part = LocalGenerator.generate_part
    monkeypatch.setattr(LocalGenerator, "generate_part", noted)
    assert new_units(worker.generate_group(group, told)) == 4
    assert generated == [document.doc for document, _ in group.part[1:]]


@pytest.mark.slow
@pytest.mark.usefixtures("at_work")
def test_a_worker_generates_all_laws_of_a_document(tmp_path: Path) -> None:
    several = ("seed = 3", "seed = 3\ntemperature = [0.0, 0.7]")
    runs = [run_of(study, tmp_path / "store") for study in load_studies(write_study(tmp_path, several))]
    for run in runs:
        stages.prepare(run)
    work = of_all_laws([(run.study, pending_development(run.store, run.material)) for run in runs])
    _, told = assigned(runs[0])
    told = replace(told, known={key: identity for run in runs for key, identity in known_of(run).items()})
    for one in work:
        assert new_units(worker.generate_group(Group(named([one]), 60.0), told)) == 2 * 3
    check_stored(runs[0].store, runs[0].study, work)
    alone = [run_of(run.study, tmp_path / run.study.name) for run in runs]
    for run in alone:
        stages.prepare(run)
        stages.develop(run)
        events = runs[0].store.read("events")
        own = events.filter(pc.equal(events["study"], run.study.name))
        order = [(name, "ascending") for name in ("doc", "action", "replicate", "t")]
        assert own.sort_by(order).equals(run.store.read("events").sort_by(order))


@pytest.mark.usefixtures("at_work")
def test_what_fails_on_a_worker_says_where(waiting: StudyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(worker, "store_units", fails)
    failure = worker.generate_group(*assigned(waiting))
    assert isinstance(failure, worker.Failure)
    assert failure.worker == "tcp://there:1"
    line = r"worker tcp://there:1 on .*: MemoryError: MemoryError"
    assert re.fullmatch(line, str(failure.error))


@pytest.mark.usefixtures("at_work")
def test_a_worker_ends_where_its_gpu_computes_nothing_more(
    waiting: StudyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other errors of CUDA are errors of the document; another worker does the work of a worker that ended."""
    said = "CUDA error: invalid argument"

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError(f"{said}\nCUDA kernel errors might be asynchronously reported")

    def ends(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(worker, "store_units", fails)
    monkeypatch.setattr("os._exit", ends)
    failure = worker.generate_group(*assigned(waiting))
    assert isinstance(failure, worker.Failure)
    assert str(failure.error).endswith(f"RuntimeError: {said}")
    said = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(SystemExit):
        worker.generate_group(*assigned(waiting))
    line = f"kvdrift: worker tcp://there:1 on .*: the GPU .*: {said}; .*\n"
    assert re.fullmatch(line, capsys.readouterr().err)


def test_units_that_do_not_show_here_are_an_error(waiting: StudyRun) -> None:
    work = pending_development(waiting.store, waiting.material)
    with pytest.raises(OperationError, match=r"lacks 8 units .* of document"):
        check_stored(waiting.store, waiting.study, work)
