"""Work in side processes gives the events of one process; work that ended processes left undone is done here."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures.small_study import write_study
from fixtures.study_files import load_study
from matplotlib.figure import Figure
from safetensors.numpy import load_file, save_file

from kvdrift.flows.generate import local as side_processes
from kvdrift.flows.generate.local import LocalGenerator, SideBySideGenerator, work_beside
from kvdrift.flows.material import gather_material
from kvdrift.flows.pages.reports import draw_beside
from kvdrift.flows.run.study_run import pending_work
from kvdrift.generator.generation import Work
from kvdrift.generator.transformer.decoder import ONE_THREAD_PARAMETERS
from kvdrift.generator.transformer.files.local_folders import model_folder
from kvdrift.log.store import Unit
from kvdrift.report.figures.canvas import new_figure
from kvdrift.report.sections.section import Drawing
from kvdrift.schema.errors import OperationError
from kvdrift.schema.study import Study


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    coded = ('selector = "recent"\n', 'selector = "recent"\ncodec = "int8"\n')
    return load_study(write_study(tmp_path_factory.mktemp("study"), coded))


def work_of(study: Study) -> Work:
    material = gather_material(study)
    return pending_work(None, material, material.of_split("development"), 4, ())


def by_name(documents: Sequence[Sequence[Unit]]) -> dict[tuple[str, str], Any]:
    return {(unit.record["doc"], unit.record["action"]): unit.events for units in documents for unit in units}


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[SideBySideGenerator]:
    """Two processes for however little work, on however small a machine; a document to a part."""
    monkeypatch.setattr(side_processes, "_MUCH", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(side_processes, "together", lambda _, work, __: ([one] for one in work))
    with closing(SideBySideGenerator(LocalGenerator())) as made:
        yield made


@pytest.mark.slow
def test_side_processes_give_the_events_of_this_one(study: Study, beside: SideBySideGenerator) -> None:
    """Then they are killed amid the work, and at last the work is given up."""
    work = work_of(study)
    expected = by_name(list(LocalGenerator()(study, work)))
    assert by_name(list(beside(study, work))) == expected
    assert beside.sides is not None
    assert beside.sides.submit(os.getpid).result() != os.getpid()
    os.kill(beside.sides.submit(os.getpid).result(), signal.SIGKILL)
    assert by_name(list(beside(study, work))) == expected
    made = beside(study, work)
    next(made)
    made.close()
    assert beside.sides is None


def test_processes_that_ended_before_their_model_was_loaded_are_done_without(
    study: Study, beside: SideBySideGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = work_of(study)
    beside.get_ready(study, work)
    assert beside.sides is not None
    for process in multiprocessing.active_children():
        process.kill()
    monkeypatch.setattr(beside, "get_ready", lambda *_: None)
    assert len(list(beside(study, work))) == len(work)
    assert beside.sides is None


def test_no_side_process_loads_a_model_that_takes_several_threads(
    study: Study, beside: SideBySideGenerator, tmp_path: Path
) -> None:
    """Side processes would not generate for such a model, however small its file is, and would hold it all the same."""
    folder = shutil.copytree(model_folder("kvdrift/tiny"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["unused"] = np.zeros(ONE_THREAD_PARAMETERS, dtype=np.int8)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    large = study.model_copy(update={"model": study.model.model_copy(update={"id": str(folder)})})
    beside.get_ready(large, work_of(study))
    assert beside.sides is None


class Fake:
    """Stands for the side processes, in which everything fails."""

    def __init__(self, error: Exception) -> None:
        self.error, self.killed = error, False

    def submit(self, *_: object) -> Future[Any]:
        failed = Future[Any]()
        failed.set_exception(self.error)
        return failed

    def kill(self) -> None:
        self.killed = True


def test_what_a_side_process_refuses_ends_the_work(study: Study) -> None:
    sides: Any = Fake(OperationError("selector Mine: fails"))
    with pytest.raises(OperationError, match="selector Mine: fails"):
        list(work_beside(sides, work_of(study), print, lambda _: []))
    assert sides.killed, "the other parts are not waited for"


@pytest.fixture(scope="module", autouse=True)
def unwritten_figures() -> None:
    """Figures are written here."""


@pytest.mark.parametrize("error", [BrokenProcessPool(), ValueError("no canvas"), TypeError("cannot pickle")])
def test_figures_that_the_side_processes_do_not_draw_are_drawn_here(error: Exception, tmp_path: Path) -> None:
    sides: Any = Fake(error)
    drawings = [Drawing(name, "A line", empty_figure) for name in ("one", "two", "three")]
    drawn = draw_beside(sides)(drawings, tmp_path)
    assert drawn.keys() == {"one", "two", "three"}
    assert len(list(tmp_path.glob("*.pdf"))) == len(drawings)
    assert not sides.killed, "they may generate again"


def test_a_figure_that_fails_ends_the_page(tmp_path: Path) -> None:
    """The error is the line of the file system, as without side processes."""
    sides: Any = Fake(OSError(28, "No space left on device"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        draw_beside(sides)([Drawing("one", "A line", empty_figure)], tmp_path / "nowhere")
    assert sides.killed


def empty_figure() -> Figure:
    return new_figure(1, 1)
