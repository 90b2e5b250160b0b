"""Ages under clocks that leap: what was read in the future is read again, and nothing becomes old too early."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path

import pytest
from fixtures.command import call
from fixtures.stored_units import make_unit

from kvdrift.log import checked_files
from kvdrift.log.checked_files import MEMORY
from kvdrift.log.delta import commits
from kvdrift.log.delta.commits import replaced_files
from kvdrift.log.store import Store

DAY = 24 * 3600.0
NOW = 1.8e9  # seconds since 1970
YEARS = 4 * 366 * DAY


def test_what_was_found_whole_in_the_future_is_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(tmp_path / "store")
    store.append_units([make_unit("d0")])
    with monkeypatch.context() as patch:
        patch.setattr(checked_files.time, "time", lambda: NOW + YEARS)
        assert call(capsys, "verify", store.location, "--since", "0m")[0] == 0
    (path,) = store.paths("events")
    file = Path(store.location, "events", path)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    code, out, _ = call(capsys, "verify", store.location, "--since", "7d")
    assert (code, f"  fault: events/{path}: the content has digest " in out) == (1, True)
    ages = [float(line.split("\t")[2]) for line in Path(store.location, MEMORY).read_text().splitlines()]
    assert max(ages) <= time.time(), "nothing is left of the wrong clock"


def hidden(folder: Path, *times: float | None) -> str:
    """Write a log whose version v, made at a time, hides the file that is named after v."""
    log = folder / "_delta_log"
    log.mkdir()
    for version, at in enumerate(times):
        info = {"operation": "OPTIMIZE", **({} if at is None else {"timestamp": int(at * 1000)})}
        lines = [{"remove": {"path": str(version), "dataChange": False}}, {"commitInfo": info}]
        (log / f"{version:020d}.json").write_text("\n".join(map(json.dumps, lines)))
    return str(folder)


@pytest.mark.parametrize(
    ("times", "old"),
    [
        ((NOW - 9 * DAY, NOW - 8 * DAY, NOW - 6 * DAY), {"0", "1"}),
        # Replaced an hour ago; the clock is four years late now, was so at some commits, or is at each other commit.
        ((NOW - YEARS - DAY, NOW - YEARS), set()),
        ((NOW - DAY, NOW + YEARS, NOW + YEARS + DAY, NOW - 3600.0), set()),
        ((NOW - 1.1 * DAY, NOW + YEARS, NOW - DAY, NOW + YEARS, NOW - 0.9 * DAY), set()),
        # Set to 1970, twice.
        ((NOW - DAY, 0.0, 60.0, NOW - 3600.0, 90.0), set()),
        # A week of right time tells, before and after leaps; commits of other programs may have no time.
        ((NOW - 20 * DAY, NOW + YEARS, NOW - 8 * DAY, None, NOW - 6 * DAY), {"0", "1", "2"}),
    ],
)
def test_no_leap_of_the_clock_makes_a_replaced_file_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: tuple[float | None, ...], old: set[str]
) -> None:
    folder = hidden(tmp_path, *times)
    monkeypatch.setattr(commits.time, "time", lambda: NOW)
    assert replaced_files(folder, timedelta(days=7)) == (max(map(int, old), default=0), old)
    everything = {str(version) for version in range(len(times))}
    assert replaced_files(folder, timedelta())[1] == everything, "no clock decides what 0 days are"
