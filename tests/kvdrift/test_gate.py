"""``kvdrift gate``: its answers, exit codes and refusals, the workflow of ``docs/gate.md``, and the JUnit file."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree as ET

import pyarrow as pa
import pytest
import yaml
from fixtures.command import call, mistake
from fixtures.event_logs import LOG, documents_csv, write
from fixtures.house import ROOT
from fixtures.stored_units import make_unit

import kvdrift
from kvdrift.flows.estimate import gate as gating
from kvdrift.flows.plan.frozen_plan import find_plan
from kvdrift.interrupts import failure_code
from kvdrift.junit import JUnitFile
from kvdrift.log.store import Store
from kvdrift.schema.errors import DamagedStoreError
from kvdrift.schema.tables import ACTIONS
from kvdrift.sql.catalog import Views

PAGE = (ROOT / "docs" / "gate.md").read_text(encoding="utf-8")
WORKFLOW = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])
STEPS = {step["name"]: step for step in WORKFLOW["jobs"]["gate"]["steps"] if "name" in step}
BETTER, WORSE = ("--action", "snapkv-half", "--baseline", "recent-half"), (
    "--action", "recent-half", "--baseline", "snapkv-half",
)  # fmt: skip


def test_an_answer_says_how_many_documents_would_exclude_failures_that_none_shows(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of n documents a share 1 - .05^(1/n) may be missing, and lose all; the rest differ as the six that are seen."""
    for margin, missing in ((0.02, True), (0.4, False)):
        _, out, _ = call(capsys, "gate", finished, "--quantity", "mismatch", *BETTER, "--margin", str(margin), "--json")
        answer = json.loads(out)
        allowed = (margin - answer["estimate"]) / (1 - answer["estimate"])
        least = math.log(0.05) / math.log(1 - allowed)
        assert (answer["decision"], least > 6) == ("equivalent or better", missing)
        if missing:
            assert least <= answer["documents_for_unseen"] <= 1.01 * least + 1
        else:
            assert answer["documents_for_unseen"] is None


