"""``kvdrift sql`` for people: the prompt, Ctrl-C, and files whose ending determines their format."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fixtures.command import call, mistake
from fixtures.stored_units import derive, make_unit
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from kvdrift.log.store import Store
from kvdrift.queries.prompt import Prompt, completer, history_file, is_whole
from kvdrift.queries.running import rows_of
from kvdrift.sql.catalog import Views, describe_views
from kvdrift.sql.contracts import contracts


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store without rows; the paper's numbers are there."""
    return Store.create(tmp_path_factory.mktemp("store") / "store").location


@pytest.fixture
def views() -> Iterator[Views]:
    with Views(duckdb.connect(), {}) as views:
        yield views


def test_the_prompt_answers_queries_and_commands(store: str) -> None:
    lines = "select 40 +\n2 as answer;\n.views\n.schema decompositon\n.schema decomposition\n.tabels\n.help\nselec;\ndescribe summary;\n"
    done = subprocess.run(
        [sys.executable, "-m", "kvdrift", "sql", store], input=f"{lines}select 7 as seven;\nquit\nselect 8 as unread;\n",
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert "42" in done.stdout
    assert all(f"\n{one.view}" in done.stdout and one.description in done.stdout for one in describe_views())
    assert "M(tau 1{tau <= H})" in done.stdout  # what mean_entry means
    assert "mean tau of the pairs that part; null without divergence [tokens]" in done.stdout
    assert ".schema VIEW" in done.stdout
    assert "seven" in done.stdout
    assert "unread" not in done.stdout
    assert "1 row, 0." in done.stderr
    for problem in ("did you mean 'decomposition'", ".tabels: no such command", "syntax error"):
        assert problem in done.stderr


def test_a_command_of_the_prompt_may_stand_for_a_query(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "sql", store, ".views")
    assert (code, err) == (0, "")
    assert all(f"\n{one.view}" in out for one in describe_views())
    code, out, err = call(capsys, "sql", store, " .schema decomposition")
    assert (code, err) == (0, "")
    assert out.startswith(contracts()["decomposition"].description)
    assert call(capsys, "sql", store, ".quit") == (0, "", "")
    assert "did you mean '.views'" in mistake(capsys, "sql", store, ".veiws")
    for option in (("--format", "csv"), ("-o", "rows.txt")):
        line = mistake(capsys, "sql", store, ".views", *option)
        assert ".views: a command of the prompt prints text; leave --format and -o out" in line


def test_a_terminal_has_history_and_completion(views: Views, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("select 1 +\r2;\rabandoned\x03\r.views\r\x04")  # Ctrl-C, an empty line, at last Ctrl-D
        assert [*Prompt(views, print)._typed()] == ["select 1 +\n2;", ".views"]
    kept = FileHistory(tmp_path / "kvdrift" / "sql_history").load_history_strings()
    assert [*kept] == [".views", "select 1 +\n2;"]
    typed = Document("select mean_ent")
    assert [one.text for one in completer(["events"], ["mean_entry"]).get_completions(typed, CompleteEvent())] == [
        "mean_entry"
    ]


def test_history_is_left_out_where_its_folder_takes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kvdrift").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert history_file() is None


@pytest.mark.parametrize(
    ("text", "whole"), [("select 1", False), ("select 1; ", True), (".views", True), ("exit", True)]
)
def test_an_entry_is_whole_with_its_semicolon(text: str, whole: bool) -> None:  # noqa: FBT001 - a case
    assert is_whole(text) == whole


def test_an_interrupted_query_ends_and_the_next_one_is_answered(views: Views) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's workers ignore it
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            rows_of(views, "select sum(sqrt(a.range * b.range)) from range(100_000) a, range(100_000_000) b")  # hours
    finally:
        signal.signal(signal.SIGINT, before)
    assert rows_of(views, "select 7 as seven").to_pylist() == [{"seven": 7}]


def test_the_ending_of_a_file_names_its_format(capsys: pytest.CaptureFixture[str], store: str, tmp_path: Path) -> None:
    for ending in ("parquet", "json", "csv", "tex", "txt"):
        code, out, _ = call(capsys, "sql", store, "select 7 as seven", "-o", tmp_path / f"rows.{ending}")
        assert (code, out) == (0, "")
    assert pq.read_table(tmp_path / "rows.parquet").equals(pa.table({"seven": pa.array([7], pa.int32())}))
    assert json.loads((tmp_path / "rows.json").read_text()) == [{"seven": 7}]
    assert (tmp_path / "rows.csv").read_text() == '"seven"\n7\n'
    assert (tmp_path / "rows.tex").read_text().startswith(r"\begin{tabular}")
    assert (tmp_path / "rows.txt").read_text().split() == ["seven", "7"]
    for name in ("rows.json", "rows.parquet"):  # an object would keep one of them
        line = mistake(capsys, "sql", store, "select 1 as a, 2 as a", "-o", tmp_path / name)
        assert line.endswith("2 columns are called 'a': rename one, as in: select x as y\n")
    assert call(capsys, "sql", store, "select 1 as a, 2 as a", "--format", "csv")[1] == '"a","a"\n1,2\n'
    assert "its ending names no format; give --format" in mistake(capsys, "sql", store, "select 7", "-o", "rows.xlsx")
    call(capsys, "sql", store, "select 7 as seven", "--format", "csv", "-o", tmp_path / "rows.json")
    assert (tmp_path / "rows.json").read_text() == '"seven"\n7\n'


def test_a_file_is_written_into_no_store(capsys: pytest.CaptureFixture[str], store: str, tmp_path: Path) -> None:
    """Neither over a file of its log, under whatever name, nor as a new file."""
    (tmp_path / "link").symlink_to(store)
    log = Path(store, "events", "_delta_log", f"{0:020}.json")
    before = log.read_bytes()
    for file in (log, tmp_path / "link" / log.relative_to(store), Path(store, "new.csv"), Path(store, "sql", "x.json")):
        line = mistake(capsys, "sql", store, "select 7 as seven", "-o", file)
        assert line == f"kvdrift: -o {file}: lies in the store {store}, where no file may be replaced; name another\n"
    assert log.read_bytes() == before


def test_units_that_the_views_lack_are_noted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = Store.create(tmp_path / "store")
    made.append_units([make_unit(doc) for doc in ("a", "b")])
    asked = ("sql", made.location, "select count(*) as n from trajectories", "--format", "csv")
    code, out, err = call(capsys, *asked)
    assert (code, out) == (0, '"n"\n0\n')
    assert "note: the views lack 2 units whose events are not derived yet; kvdrift derive" in err
    derive(made)
    code, out, err = call(capsys, *asked)
    assert (code, err) == (0, "")
    assert int(out.split()[1]) > 0
