"""Work in side processes: the events of one process, and what they do not do, since they ended, is done here."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fixtures.small_study import write_study
from fixtures.study_files import load_study
from matplotlib.figure import Figure

from flows.generate import local as local_generation
from flows.generate.local import LocalGenerator
from flows.generate.named_work import Part
from flows.generate.pending import Work, pending_work
from flows.generate.side_processes import SideProcess, work_beside
from flows.material import gather_material
from flows.pages.reports import _draw_beside
from log.store import Unit
from report.printing.canvas import new_figure
from report.printing.section import Drawing
from schema.errors import OperationError
from schema.study import Study


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    coded = ('selector = "recent"\n', 'selector = "recent"\ncodec = "int8"\n')
    return load_study(write_study(tmp_path_factory.mktemp("study"), coded))


def work_of(study: Study) -> Work:
    material = gather_material(study)
    return pending_work(None, material, material.of_split("development"), 4, ())


def by_name(documents: Sequence[Sequence[Unit]]) -> dict[tuple[str, str], Any]:
    return {(unit.record["doc"], unit.record["action"]): unit.events for units in documents for unit in units}


@pytest.mark.slow
def test_two_processes_give_the_events_of_one(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then one of them is killed, then both, and at last the work is given up."""
    work, local = work_of(study), LocalGenerator()
    expected = by_name(list(local(study, work)))
    monkeypatch.setattr(local_generation, "_MUCH", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(LocalGenerator, "_pairs_beside", lambda *_: 1)  # a document to a part
    local.get_ready(study, work)
    sides = local.sides
    assert sides is not None
    first, second = sides.all
    assert first.call(os.getpid) == sides._process.pid
    assert second.call(os.getppid) == sides._process.pid
    with pytest.raises(RuntimeError, match="FileNotFoundError: "):
        second.call(os.stat, "nowhere")
    there = [units for one in work for units in second.generate(study, [one])]
    assert by_name(there) == expected
    assert by_name(list(local(study, work))) == expected
    os.kill(second.call(os.getpid), signal.SIGKILL)
    assert by_name(list(local(study, work))) == expected
    os.kill(sides._process.pid, signal.SIGKILL)
    assert by_name(list(local(study, work))) == expected
    made = local(study, work)
    next(made)
    made.close()
    assert sides._process.returncode is not None
    assert local.sides is None


def test_a_process_that_ended_before_its_model_was_loaded_is_done_without(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, local = work_of(study), LocalGenerator()
    monkeypatch.setattr(local_generation, "_MUCH", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    local.get_ready(study, work)
    assert local.sides is not None
    local.sides._process.kill()
    monkeypatch.setattr(LocalGenerator, "get_ready", lambda *_: None)
    assert len(list(local(study, work))) == len(work)
    assert local.sides is None


class Fake:
    """Stands for the side processes, in which everything fails."""

    def __init__(self, error: Exception) -> None:
        self.error, self.closed = error, False
        self.all = [self, self]

    def generate(self, *_: Study | Part) -> list[list[Unit]]:
        raise self.error

    def begin(self, *_: object) -> None:
        pass

    def call(self, *_: object) -> Any:
        raise self.error

    def close(self) -> None:
        self.closed = True


def test_what_a_side_process_refuses_ends_the_work(study: Study) -> None:
    sides: Any = Fake(OperationError("selector Mine: fails"))

    def there(side: SideProcess, part: Part) -> list[list[Unit]]:
        return side.generate(study, part)

    with pytest.raises(OperationError, match="selector Mine: fails"):
        list(work_beside(sides, [[one] for one in work_of(study)], there, lambda _: []))
    assert sides.closed, "the other parts are not waited for"


@pytest.mark.parametrize("error", [EOFError(), RuntimeError("ValueError: no canvas"), TypeError("cannot pickle")])
def test_figures_that_the_side_processes_do_not_draw_are_drawn_here(error: Exception, tmp_path: Path) -> None:
    sides: Any = Fake(error)
    drawings = [Drawing(name, "A line", empty_figure) for name in ("one", "two", "three")]
    drawn = _draw_beside(sides)(drawings, tmp_path)
    assert drawn.keys() == {"one", "two", "three"}
    assert len(list(tmp_path.glob("*.pdf"))) == len(drawings)
    assert not sides.closed, "they may generate again"


def test_a_figure_that_fails_ends_the_page(tmp_path: Path) -> None:
    """As it fails without side processes: in the line of the file system."""
    sides: Any = Fake(RuntimeError("OSError: [Errno 28] No space left on device"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        _draw_beside(sides)([Drawing("one", "A line", empty_figure)], tmp_path / "nowhere")
    assert sides.closed


def empty_figure() -> Figure:
    return new_figure(1, 1)