def test_the_interval_is_that_of_the_estimates_at_their_level(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = find_plan(Store.open(finished), "small", "kvdrift/tiny")
    assert plan is not None
    level = 1 - (1 - plan.family.level) / 2
    options = ("--quantity", "gap", *WORSE, "--margin", "0", "--json", "--level", str(level))
    code, out, _ = call(capsys, "gate", finished, *options)
    answer = json.loads(out)
    with kvdrift.open(finished) as views:
        (row,) = views.rows(
            "estimates",
            split="evaluation",
            stratum="pooled",
            quantity="gap",
            action="recent-half",
            baseline="snapkv-half",
        ).to_pylist()
    for name in ("estimate", "draws", "documents", "clusters", "status"):
        assert answer[name] == row[name]
    assert [answer["low"], answer["high"]] == pytest.approx([row["low"], row["high"]], rel=1e-12)
    assert (answer["method"], answer["few_clusters"], answer["exit_code"]) == (row["interval"], True, code)
    assert answer["interval_level"] == pytest.approx(row["level"], abs=1e-12)
    assert answer["versions"] == {
        "kvdrift": kvdrift.__version__, "events": row["events_version"], "plan": plan.sha256,
    }  # fmt: skip
    assert {"decision", "store", "study", "model", "margin", "level", "stratum"} <= answer.keys()


def test_higher_may_be_better_and_what_no_plan_names_is_exploratory(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--quantity", "mean_entry", *BETTER, "--margin", "1", "--stratum", "needle", "--json")
    code, out, _ = call(capsys, "gate", finished, *options)
    answer = json.loads(out)
    assert (answer["higher"], answer["status"], answer["documents"]) == ("better", "exploratory", 3)
    assert answer["exit_code"] == code
    assert (code == 0) == (answer["low"] > -1)


def test_answers_of_documents_can_decide(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--quantity", "accuracy", *WORSE, "--margin", "0.02")
    _, out, _ = call(capsys, "gate", finished, *asked, "--json")
    answer = json.loads(out)
    status = json.loads(call(capsys, "status", finished, "--json")[1])
    assert answer["last_run"]
    for name in ("last_run", "last_estimate", "last_check", "check_faults"):
        assert answer[name] == status[name]
    assert answer["size"]["tables"] == status["size"]["tables"]
    assert answer["waiting_replicates"] == 0
    with kvdrift.open(finished) as views:
        of = views.rows("answers", ("accuracy",), split="evaluation", stratum="pooled", action="recent-half")
        other = views.rows("answers", ("accuracy",), split="evaluation", stratum="pooled", action="snapkv-half")
    assert answer["estimate"] == pytest.approx(of["accuracy"][0].as_py() - other["accuracy"][0].as_py(), abs=1e-12)
    assert (answer["contrast"], answer["higher"], answer["documents"]) == ("accuracy_difference", "better", 6)
    monkeypatch.setattr(gating, "answer_moments", lambda *_: None)
    assert "kvdrift analyze" in mistake(capsys, "gate", finished, *asked)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--quantity", "mismach", *BETTER, "--margin", "0.02"), "'mismach'; did you mean 'mismatch'?"),
        (("--quantity", "entry_cdf", *BETTER, "--margin", "0.02"), "it has a value at each t"),
        (("--quantity", "mismatch", *BETTER, "--margin", "2"), "percentage points"),
        (("--quantity", "mismatch", *BETTER, "--margin", "nan"), "at least 0"),
        (("--quantity", "mismatch", *BETTER, "--margin", "0.02", "--level", "95"), "above 0.5 and below 1"),
        (("--quantity", "mismatch", *BETTER, "--margin", "0.02", "--level", "0.9999"), "levels up to 0.995"),
        (("--quantity", "mismatch", *BETTER, "--margin", "0.02", "--stratum", ""), "--stratum : no such stratum"),
        (("--quantity", "mismatch", *BETTER[:3], "recent-hal", "--margin", "0"), "did you mean 'recent-half'?"),
        (("--quantity", "mismatch", *BETTER[:3], "snapkv-half", "--margin", "0"), "two different actions"),
        (("--quantity", "mismatch", *BETTER[:3], "full", "--margin", "0"), "the full-retention control"),
        (("--quantity", "mismatch", *BETTER), "--margin"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_no_answer(
    finished: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], line: str
) -> None:
    assert line in mistake(capsys, "gate", finished, *options)


def test_a_store_that_is_not_finished_says_what_to_run(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.open(copied)
    (row,) = [one for one in store.read("actions").to_pylist() if one["action"] == "recent-half"]
    added = row | {"action": "recent-new", "prespecified": False}
    store.append_rows("actions", pa.Table.from_pylist([added], schema=ACTIONS.schema))
    asked = ("--quantity", "mismatch", "--baseline", "snapkv-half", "--margin", "0.02")
    line = mistake(capsys, "gate", copied, *asked, "--action", "recent-new")
    assert "'recent-new' has 0 of the 6 " in line
    assert "kvdrift run STUDY.toml" in line
    store.append_units([make_unit()])
    line = mistake(capsys, "gate", copied, *asked, "--action", "recent-half")
    assert f"kvdrift derive {copied}" in line
    assert "is not a kvdrift store" in mistake(capsys, "gate", copied / "nowhere", *asked, "--action", "recent-half")


def test_a_failure_is_no_answer(
    copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("gate", copied, "--quantity", "mismatch", *BETTER, "--margin", "0.02")
    rows, moved = Views.rows, pa.table({"moved_pairs": [3]})
    with monkeypatch.context() as patch:
        patch.setattr(
            Views, "rows", lambda of, view, *_, **__: moved if view == "controls" else rows(of, view, *_, **__)
        )
        code, out, err = call(capsys, *asked)
        assert (code, out) == (4, "")
        assert "3 pairs of " in err
    (log, *_) = sorted((copied / "trajectories").rglob("*.parquet"))
    log.write_bytes(log.read_bytes()[:-100])
    code, out, err = call(capsys, *asked)
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert failure_code(["gate"]) == 4
    assert failure_code(["run"]) == 1


def test_a_package_that_is_missing_is_no_answer(tmp_path: Path) -> None:
    """Through the real command, whose own imports fail."""
    (tmp_path / "typer.py").write_text("raise ImportError('no typer')\n")
    for command, code in (("gate", 4), ("run", 1)):
        program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from kvdrift.program import program; program()"
        done = subprocess.run([sys.executable, "-c", program, command], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (code, "")
        assert "no typer" in done.stderr


def test_another_generators_log_has_no_plan_and_may_have_no_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = pa.concat_tables([LOG, _renamed(LOG, "half", "other")])
    store, documents = tmp_path / "store", documents_csv(tmp_path)
    assert (
        call(capsys, "ingest", write(tmp_path / "log.parquet", log), "--store", store, "--documents", documents)[0] == 0
    )
    assert call(capsys, "derive", store)[0] == 0
    asked = ("--quantity", "mismatch", "--action", "other", "--baseline", "half", "--margin", "0.02", "--json")
    code, out, err = call(capsys, "gate", store, *asked)
    answer = json.loads(out)
    assert (code, err, answer["decision"], answer["status"]) == (3, "", "unresolved", "exploratory")
    assert (answer["estimate"], answer["low"], answer["high"], answer["documents"]) == (0.0, None, None, 2)
    assert answer["versions"]["plan"] is None


@pytest.mark.parametrize(("code", "shown"), [(0, 0), (1, 1), (2, 2), (3, 0), (4, 4), (137, 137)])
def test_the_workflow_passes_what_passes(tmp_path: Path, code: int, shown: int) -> None:
    """An unresolved gate is a warning; a call without an answer fails with its own error."""
    program = tmp_path / "kvdrift" / ".venv" / "bin" / "kvdrift"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{{}}'\nexit {code}\n")
    program.chmod(0o755)
    done = run_step(STEPS["Gate"]["run"], tmp_path)
    assert (done.returncode, "::warning::" in done.stdout) == (shown, code == 3)


@pytest.mark.slow
def test_the_workflow_works_from_nothing(tmp_path: Path) -> None:
    """All its own steps but the installation, on the page's study: from nothing, again, and with an edited selector."""
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "gate.toml").write_text(text)
    selector = (ROOT / "generator" / "selectors" / "knorm.py").read_text().replace("class Knorm", "class MySelector")
    (tmp_path / "my_selector.py").write_text(selector)
    decisions = []
    for redo, edited in (("", selector), ("", selector), ("--redo mine", selector.replace("-length", "length"))):
        (tmp_path / "my_selector.py").write_text(edited)
        study = run_step(f"REDO='{redo}'\n{STEPS['Study']['run']}", tmp_path)
        assert study.returncode == 0, study.stderr
        done = run_step(STEPS["Gate"]["run"], tmp_path)
        answer = json.loads(done.stdout.splitlines()[0])
        assert (answer["documents"], answer["status"]) == (24, "seen" if redo else "prespecified")
        when = {"last_run", "last_estimate", "last_check", "size"}
        decisions.append({name: value for name, value in answer.items() if name not in when})
    assert decisions[0] == decisions[1]
    assert decisions[2]["estimate"] != decisions[0]["estimate"]


def run_step(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A step as GitHub runs it, in a folder with kvdrift beside."""
    if not (folder / "kvdrift").exists():
        (folder / "kvdrift").mkdir()
        (folder / "kvdrift" / ".venv").symlink_to(Path(sys.executable).parents[1])
    shell = ["/bin/bash", "-e", "-c", script]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def _renamed(log: pa.Table, old: str, new: str) -> pa.Table:
    rows = log.filter(pa.compute.equal(log["action"], old))
    at = rows.schema.get_field_index("action")
    return rows.set_column(at, rows.schema.field(at), pa.array([new] * rows.num_rows, pa.string()))


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_page_has_the_answer(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = copied / "report" / "small" / "index.html"
    before = page.read_bytes()
    versions = Store.open(copied).versions()
    call(capsys, "gate", copied, "--quantity", "mismatch", *BETTER, "--margin", "0.02", "--no-page")
    assert page.read_bytes() == before
    _, out, _ = call(capsys, "gate", copied, "--quantity", "mismatch", *BETTER, "--margin", "0.02")
    assert f"<li>{out.rstrip()}</li>" in page.read_text(encoding="utf-8")
    assert Store.open(copied).versions() == versions
    call(capsys, "report", copied)
    assert f"<li>{out.rstrip()}</li>" in page.read_text(encoding="utf-8")


# A JUnit file


# What junit-10.xsd allows of the elements that are written here: children, required and optional attributes.
_OUTCOME = (set(), set(), {"type", "message"})
SCHEMA: dict[str, tuple[set[str], set[str], set[str]]] = {
    "testsuites": ({"testsuite"}, set(), {"name", "time", "tests", "failures", "errors"}),
    "testsuite": (
        {"testsuite", "properties", "testcase", "system-out", "system-err"},
        {"name", "tests", "failures", "errors"},
        {"group", "time", "skipped", "timestamp", "hostname", "id", "package", "file", "log", "url"},
    ),
    "properties": ({"property"}, set(), set()),
    "property": (set(), {"name", "value"}, set()),
    "testcase": (
        {"skipped", "error", "failure", "system-out", "system-err"}, {"name"}, {"time", "classname", "group"},
    ),
    "failure": _OUTCOME, "error": _OUTCOME, "skipped": _OUTCOME, "system-out": (set(), set(), set()),
}  # fmt: skip


def checked(file: Path) -> ET.Element:
    """Return the suite of a JUnit file after holding each element against the schema."""
    root = ET.parse(file).getroot()  # noqa: S314 - our own file
    for element in root.iter():
        children, required, optional = SCHEMA[element.tag]
        assert {child.tag for child in element} <= children, element.tag
        assert required <= set(element.attrib) <= required | optional, element.tag
        if element.tag in {"failure", "error"}:
            assert element.attrib["type"]  # the stricter schemas of other readers require a type
    (suite,) = root
    return suite


def said_error(file: Path) -> str:
    """Return the message of a file whose only test has an error."""
    suite = checked(file)
    assert [suite.attrib[name] for name in ("tests", "errors", "failures", "skipped")] == ["1", "1", "0", "0"]
    (error,) = suite.findall("testcase/error")
    return error.attrib["message"]


@pytest.fixture
def passed(tmp_path: Path) -> Path:
    """A JUnit file that an earlier, passing call of the gate has left."""
    file = tmp_path / "gate.xml"
    JUnitFile(file, "gate").write(None, "equivalent or better", "yesterday's answer")
    assert checked(file).find("testcase/error") is None
    return file


def test_answers_are_exit_codes_and_a_file_has_them(
    copied: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """SnapKV is better by tens of points, and six documents do not decide on one point."""
    file = tmp_path / "new" / "gate.xml"
    cases = {0: (*BETTER, "--margin", "0.02"), 1: (*WORSE, "--margin", "0.02"), 3: (*WORSE, "--margin", "0.4")}
    kinds = {0: None, 1: "failure", 3: "skipped"}
    decisions = {0: "equivalent or better", 1: "worse", 3: "unresolved"}
    for code, options in cases.items():
        found, out, err = call(capsys, "gate", copied, "--quantity", "mismatch", *options, "--junit", file)
        suite = checked(file)
        (case,) = suite.iter("testcase")
        assert (found, err, out.count("\n")) == (code, "", 1), out
        assert out.startswith(f"{decisions[code]}: mismatch, ")
        assert "6 documents in 6 clusters (few); " in out
        assert out.endswith("; prespecified\n")
        assert ("rare failures" in out) == (code == 0)
        counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "skipped", "errors")}
        assert counts == {"tests": 1, "failures": int(code == 1), "skipped": int(code == 3), "errors": 0}
        told = [child for child in case if child.tag in {"failure", "skipped", "error"}]
        assert [child.tag for child in told] == ([kinds[code]] if kinds[code] else [])
        assert all(child.attrib["message"] == out.rstrip("\n") for child in told)
        assert case.attrib["name"] == " ".join(["gate", str(copied), "--quantity", "mismatch", *options])
        properties = {one.attrib["name"]: one.attrib["value"] for one in suite.iter("property")}
        assert (properties["exit_code"], properties["store"]) == (str(code), str(copied))
        assert properties["few_clusters"] == "true"
        assert json.loads(properties["versions"])["events"] >= 0
        assert "None" not in properties.values()
        assert "distinguished" not in properties  # null without --over-floor


def test_a_call_with_wrong_options_leaves_an_error(passed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (
        ("gate", "nowhere", "--quantity", "mismatch", *BETTER, "--margin", "0.02", "--junit", passed),
        ("gate", "nowhere", "--quantiy", "mismatch", "--junit", passed, *BETTER),
        ("gate", "nowhere", f"--junit={passed}", "--margin", "wide"),
        ("gate", "--junit", passed),
        ("gate", "nowhere", "--quantity", "mismatch", *BETTER[:2], "--margin", "0", "--junit", passed),
    ):
        JUnitFile(passed, "gate").write(None, "equivalent or better", "yesterday's answer")
        line = mistake(capsys, *wrong)
        assert f"kvdrift: {said_error(passed)}\n" == line


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError("of a\n\x00library"), 4, "RuntimeError: of a"),
        (SystemExit(0), 4, "ended by sys.exit"),
        (DamagedStoreError("table 'events' is damaged"), 4, "table 'events' is damaged"),
        (BrokenPipeError(), 4, "standard output was closed"),
    ],
)
def test_a_call_that_fails_leaves_an_error(
    copied: Path,
    passed: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    code: int,
    message: str,
) -> None:
    def failing(*_: object) -> NoReturn:
        assert "killed" in said_error(passed)  # what a kill -9 leaves at this point
        raise failure

    monkeypatch.setattr(gating, "gate_stored", failing)
    monkeypatch.setattr("sys.stderr.close", lambda: None)
    asked = ("gate", copied, "--quantity", "mismatch", *BETTER, "--margin", "0.02", "--junit", passed)
    assert call(capsys, *asked)[:2] == (code, "")
    assert message in said_error(passed)


def test_an_answer_that_nobody_could_read_is_an_error(
    copied: Path, passed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is 4, so the file must not say that the test passed."""

    def closed(*_: object, **__: object) -> NoReturn:
        raise BrokenPipeError

    monkeypatch.setattr("kvdrift.commands.gate.typer.echo", closed)
    monkeypatch.setattr("sys.stderr.close", lambda: None)
    asked = ("gate", copied, "--quantity", "mismatch", *BETTER, "--margin", "0.02", "--junit", passed)
    assert call(capsys, *asked)[0] == 4
    assert said_error(passed)


def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    line = mistake(capsys, "gate", "nowhere", "--quantity", "mismatch", "--junit", tmp_path / "taken" / "gate.xml")
    assert f"--junit {tmp_path}/taken/gate.xml: cannot be written" in line
