"""Generation in a second process: the events of one process, and the work of a process that ends is done here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from fixtures.small_study import write_study
from fixtures.study_files import load_study

from flows.generation import local as local_generation
from flows.generation.local import LocalGenerator
from flows.generation.named_work import Part
from flows.generation.pending import Work, pending_work
from flows.generation.second_process import generate_beside
from flows.material import gather_material
from schema.errors import OperationError
from schema.store.store import Unit
from schema.study import Study


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return load_study(write_study(tmp_path_factory.mktemp("study")))


def work_of(study: Study) -> Work:
    material = gather_material(study)
    return pending_work(None, material, material.of_split("development"), 4, ())


def by_name(documents: Sequence[Sequence[Unit]]) -> dict[tuple[str, str], Any]:
    return {(unit.record["doc"], unit.record["action"]): unit.events for units in documents for unit in units}


def test_two_processes_give_the_events_of_one(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the second one is killed, and at last the work is given up."""
    work, local = work_of(study), LocalGenerator()
    expected = by_name(list(local(study, work)))
    monkeypatch.setattr(local_generation, "_MUCH", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("generator.transformer.model._PAIRS_AT_ONCE", 1)  # a document to a part
    local.get_ready(study, work)
    second = local._second
    assert second is not None
    there = [units for one in work[:2] for units in second.generate(study, [one])]
    assert by_name([*there, *local(study, work[2:])]) == expected
    second._process.kill()
    assert by_name(list(local(study, work))) == expected
    made = local(study, work)
    next(made)
    made.close()
    assert second._process.poll() is not None
    local.close()


class Fake:
    """Stands for the second process."""

    def __init__(self, error: Exception) -> None:
        self.error, self.closed = error, False

    def generate(self, *_: Study | Part) -> list[list[Unit]]:
        raise self.error

    def close(self) -> None:
        self.closed = True


def test_what_the_second_process_refuses_ends_the_work(study: Study) -> None:
    second: Any = Fake(OperationError("selector Mine: fails"))
    with pytest.raises(OperationError, match="selector Mine: fails"):
        list(generate_beside(second, study, [[one] for one in work_of(study)], lambda *_: []))
    assert second.closed, "the other parts are not waited for"
