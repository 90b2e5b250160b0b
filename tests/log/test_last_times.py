"""When a store was last run, estimated and checked: recorded once each, and never later than now."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from kvdrift.log import last_times as times
from kvdrift.log.last_times import FOLDER, LastTimes, last_times, record_check, record_estimates, record_run

NOON = datetime(2026, 11, 28, 12, tzinfo=UTC)


class Clock(datetime):
    """A clock that is set by hand."""

    at = NOON

    @classmethod
    def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
        """Return the time that was set."""
        assert tz is UTC
        return cls.at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> type[Clock]:
    monkeypatch.setattr(Clock, "at", NOON)
    monkeypatch.setattr(times, "datetime", Clock)
    return Clock


def test_each_study_has_its_newest_times(tmp_path: Path, clock: type[Clock]) -> None:
    store = str(tmp_path)
    assert last_times(store) == LastTimes()
    record_run(store, "a", "m")
    record_run(store, "b", "m")
    record_estimates(store, "a", "m", 3)
    record_check(store, 2, whole=True)
    clock.at = NOON + timedelta(days=1)
    record_run(store, "a", "m")
    record_estimates(store, "a", "m", 5)
    found = last_times(store)
    assert found.runs == {("a", "m"): clock.at, ("b", "m"): NOON}
    assert found.estimates == {("a", "m"): (clock.at, 5)}
    assert (found.check, found.faults) == (NOON, 2)


def test_a_partial_check_keeps_the_faults_of_a_whole_one(tmp_path: Path, clock: type[Clock]) -> None:
    store = str(tmp_path)
    for faults, whole, known in ((3, True, 3), (0, False, 3), (5, False, 5), (1, True, 1), (0, True, 0)):
        clock.at += timedelta(hours=1)
        record_check(store, faults, whole=whole)
        assert (last_times(store).check, last_times(store).faults) == (clock.at, known)


def test_a_time_ahead_of_the_clock_counts_as_unknown_until_the_next_one(tmp_path: Path, clock: type[Clock]) -> None:
    store = str(tmp_path)
    clock.at = NOON + timedelta(days=4 * 365)
    record_run(store, "a", "m")
    record_check(store, 0, whole=True)
    clock.at = NOON
    assert last_times(store) == LastTimes()
    record_run(store, "a", "m")
    assert last_times(store).runs == {("a", "m"): NOON}, "an earlier time takes the place of the wrong one"
    clock.at = NOON - timedelta(seconds=5)  # another machine's clock
    assert last_times(store).runs == {("a", "m"): clock.at}, "no age is negative"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"what": "run"}', b'{"what": "check", "at": "noon"}', b"\xff"])
def test_a_record_that_cannot_be_read_is_none(tmp_path: Path, content: bytes) -> None:
    record_run(str(tmp_path), "a", "m")
    (tmp_path / FOLDER / "check-0.json").write_bytes(content)
    assert last_times(str(tmp_path)).check is None
    assert set(last_times(str(tmp_path)).runs) == {("a", "m")}


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    record_run(str(tmp_path), "a", "m")
    (record,) = (tmp_path / FOLDER).iterdir()
    (tmp_path / FOLDER / f".{record.name}.0f.part").write_bytes(b"{")
    record_run(str(tmp_path), "a", "m")
    assert list((tmp_path / FOLDER).iterdir()) == [record]
    assert json.loads(record.read_text())["study"] == "a"


def test_a_place_that_takes_no_file_loses_nothing_else(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    record_run(str(tmp_path), "a", "m")
    assert last_times(str(tmp_path)) == LastTimes()
