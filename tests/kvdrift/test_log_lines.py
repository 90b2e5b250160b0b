"""``kvdrift run --log-json``: every line on standard error is a JSON object with a time, whatever is said or goes wrong."""

from __future__ import annotations

import json
import logging
import warnings
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fixtures.command import call
from fixtures.finite_study import write_finite_study

from kvdrift import console
from kvdrift.console import LogLines
from kvdrift.flows.run import study as study_file
from kvdrift.flows.run.study import Outcome
from kvdrift.schema.errors import OperationError


def read(err: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in err.splitlines()]
    for line in lines:
        at = datetime.fromisoformat(line["time"])
        assert line["time"].endswith("Z")
        assert abs(datetime.now(UTC) - at) < timedelta(hours=1)
        assert line["level"] in {"info", "warning", "error"}
        assert line["message"]
    return lines


@pytest.mark.parametrize("error", [None, OperationError("the disk is full")])
def test_a_run_says_everything_in_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OperationError | None
) -> None:
    def run_file(*given: Any, **_: Any) -> Outcome:
        progress = given[3]
        progress.begin("evaluation documents", 3, "documents")
        progress.advance(3)
        progress.say("two\nlines of 'text' and \x1b[31mcolours")
        warnings.warn("as libraries do", stacklevel=1)
        logging.getLogger("library").warning("took %d s", 7)
        if error is not None:
            raise error
        return Outcome("the store", [], 0, did_something=True)

    monkeypatch.setattr(study_file, "run_file", run_file)
    code, out, err = call(capsys, "run", write_finite_study(tmp_path), "--log-json")
    lines = read(err)
    progress = [line for line in lines if "stage" in line]
    assert [(line["stage"], line["done"], line["total"], line["unit"]) for line in progress] == [
        ("evaluation documents", 0, 3, "documents"), ("evaluation documents", 3, 3, "documents"),
    ]  # fmt: skip
    assert "rate" not in progress[0]
    assert progress[1]["rate"] > 0
    assert progress[1]["seconds_left"] == 0
    said = {line["message"]: line for line in lines}
    assert "two\nlines of 'text' and \x1b[31mcolours" in said
    assert (said["took 7 s"]["level"], said["took 7 s"]["logger"]) == ("warning", "library")
    assert any("as libraries do" in message for message in said)
    if error is not None:
        assert (code, out) == (1, "")
        assert (lines[-1]["level"], lines[-1]["exit_code"], lines[-1]["message"]) == ("error", 1, "the disk is full")
    else:
        assert (code, out) == (0, "store:  the store\n")
    logging.getLogger("library").warning("after the run")
    assert "after the run" not in capsys.readouterr().err, "the handler is gone"


@pytest.mark.parametrize(
    ("options", "message"), [(("nowhere.toml",), "nowhere.toml: no such study file"), (("--nope",), "--nope")]
)
def test_a_mistake_is_a_line_too(options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "run", *options, "--log-json", "--debug")
    line = read(err)[-1]
    assert (code, out, line["level"], line["exit_code"]) == (2, "", "error", 2)
    assert message in line["message"]


def test_rates_do_not_hang_on_a_clock_that_jumps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two positions a second by the monotonic clock, while the wall clock is set back ten years."""
    seconds = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: seconds)

    class Back(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime(2026 - int(seconds), 1, 1, tzinfo=tz)

    monkeypatch.setattr(console, "datetime", Back)
    with LogLines() as lines:
        lines.begin("steps", 100, "steps")
        for _ in range(12):
            seconds += 1.0
            lines.advance(2)
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["done"], line.get("rate"), line.get("seconds_left")) for line in said] == [
        (0, None, None), (20, 2.0, 40.0),
    ]  # fmt: skip
    assert [line["time"][:4] for line in said] == ["2026", "2016"]
