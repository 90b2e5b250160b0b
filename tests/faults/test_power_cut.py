"""After a power cut, in every state that the fsyncs of real commits allow, nothing acknowledged is missing."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.disk.crash_states import Disk, Operation, State, put_down, record
from faults.disk.recorded_commits import STORE, go_on
from faults.outcomes import MENDED, SURVIVED, tell
from fixtures.house import ROOT

PROGRAM = Path(__file__).parent / "disk" / "recorded_commits.py"
TRIED = 16  # states in the default suite


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out fsyncs of the test's own disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="module")
def operations(library: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Operation]:
    return record(library, tmp_path_factory.mktemp("recorded"), [str(PROGRAM)], [ROOT, ROOT / "tests"])


def crash_states(operations: list[Operation]) -> Iterator[tuple[State, tuple[str, ...]]]:
    """Every state once, with everything acknowledged before the first power cut that can leave this state."""
    disk, seen = Disk(), set[tuple[object, ...]]()
    for operation in operations:
        disk.do(operation)
        for state in disk.states():
            key = (*sorted((path, hash(data)) for path, data in state.items()), len(disk.acknowledged))
            if key not in seen:
                seen.add(key)
                yield state, tuple(disk.acknowledged)


def test_what_is_acknowledged_is_durable(operations: list[Operation]) -> None:
    """When a call has returned, no power cut can change its files, log files and folders."""
    disk, told = Disk(), []
    for operation in operations:
        before = len(disk.acknowledged)
        disk.do(operation)
        if len(disk.acknowledged) > before:
            assert disk.not_durable() == [], disk.acknowledged
            told = disk.acknowledged
    assert told == ["store", "documents", "d0", "d1", "d2", "derived", "catalogue", "d3"]


@pytest.mark.usefixtures("no_waiting")
def test_a_power_cut_loses_nothing_acknowledged(operations: list[Operation], tmp_path: Path) -> None:
    """A few states are tried, chosen anew if the operations change; ``make faults`` tries all states."""
    every = list(crash_states(operations))
    chosen = random.Random(len(every)).sample(every, TRIED)  # noqa: S311
    outcomes = Counter(survive(state, told, tmp_path / str(at)) for at, (state, told) in enumerate(chosen))
    assert outcomes[MENDED] > 1
    assert outcomes[SURVIVED] > 5


@pytest.mark.slow
@pytest.mark.usefixtures("no_waiting")
def test_no_power_cut_loses_anything_acknowledged(operations: list[Operation], tmp_path: Path) -> None:
    every = list(crash_states(operations))
    outcomes = Counter(survive(state, told, tmp_path / str(at)) for at, (state, told) in enumerate(every))
    tell("power cut at every point of a small store's commits", outcomes.elements())


def survive(state: State, told: tuple[str, ...], folder: Path) -> str:
    """Return the outcome of using the store that a power cut left."""
    put_down(state, folder)
    return go_on(folder / STORE, told)
