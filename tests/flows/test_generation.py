"""Generate a study's events: one model in memory at a time, a limit on documents, and GPUs of one kind."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fixtures.command import mistake
from fixtures.finite_study import write_finite_study
from fixtures.refusals import refused
from fixtures.small_study import run_of, write_study
from fixtures.study_files import load_study

from kvdrift.flows.cluster.generator import ClusterGenerator
from kvdrift.flows.generate.local import LocalGenerator
from kvdrift.flows.generate.storing import Generate, storing
from kvdrift.flows.run import stages
from kvdrift.flows.run.study_run import DocumentLimit, StudyRun, check_gpu_here, gpus_of_units
from kvdrift.generator.attention.row_invariance import TriedSteps
from kvdrift.generator.generation import Work
from kvdrift.generator.generation.units import library_versions
from kvdrift.generator.identity import GpuKinds
from kvdrift.generator.transformer.files.text_ends import TextEnds
from kvdrift.log.store import Store, Unit
from kvdrift.schema.errors import InputError, OperationError
from kvdrift.schema.progress import SILENT
from kvdrift.schema.sampling import FULL_SOFTMAX
from kvdrift.schema.study import Study, load_studies


class Weights:
    """Stands for a model in memory."""

    device = "cpu"
    network = None
    sampling = FULL_SOFTMAX
    steps = TriedSteps()

    @property
    def models(self) -> tuple[Weights, ...]:
        return (self,)

    def ending(self, _tokens: Sequence[int]) -> Weights:
        return self


@pytest.mark.slow
def test_a_model_is_released_before_the_next_one_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    several = ('[model]\nid = "kvdrift/tiny"', '[[model]]\nid = "own/one"\n\n[[model]]\nid = "own/other"')
    one, other = load_studies(write_study(tmp_path, several))
    loaded: list[weakref.ref[Weights]] = []

    def load(*_: Any, **__: Any) -> Weights:
        gc.collect()
        assert [held() for held in loaded] == [None] * len(loaded)
        model = Weights()
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr("kvdrift.generator.transformer.other_weights.model.load_model", load)
    monkeypatch.setattr("kvdrift.flows.generate.local.text_ends", lambda _: TextEnds({}))
    generator = LocalGenerator()
    assert generator.model(one) is generator.model(one)
    assert len(loaded) == 1
    generator.model(other)
    assert len(loaded) == 2


def test_a_limit_is_shared_by_the_studies_of_a_file(tmp_path: Path) -> None:
    """The next run generates the documents beyond the limit; a repeated stage counts no document twice."""
    limit = DocumentLimit(3)
    study = load_study(write_finite_study(tmp_path))
    run = StudyRun(study, str(tmp_path / "store"), storing(LocalGenerator()), limit=limit)
    stages.prepare(run)
    assert stages.develop(run) == 3 * 2  # documents by actions
    assert limit.left_over == 1
    assert stages.develop(run) == 0
    assert limit.left_over == 1
    work = [(document, []) for document in run.material.of_split("development")]
    assert DocumentLimit(2).take("m", work) == work[:2]
    once = DocumentLimit(2)
    assert [len(once.take(model, work)) for model in ("m", "m", "other")] == [2, 2, 0]
    assert once.left_over == 6
    again = StudyRun(study, run.location, storing(LocalGenerator()))
    assert stages.develop(again) == 2
    assert again.limit.left_over == 0


def test_two_threads_that_are_interrupted_are_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C behind the first document, stored units stay, and no thread is left."""
    monkeypatch.setattr("kvdrift.generator.transformer.loading._PAIRS_AT_ONCE", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})

    class Interrupting(type(SILENT)):
        def advance(self, _: int) -> None:
            raise KeyboardInterrupt

    local = LocalGenerator()
    study = load_study(write_study(tmp_path, ("horizon = 12", "horizon = 4")))
    run = StudyRun(study, str(tmp_path / "store"), storing(local), Interrupting())
    stages.prepare(run)
    with pytest.raises(KeyboardInterrupt):
        stages.develop(run)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("generation")]
    assert stages.develop(StudyRun(run.study, run.location, storing(local))) == 3 * 3  # documents by actions
    assert len(run.store.units()) == 4 * 3


def failing(generator: LocalGenerator, *docs: str) -> Generate:
    """Return a generator that fails with the named documents, after it has generated some of its work."""

    def made(study: Study, work: Work) -> Generator[list[Unit], None, None]:
        good = [one for one in work if one[0].doc not in docs]
        yield from generator(study, good[:1] if len(good) < len(work) else good)
        if len(good) < len(work):
            raise OperationError("a selector fails")

    return made


def test_a_document_that_fails_does_not_lose_the_others(tmp_path: Path) -> None:
    """The other documents are generated, then the run fails and names the failing document."""
    local, study = LocalGenerator(), load_study(write_finite_study(tmp_path))
    run = StudyRun(study, str(tmp_path / "store"), storing(local))
    stages.prepare(run)
    first, second, third, fourth = [document.doc for document in run.material.of_split("development")]
    line = refused(lambda: stages.develop(replaced(run, failing(local, second, fourth))), error=OperationError)
    assert line.startswith("2 of 4 documents failed; ")
    assert line.endswith(f": document '{second}': a selector fails; document '{fourth}': a selector fails")
    assert set(run.store.units()["doc"].to_pylist()) == {first, third}
    line = refused(lambda: stages.develop(replaced(run, failing(local, second, fourth))), error=OperationError)
    assert line == "a selector fails"
    assert stages.develop(run) == 2 * 2


