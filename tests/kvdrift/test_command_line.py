"""Examples below the help, completion in shells, answers as JSON, and the lines printed before anything is loaded."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import shlex
import subprocess
import sys
import time
import warnings
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer.main
from fixtures.command import call, mistake
from fixtures.finite_study import write_finite_study
from fixtures.house import ROOT
from fixtures.refusals import refused
from fixtures.small_study import write_study

import kvdrift
from kvdrift import console
from kvdrift.command import app
from kvdrift.completion import views
from kvdrift.console import ConsoleProgress, LogLines
from kvdrift.flows.run import study as study_file
from kvdrift.flows.run.study import Outcome
from kvdrift.log.store import Store
from kvdrift.schema.errors import OperationError
from kvdrift.sql.catalog import describe_views

GROUP: Any = typer.main.get_command(app)
EXAMPLES = {
    name: re.findall(r"^  (kvdrift .*)$", command.epilog, re.MULTILINE) for name, command in GROUP.commands.items()
}


def test_every_command_has_examples_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    context = GROUP.make_context("kvdrift", [], resilient_parsing=True)
    for name, examples in EXAMPLES.items():
        assert examples, name
        for example in examples:
            program, command, *arguments = shlex.split(example)
            assert (program, command) == ("kvdrift", name)
            GROUP.commands[name].make_context(name, arguments, parent=context)  # refuses what it does not know
    code, out, _ = call(capsys, "gate", "--help")
    assert code == 0
    assert "Examples:\n    kvdrift gate stores/quickstart --quantity mismatch " in out


def test_summaries_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Each summary is the first sentence of its command's docstring."""
    _, out, _ = call(capsys, "--help")
    summaries = " ".join(out.partition("Commands:")[2].split())
    for name, command in GROUP.commands.items():
        sentence = " ".join(command.help.split("\n\n")[0].split()).partition(". ")[0].removesuffix(".")
        assert f"{name} {sentence}." in summaries


def test_the_examples_of_sql_give_a_row_for_each_action_and_stratum(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No example mixes splits, or strata with the rows that pool them."""
    first, second = [shlex.split(example)[3] for example in EXAMPLES["sql"][:2]]
    actions = {"full", "recent-half", "snapkv-half"}
    rows = json.loads(call(capsys, "sql", finished, first, "--format", "json")[1])
    assert sorted(row["action"] for row in rows) == sorted(actions)
    rows = json.loads(call(capsys, "sql", finished, second, "--format", "json")[1])
    assert len({(row["stratum"], row["action"]) for row in rows}) == len(rows)
    assert {row["action"] for row in rows} <= actions


def test_a_query_without_quotes_and_misspelt_names_in_one(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = mistake(capsys, "sql", finished, "from", "summary")
    assert line.endswith(f'kvdrift sql {finished} "from summary"\n')
    query = "select tau from analyzed_trajectories where action = '{}' and split = '{}'"
    code, out, err = call(capsys, "sql", finished, query.format("snapkv-hafl", "evalution"))
    assert (code, out.split()) == (0, ["tau"])
    assert re.findall(r"'.*?'", err) == ["'snapkv-hafl'", "'snapkv-half'", "'evalution'", "'evaluation'"]
    assert call(capsys, "sql", finished, query.format("full", "evaluation"))[2] == ""


def test_python_takes_who_generates_as_the_command_does(tmp_path: Path) -> None:
    study = write_study(tmp_path)
    both = refused(kvdrift.run, study, endpoint="grpc://localhost:1", cluster="local:2")
    assert both.startswith("--cluster and --endpoint: ")
    assert "--token-file: " in refused(kvdrift.run, study, token_file=tmp_path / "token")


def test_shells_complete_commands_stores_actions_and_views(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def completed(words: str) -> list[str]:
        """Return the words that bash offers for the last word."""
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
        return call(capsys)[1].split("\n")[:-1]

    (tmp_path / "stores").mkdir()
    (tmp_path / "stores" / "small").symlink_to(finished)
    (tmp_path / "mine.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("_KVDRIFT_COMPLETE", "complete_bash")
    assert completed("kvdrift ve") == ["verify"]
    assert completed("kvdrift status ") == ["stores/small"]
    assert completed("kvdrift status stores/s") == ["stores/small"]
    assert completed("kvdrift schedule mi") == ["mine.toml"]
    assert completed("kvdrift list se") == ["selectors"]
    assert completed("kvdrift drop stores/small --action snap") == ["snapkv-half"]


def test_views_that_are_steps_to_others_are_not_offered() -> None:
    offered = {query.removeprefix("from ") for query in views("")}
    assert "summary" in offered
    assert offered <= {one.view for one in describe_views()}


def test_verify_and_list_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty store is sound."""
    code, out, _ = call(capsys, "verify", Store.create(tmp_path / "store").location, "--json")
    found = json.loads(out)
    assert (code, found["sound"], found["repaired"]) == (0, True, [])
    assert all(check["faults"] == [] for check in found["checks"])
    code, out, _ = call(capsys, "list", "tasks", "--json")
    assert (code, "needle" in [row["name"].partition(": ")[2] for row in json.loads(out)["tasks"]]) == (0, True)


def test_without_a_terminal_a_line_says_what_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that ends by then gets no line, and neither does work done before a stage began."""
    monkeypatch.setattr("kvdrift.console.QUIET_SECONDS", 0.2)
    with ConsoleProgress() as console:
        console.doing("loading")
        console.doing("deriving")
        time.sleep(0.6)
        console.doing("starting")
        console.begin("documents", 1, "documents")
        time.sleep(0.4)
        console.doing("ending")
        console.begin("bootstrap", 1, "parts")
    time.sleep(0.4)
    assert capsys.readouterr().err.splitlines() == [
        "deriving",
        "documents: 1 document to do",
        "bootstrap: 1 part to do",
    ]


def test_a_terminal_is_told_what_is_done_before_it_is_done(tmp_path: Path) -> None:
    """Libraries take seconds to load, and none is loaded when the first words appear."""
    ours, theirs = pty.openpty()
    program = (
        "import sys\nfrom kvdrift.console import ConsoleProgress\n"
        "said = ConsoleProgress.doing\n"
        "def doing(self, what):\n"
        "    said(self, what)\n"
        "    print('LOADED', {'kvdrift.schema.study', 'pyarrow', 'numpy', 'torch'} & set(sys.modules), file=open(sys.argv[1], 'a'))\n"
        "ConsoleProgress.doing = doing\n"
        "from kvdrift.command import main\nmain(['run', 'nowhere.toml'])\n"
    )
    environment = os.environ | {"TERM": "xterm", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "loaded")],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, env=environment, check=False,
    )  # fmt: skip
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 2
    assert shown.index("loading what nowhere.toml needs") < shown.index("nowhere.toml: no such study file")
    assert (tmp_path / "loaded").read_text().splitlines()[0] == "LOADED set()"


def test_lines_name_a_store_without_two_dots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own").mkdir()
    Store.create(tmp_path / "quickstart")
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, "status", "own/../quickstart")
    assert (code, err) == (0, "")
    assert f"store: {tmp_path}/quickstart\n" in out
    assert "/.." not in out


# With --log-json every line on standard error is a JSON object with a time, whatever is said or goes wrong


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
