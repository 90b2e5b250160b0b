"""``kvdrift gate --junit FILE``: the file has the answer, or says error whatever ended the call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree as ET

import pytest
from fixtures.command import call, mistake

from kvdrift.flows.estimate import gate as gating
from kvdrift.junit import JUnitFile
from kvdrift.schema.errors import DamagedStoreError

BETTER = ("--action", "snapkv-half", "--baseline", "recent-half")
WORSE = ("--action", "recent-half", "--baseline", "snapkv-half")

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
