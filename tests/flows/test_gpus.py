"""Units of a study are made on GPUs of one kind, unless it allows several; nothing is refused on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures.command import mistake
from fixtures.finite_study import write_finite_study
from fixtures.small_study import run_of
from fixtures.study_files import load_study

from flows.cluster.generator import ClusterGenerator
from flows.run import stages
from flows.run.forecast import check_gpu_here, gpus_of_units
from flows.run.study_run import StudyRun
from generator.generation.events import library_versions
from generator.identity import GpuKinds
from log.store import Store
from schema.errors import InputError
from schema.study import Study

ID = 'id = "binary"'


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StudyRun:
    """A study with units of NVIDIA X; the machine that goes on has NVIDIA Y."""
    run = run_of(load_study(write_finite_study(tmp_path)), tmp_path / "store")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("generator.generation.units.versions_on", lambda _: {**library_versions(), "gpu": "NVIDIA X"})
        stages.prepare(run)
        stages.develop(run)
    monkeypatch.setattr("flows.run.forecast.gpu_here", lambda _: "NVIDIA Y")
    return run


def again(run: StudyRun, *changes: tuple[str, str]) -> StudyRun:
    """The run, gone on with."""
    folder = Path(run.location).parent
    return run_of(load_study(write_finite_study(folder, *changes)), run.location)


def test_another_kind_than_that_of_the_units_is_refused(begun: StudyRun) -> None:
    assert gpus_of_units(begun).names == {"NVIDIA X"}
    line = (
        r"^this machine: computes on NVIDIA Y, the store's units were made on NVIDIA X; events of unlike GPUs can differ: "
        r"use one kind, or write mixed_gpus = true under \[model\] of the study file$"
    )
    with pytest.raises(InputError, match=line):
        check_gpu_here(again(begun))
    with pytest.raises(InputError, match=line):
        check_gpu_here(again(begun), ["mixture"])  # the control's units stay
    check_gpu_here(again(begun), ["mixture", "full"])


def test_what_the_study_allows(begun: StudyRun) -> None:
    """The study stays the same, so the store goes on."""
    mixed = again(begun, (ID, f"{ID}\nmixed_gpus = true"))
    assert mixed.study.model.mixed_gpus
    assert mixed.study.sha256 == begun.study.sha256
    check_gpu_here(mixed)


def test_nothing_is_refused_on_a_cpu_or_the_same_kind_or_where_nothing_is_to_be_generated(
    begun: StudyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for here in (None, "NVIDIA X"):
        monkeypatch.setattr("flows.run.forecast.gpu_here", lambda _, here=here: here)
        check_gpu_here(again(begun))
    assert GpuKinds.of_units([None, json.dumps(dict(library_versions()))]).difference("a", "NVIDIA Y") is None
    monkeypatch.setattr("flows.run.forecast.gpu_here", lambda _: "NVIDIA Y")
    monkeypatch.setattr("flows.run.forecast.pending_development", lambda *_: [])
    monkeypatch.setattr("flows.run.forecast.pending_work", lambda *_: [])
    check_gpu_here(again(begun))


def test_the_command_refuses_before_it_writes(begun: StudyRun, capsys: pytest.CaptureFixture[str]) -> None:
    study = Path(begun.location).parent / "finite.toml"
    before = Store.open(begun.location).read("actions")
    for options in ((), ("--redo", "mixture"), ("--dry-run",)):
        line = mistake(capsys, "run", study, "--store", begun.location, *options)
        assert line.startswith("kvdrift: this machine: computes on NVIDIA Y, the store's units were made on NVIDIA X;")
    assert Store.open(begun.location).read("actions").equals(before)


def test_workers_of_unlike_gpus_are_refused(begun: StudyRun) -> None:
    """Present workers are refused before anything is written; later workers refuse themselves."""
    gpus = {
        "tcp://a:1": ("worker tcp://a:1 on here", "NVIDIA X"),
        "tcp://b:1": ("worker tcp://b:1 on there", "NVIDIA Y"),
    }

    class Workers:
        client: Any = None

        def check(self, *, resources: dict[str, float]) -> None:
            assert set(resources) <= {"GPU"}
            self.client = self

        def workers(self, *_: Any) -> list[str]:
            return list(gpus)

        def run(self, *_: Any, **__: Any) -> dict[str, tuple[str, str]]:
            return gpus

        def say(self, line: str) -> None:
            assert "NVIDIA X" in line

    def there() -> ClusterGenerator:
        return ClusterGenerator(Workers())  # type: ignore[arg-type]

    def on(device: str, **changes: Any) -> Study:
        model = begun.study.model.model_copy(update={"device": device} | changes)
        return begun.study.model_copy(update={"model": model})

    nothing = GpuKinds.of_units([])
    with pytest.raises(
        InputError, match=r"^worker tcp://b:1 on there: computes on NVIDIA Y, worker tcp://a:1 on here on"
    ):
        there().check([(on("cuda"), nothing)])
    with pytest.raises(
        InputError, match=r"^worker tcp://b:1 on there: computes on NVIDIA Y, the store's units were made"
    ):
        there().check([(on("cuda"), gpus_of_units(begun))])
    there().check([(on("cuda", mixed_gpus=True), nothing), (on("cpu"), nothing)])
