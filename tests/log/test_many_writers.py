"""Writers of one log: what others append is told from the log, and nothing is lost."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from fixtures.stored_units import killed_in, make_unit

from benchmarks.commits import simulate
from kvdrift.flows.cluster.worker import LOCAL, Pace
from kvdrift.log.delta.versions import ATTEMPTS, longest_wait
from kvdrift.log.store import Store
from kvdrift.log.units import commits
from kvdrift.log.units.rows import UnitCounts
from kvdrift.log.units.unit import unit_number
from kvdrift.schema.errors import InputError
from kvdrift.schema.locking import in_turn


@pytest.fixture
def writer(tmp_path: Path) -> Store:
    """A writer that has appended a unit of its own."""
    store = Store.create(tmp_path / "store")
    store.append_units([make_unit("own")])
    store.append_units([make_unit("own", first=4)])  # the first commit of a study concerns every writer of the study
    return store


@pytest.fixture
def other(writer: Store) -> Store:
    """Another writer, which has appended six units since, each by a commit."""
    store = Store.open(writer.location)
    for number in range(6):
        store.append_units([make_unit(f"other-{number}")])
    return store


@pytest.mark.usefixtures("other")
def test_a_writer_reads_no_rows_of_others(writer: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = list[int]()
    of = UnitCounts.of
    monkeypatch.setattr(UnitCounts, "of", lambda rows: counted.append(rows.num_rows) or of(rows))
    assert writer.append_units([make_unit("new")]) == 1
    assert counted == [1, 1]  # two rows of its own, and none of the six others
    assert writer.stored_units([make_unit("new").record, make_unit("newer").record]) == {
        unit_number(make_unit("new").record)
    }


def test_a_unit_that_another_writer_has_appended_is_not_appended_again(writer: Store, other: Store) -> None:
    there, here = make_unit("other-3"), make_unit("new")
    assert writer.stored_units([there.record, here.record]) == {unit_number(there.record)}
    assert writer.append_units([there, here]) == 1
    assert writer.append_units([make_unit("other-3", first=4)]) == 1
    assert other.append_units([make_unit("other-3", first=4)]) == 0
    with pytest.raises(InputError, match=r"overlaps the replicates \[4, 8\)"):
        writer.append_units([make_unit("other-3", first=6)])
    assert len(writer.units()) == 10


def test_events_that_another_writer_left_without_their_row(
    writer: Store, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_in(monkeypatch, commits, "as_rows"):
        other.append_units([make_unit("left")])
    assert writer.append_units([make_unit("left"), make_unit("new")]) == 1
    assert writer.row_count("events") == Store.open(writer.location).row_count("events") == 10 * 32
    assert writer.append_units([make_unit("left")]) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("other")
def test_rows_whose_files_were_put_together_are_read_again(writer: Store) -> None:
    another = Store.open(writer.location)
    for table in ("events", "units"):
        another.compact(table)
        another.delete_replaced(table, timedelta())
    assert writer.append_units([make_unit("other-3"), make_unit("own"), make_unit("new")]) == 1
    assert len(writer.units()) == 9


def test_waits_grow_with_each_lost_race_up_to_a_bound() -> None:
    waits = [longest_wait(turn, 0.01) for turn in range(ATTEMPTS)]
    assert waits[:4] == [0.01, 0.02, 0.04, 0.08]
    assert waits[-1] == max(waits) == longest_wait(ATTEMPTS, 10.0)


def test_a_writer_whose_turn_does_not_end_is_not_waited_for(writer: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdrift.schema.locking.STUCK", 0.1)
    with in_turn(Path(writer.location, "events", "_delta_log"), lambda: 0):
        assert Store.open(writer.location).append_units([make_unit("new")]) == 1
    assert len(writer.units()) == 3


def test_writers_whose_turns_go_on_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as versions come."""
    monkeypatch.setattr("kvdrift.schema.locking.STUCK", 0.01)
    order = list[str]()

    def take_turn() -> None:
        with in_turn(tmp_path, itertools.count().__next__):
            order.append("second")

    with ThreadPoolExecutor(1) as threads:
        with in_turn(tmp_path, lambda: 0):
            waiting = threads.submit(take_turn)
            with pytest.raises(TimeoutError):
                waiting.result(0.3)
            order.append("first")
        waiting.result()
    assert order == ["first", "second"]


def test_writers_at_once_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As workers of a cluster commit, but ten times as often, and in threads of this process."""
    monkeypatch.setattr("benchmarks.commits.ProcessPoolExecutor", lambda count, **_: ThreadPoolExecutor(count))
    monkeypatch.setattr("benchmarks.commits.LOCAL", Pace(LOCAL.least / 10, LOCAL.rate * 10))
    found = simulate(str(tmp_path / "store"), 4, 2)
    assert (found.lost, found.doubled) == (0, 0)


@pytest.mark.slow
def test_200_workers_of_a_cluster_lose_nothing(tmp_path: Path) -> None:
    found = simulate(str(tmp_path / "store"), 200, 1)
    assert (found.lost, found.doubled) == (0, 0)
