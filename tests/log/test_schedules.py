"""Two to eight writers at once, stopped and killed between any two steps: an own model says what must be there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from faults.outcomes import SURVIVED, tell
from fixtures.schedules import faults, run, template
from fixtures.turns import stopping

from kvdrift.log.store import Store
from kvdrift.log.units import commits
from kvdrift.log.units.commits import ContradictionError, UnitCommits
from kvdrift.verification.whole_store import verify

SCHEDULES = int(os.environ.get("KVDRIFT_SCHEDULES", "300"))  # of the long run
DEFAULT = 10  # schedules of the default run
VERIFIED = 50  # each of so many schedules is verified as a whole


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Path]:
    """The store that schedules begin with, in memory if there is a file system in memory."""
    memory = Path("/dev/shm")  # noqa: S108 - a folder of its own below
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield template(Path(folder))


def found_by(seeds: range, begun: Path) -> Iterator[tuple[int, str]]:
    """Run schedules, and yield the seed of each with faults, with its first fault."""
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch)
        for seed in seeds:
            outcome = run(seed, begun)
            found = faults(outcome)
            if seed % VERIFIED == 0:
                store = Store.open(outcome.location)
                found += [str(fault) for check in verify(store) for fault in check.faults]
            if found:
                yield seed, found[0]
            shutil.rmtree(outcome.location)


def test_nothing_is_lost_doubled_or_mixed(begun: Path) -> None:
    assert [*found_by(range(DEFAULT), begun)] == []


@pytest.mark.slow
def test_nothing_is_lost_doubled_or_mixed_in_many_schedules(begun: Path) -> None:
    assert [*found_by(range(DEFAULT, DEFAULT + SCHEDULES), begun)] == []
    tell(
        "concurrency",
        "a random schedule of two to eight writers, stopped and killed between any two steps",
        [SURVIVED] * SCHEDULES,
    )


def compare_at_the_start(patch: pytest.MonkeyPatch) -> None:
    """Compare units with what the store had when the writer began, and with nothing at the commit."""
    init, append = UnitCommits.__init__, UnitCommits.append_complete

    def begin(self: Any, *given: Any) -> None:
        init(self, *given)
        self.at_start = self._folder.read(self._folder.load("units"), ["unit", "events_sha256"]).to_pylist()

    def append_compared(self: Any, records: Any, rows: pa.Table) -> set[int]:
        there = {row["unit"]: row["events_sha256"] for row in self.at_start}
        if other := [one for one in records if there.get(one["unit"], one["events_sha256"]) != one["events_sha256"]]:
            raise ContradictionError.of([(record, rows) for record in other], "the store had other events")
        return append(self, records, rows)

    patch.setattr(UnitCommits, "__init__", begin)
    patch.setattr(UnitCommits, "append_complete", append_compared)
    patch.setattr(commits, "other_content", lambda *_: [])


def guard_no_group(patch: pytest.MonkeyPatch) -> None:
    """Commit units without the ids by which a later commit of the same group is noticed."""
    patch.setattr(commits, "guards_of", lambda _: [])


def guard_no_study(patch: pytest.MonkeyPatch) -> None:
    """Commit the first units of a study without the id by which another beginning is noticed."""
    check = UnitCommits.check_conditions
    patch.setattr(UnitCommits, "check_conditions", lambda *given: check(*given) and [])


@pytest.mark.slow
@pytest.mark.parametrize("plant", [compare_at_the_start, guard_no_group, guard_no_study])
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(fault.startswith(("lost", "doubled", "mixed")) for _, fault in found_by(range(200), begun))