def test_documents_that_fail_one_after_the_other_end_the_work(tmp_path: Path) -> None:
    tried = list[int]()

    def made(_: Study, work: Work) -> Generator[list[Unit], None, None]:
        tried.append(len(work))
        if work:
            raise OperationError("no model is there")
        yield []

    run = StudyRun(load_study(write_finite_study(tmp_path)), str(tmp_path / "store"), storing(LocalGenerator()))
    stages.prepare(run)
    assert refused(lambda: stages.develop(replaced(run, made)), error=OperationError) == "no model is there"
    assert tried == [4, 1, 3, 1, 2, 1]


def replaced(run: StudyRun, made_by: Generate) -> StudyRun:
    return StudyRun(run.study, run.location, storing(made_by))


ID = 'id = "binary"'


@pytest.fixture(scope="module")
def begun_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> StudyRun:
    """A study with units of NVIDIA X, to which nothing may be written."""
    folder = tmp_path_factory.mktemp("begun")
    run = run_of(load_study(write_finite_study(folder)), folder / "store")
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.setattr(
            "kvdrift.generator.generation.units.versions_on", lambda _: {**library_versions(), "gpu": "NVIDIA X"}
        )
        stages.prepare(run)
        stages.develop(run)
    return run


@pytest.fixture
def begun(begun_elsewhere: StudyRun, monkeypatch: pytest.MonkeyPatch) -> StudyRun:
    """That study; the machine that goes on has NVIDIA Y."""
    monkeypatch.setattr("kvdrift.flows.run.study_run.gpu_here", lambda _: "NVIDIA Y")
    return begun_elsewhere


def again(run: StudyRun, *changes: tuple[str, str]) -> StudyRun:
    """Return the run of the changed study file on the same store."""
    folder = Path(run.location).parent
    return run_of(load_study(write_finite_study(folder, *changes)), run.location)


def test_another_kind_than_that_of_the_units_is_refused(begun: StudyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the study allows it, on a CPU, or if nothing is to be generated."""
    assert gpus_of_units(begun).names == {"NVIDIA X"}
    line = r"^this machine: computes on NVIDIA Y, .* NVIDIA X; .* mixed_gpus = true under \[model\] "
    for redone in ([], ["mixture"]):  # the control's units stay
        with pytest.raises(InputError, match=line):
            check_gpu_here(again(begun), redone)
    check_gpu_here(again(begun), ["mixture", "full"])
    mixed = again(begun, (ID, f"{ID}\nmixed_gpus = true"))
    assert mixed.study.sha256 == begun.study.sha256, "the store goes on"
    check_gpu_here(mixed)
    assert GpuKinds.of_units([None, json.dumps(dict(library_versions()))]).difference("a", "NVIDIA Y") is None
    with monkeypatch.context() as patch:
        for name in ("pending_development", "pending_work"):
            patch.setattr(f"kvdrift.flows.run.study_run.{name}", lambda *_: [])
        check_gpu_here(again(begun))
    for here in (None, "NVIDIA X"):
        monkeypatch.setattr("kvdrift.flows.run.study_run.gpu_here", lambda _, here=here: here)
        check_gpu_here(again(begun))


def test_the_command_refuses_before_it_writes(begun: StudyRun, capsys: pytest.CaptureFixture[str]) -> None:
    study = write_finite_study(Path(begun.location).parent)
    before = Store.open(begun.location).read("actions")
    for options in ((), ("--redo", "mixture"), ("--dry-run",)):
        line = mistake(capsys, "run", study, "--store", begun.location, *options)
        assert line.startswith("kvdrift: this machine: computes on NVIDIA Y, ")
    assert Store.open(begun.location).read("actions").equals(before)


def test_workers_of_unlike_gpus_are_refused(begun: StudyRun) -> None:
    """Present workers are refused before anything is written; later workers refuse themselves."""
    gpus = {
        "tcp://a:1": ("worker tcp://a:1 on here", "NVIDIA X"),
        "tcp://b:1": ("worker tcp://b:1 on there", "NVIDIA Y"),
    }

    class Workers:
        def check(self, *, resources: dict[str, float]) -> None:
            assert set(resources) <= {"GPU"}

        def workers(self, *_: Any) -> list[str]:
            return list(gpus)

        def ask(self, *_: Any, **__: Any) -> list[tuple[str, str]]:
            return list(gpus.values())

        def say(self, line: str) -> None:
            assert "NVIDIA X" in line

    def there() -> ClusterGenerator:
        return ClusterGenerator(Workers())  # type: ignore[arg-type]

    def on(device: str, **changes: Any) -> Study:
        model = begun.study.model.model_copy(update={"device": device} | changes)
        return begun.study.model_copy(update={"model": model})

    nothing = GpuKinds.of_units([])
    with pytest.raises(InputError, match=r"^worker tcp://b:1 on there: .* NVIDIA Y, worker tcp://a:1 on here "):
        there().check([(on("cuda"), nothing)])
    with pytest.raises(InputError, match=r"^worker tcp://b:1 on there: .* NVIDIA Y, the store's units "):
        there().check([(on("cuda"), gpus_of_units(begun))])
    there().check([(on("cuda", mixed_gpus=True), nothing), (on("cpu"), nothing)])
