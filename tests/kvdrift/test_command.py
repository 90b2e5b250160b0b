"""The ``kvdrift`` command: every mistake is one line and exit code 2, every documented command has help."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from fixtures.command import call, mistake
from fixtures.refusals import refused
from fixtures.small_study import run_of, write_study
from fixtures.stored_units import make_unit
from fixtures.study_files import load_study

import kvdrift
from kvdrift.commands import status as commands_status
from kvdrift.commands.report import report_pages
from kvdrift.commands.status import status_lines
from kvdrift.flows.pages import reports as pages
from kvdrift.flows.pages.reports import write_report
from kvdrift.flows.run import stages
from kvdrift.generator.transformer.files import tokenizer
from kvdrift.log.store import Store
from kvdrift.program import program
from kvdrift.schema.errors import OperationError
from kvdrift.schema.tables import ACTIONS

TINY = 'id = "kvdrift/tiny"'


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ([("horizon = 12", "horizn = 12")], ("study.horizn", "'horizon'")),
        ([('baseline = "snapkv-half"', 'baseline = "snapkv-hal"')], ("plan.baseline", "'snapkv-hal'", "'snapkv-half'")),
        ([('"gap", ', '"gaps", ')], ("plan.primary", "'gaps'", "'gap'")),
        ([('"gap", ', '"entry_cdf", ')], ("plan.primary", "'entry_cdf'")),
        ([('stratum = "tracking"', 'stratum = "needle"')], ("strata", "'needle'", "2 times")),
        ([('stratum = "needle"', 'stratum = "pooled"')], ("strata", "'pooled'")),
        ([("[plan]", "[plan")], ("small.toml", "TOML")),
        ([("[model]", "[[model]]"), (TINY, f"{TINY}\n\n[[model]]\n{TINY}")], ("'kvdrift/tiny' is given 2 times",)),
        ([("[model]", "[[model]]"), (TINY, f'{TINY}\n\n[[model]]\nidd = "x"')], ("model.idd", "'id'")),
    ],
)  # fmt: skip
def test_mistakes_in_a_study_file_are_one_line_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: list[tuple[str, str]], parts: tuple[str, ...]
) -> None:
    line = mistake(capsys, "run", write_study(tmp_path, *changes), "--store", tmp_path / "store")
    assert all(part in line for part in parts), line
    assert not (tmp_path / "store").exists()


def test_an_unwritable_store_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    mistake(capsys, "run", write_study(tmp_path), "--store", tmp_path / "file" / "store")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "nowhere.toml"), "nowhere.toml"),
        (("sql", "nowhere", "select 1"), "nowhere is not a kvdrift store"),
        (("drop", "nowhere", "--action", "x"), "nowhere is not a kvdrift store"),
        (("verify", "nowhere", "--repair"), "nowhere is not a kvdrift store"),
        (("list", "view"), "'views'"),
        (("rnu",), "'rnu'"),
        (("run", "--stoer", "x"), "--stoer"),
    ],
)
def test_mistakes_in_a_call_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert message in mistake(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--version") == (0, f"kvdrift {kvdrift.__version__}\n", "")


def test_failures_are_one_line_unless_debugging(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        message = "boom"
        raise RuntimeError(message)

    monkeypatch.setattr("kvdrift.schema.study.load_studies", fail)
    code, _, err = call(capsys, "run", tmp_path / "x.toml")
    assert (code, err.count("\n"), "RuntimeError: boom" in err, "--debug" in err) == (1, 1, True, True)
    code, _, err = call(capsys, "run", tmp_path / "x.toml", "--debug")
    assert code == 1
    assert "Traceback" in err


def test_an_interruption_of_the_work_says_what_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, finished: Path
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvdrift.flows.run.study.run_file", interrupted)
    units = Store.open(finished).row_count("units")
    assert units
    code, out, err = call(capsys, "run", write_study(tmp_path), "--store", finished)
    assert (code, out) == (130, "")
    assert err.startswith(f"kept in {finished}: {units} units\nkvdrift: interrupted; ")
    code, _, err = call(capsys, "run", write_study(tmp_path), "--store", tmp_path / "not-begun")
    assert (code, err.startswith("kvdrift: interrupted; "), err.count("\n")) == (130, True, 1)


@pytest.mark.parametrize(("arguments", "resumed"), [(("run", "x.toml"), True), (("status", "x"), False)])
def test_an_interruption_that_a_library_turned_into_an_error_is_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], *, resumed: bool
) -> None:
    """DuckDB raises RuntimeError for Ctrl-C; only a command that goes on where it stopped is to be called again."""

    def interrupted(*_: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            message = "Query interrupted"
            raise RuntimeError(message) from error

    for function in ("kvdrift.schema.study.load_studies", "kvdrift.log.store.Store.open"):
        monkeypatch.setattr(function, interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's workers ignore it
    try:
        code, out, err = call(capsys, *arguments)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, out, err.count("\n"), "again" in err) == (130, "", 1, resumed)


def test_no_arguments_and_a_short_option_give_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys)
    assert (code, err) == (0, "")
    assert (0, out, "") == call(capsys, "--help") == call(capsys, "-h")
    assert call(capsys, "run", "-h") == call(capsys, "run", "--help")


def test_standard_output_may_be_closed_or_lack_letters() -> None:
    command = [sys.executable, "-m", "kvdrift", "list", "quantities"]
    closed = subprocess.run(["/bin/sh", "-c", 'exec "$@" >&-', "-", *command], capture_output=True, check=False)
    assert (closed.returncode, closed.stderr) == (0, b"")
    named = os.environ | {"PYTHONIOENCODING": "latin-1"}
    latin = subprocess.run(command, capture_output=True, check=False, env=named)
    assert (latin.returncode, latin.stderr) == (0, b"")
    assert b"?" in latin.stdout


def test_an_interruption_while_commands_are_imported_is_quiet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvdrift.command.main", interrupted)
    monkeypatch.setattr("atexit.register", lambda _: None)
    monkeypatch.setattr("gc.set_threshold", lambda *_: None)
    with pytest.raises(SystemExit) as stop:
        program()
    assert stop.value.code == 130
    assert capsys.readouterr() == ("", "")


def test_a_full_disk_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x.svg")

    def fail(*_: object, **__: object) -> None:
        raise full

    monkeypatch.setattr("kvdrift.schema.study.load_studies", fail)
    assert call(capsys, "run", tmp_path / "x.toml") == (1, "", "kvdrift: x.svg: No space left on device\n")
    monkeypatch.setattr("kvdrift.sql.catalog.open_views", fail)
    line = refused(write_report, Store(tmp_path / "store"), "s", "m", tmp_path / "page", error=OperationError)
    assert line.startswith(f"{tmp_path}/page: ")
    assert "x.svg" in line


@pytest.mark.by_default("arguments1-2")
@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["sql", "nowhere", "from events"], 2)])
def test_the_program_ends_with_all_said_and_nothing_taken_apart(
    tmp_path: Path, arguments: list[str], code: int
) -> None:
    text = (
        "import atexit, sys, threading, time; from pathlib import Path; from kvdrift.program import program\n"
        "folder = Path(sys.argv[1]); sys.argv = ['kvdrift', *sys.argv[2:]]\n"
        "class Kept:\n    def __del__(self): (folder / 'taken apart').touch()\n"
        "def write(): time.sleep(0.2); (folder / 'thread').touch(); atexit.register((folder / 'called').touch)\n"
        "kept = Kept(); threading.Thread(target=write).start()\n"
        "print('unflushed', end='')\n"
        "program()\n"
    )
    command = [sys.executable, "-c", text, str(tmp_path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stdout.startswith("unflushed")
    assert {path.name for path in tmp_path.iterdir()} == {"called", "thread"}


class TestSql:
    """``kvdrift sql`` over the finished store."""

    def test_latex(self, capsys: pytest.CaptureFixture[str], finished: Path) -> None:
        _, latex, _ = call(capsys, "sql", finished, "select 'a_b & c%' as \"x_y\"", "--format", "latex")
        assert r"a\_b \& c\%" in latex
        assert r"x\_y" in latex

    def test_wrong_format_and_unwritable_output(self, capsys: pytest.CaptureFixture[str], finished: Path) -> None:
        mistake(capsys, "sql", finished, "select 1", "--format", "tabel")
        mistake(capsys, "sql", finished, "select 1", "--format", "csv", "-o", "/no/such/folder/x.csv")


def test_derive_with_nothing_to_do_where_nothing_may_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Store.create(tmp_path / "store")

    def refuse(folder: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(folder))

    def write(_store: Store) -> None:
        raise OperationError("catalog.duckdb: cannot be written (Read-only file system)")

    monkeypatch.setattr("kvdrift.sql.catalog_file.temporary_folder", refuse)
    monkeypatch.setattr("kvdrift.sql.catalog_file.write_catalog", write)
    code, out, err = call(capsys, "derive", tmp_path / "store")
    assert (code, err) == (0, "")
    assert out.startswith("nothing to derive: all events up to version 0 ")
    assert "catalogue" in out


def test_status_says_what_is_left_and_the_next_command(copied: Path) -> None:
    """An action was redone, one dropped and one added, and none of their units is generated yet."""
    store = Store.open(copied)
    rows = {row["action"]: row for row in store.read("actions").to_pylist()}
    redone, dropped = (rows[name] | {"action_revision": 1} for name in ("recent-half", "snapkv-half"))
    added = rows["recent-half"] | {"action": "added", "prespecified": False}
    later = [redone, dropped | {"dropped": True}, added]
    store.append_rows("actions", pa.Table.from_pylist(later, schema=ACTIONS.schema))
    lines = list(status_lines(store))
    assert "  evaluation: 6 of 6 documents generated, 6 units" in lines  # the control's
    assert "  pending: development of added, 4 units (new)" in lines
    assert "  pending: evaluation of recent-half, 6 units (redone)" in lines
    assert not any("pending" in line and "snapkv-half" in line for line in lines)
    assert "  superseded: recent-half, revision 0, 10 units (revision 1 is current)" in lines
    assert "  superseded: snapkv-half, revision 0, 10 units (dropped)" in lines
    assert lines[-1] == f"  next: kvdrift run STUDY.toml --store {copied}"


def test_status_of_what_is_not_derived_estimated_or_written(copied: Path) -> None:
    (copied / "report" / "small" / "inputs.json").unlink()
    assert list(status_lines(Store.open(copied)))[-1] == f"  next: kvdrift report {copied}"
    shutil.rmtree(copied / "results")
    (store := Store.create(copied)).append_units([make_unit("another")])
    lines = list(status_lines(store))
    assert "  estimates: none yet" in lines
    assert lines[1].endswith("31 units; 1 still to derive")
    assert lines[-1] == f"  next: kvdrift analyze {copied}"


def test_a_compacted_study_is_as_finished_as_before(
    copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there are many files, status names the command that merges them."""
    before = list(status_lines(Store.open(copied)))
    files = len(Store.open(copied).paths("events"))
    assert 1 < files < 30, "a run puts files together"
    monkeypatch.setattr(commands_status, "MANY_FILES", files)
    (said,) = set(status_lines(Store.open(copied))) - set(before)
    assert said.startswith(f"files: {files} of events; kvdrift compact {copied} ")
    code, out, _ = call(capsys, "compact", copied)
    assert code == 0
    assert out.startswith(f"events: {files} files, ")
    after = list(status_lines(Store.open(copied)))
    assert after[2:] == before[2:], "also the estimates and the page are those of the present events"
    assert after[-1].startswith("  next: nothing to do")


def test_a_report_reads_tokens_of_the_studys_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = load_study(write_study(tmp_path, ('id = "kvdrift/tiny"', 'id = "kvdrift/tiny"\nrevision = "abc"')))
    run = run_of(study, tmp_path / "store")
    stages.prepare(run)
    asked = []
    monkeypatch.setattr(tokenizer, "token_reader", lambda model, *, revision: asked.append((model, revision)))
    monkeypatch.setattr(pages, "write_report", lambda *_, **__: tmp_path / "index.html")
    assert report_pages(run.location, None, None, latex=False) == [tmp_path / "index.html"]
    assert asked == [("kvdrift/tiny", "abc")]
