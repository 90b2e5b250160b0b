"""``kvdrift sql`` for people: queries from a pipe, Ctrl-C, and files whose ending determines their format."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import re
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

from kvdrift.commands.sql import rows_of
from kvdrift.log.store import Store
from kvdrift.sql.catalog import Views
from kvdrift.sql.contracts import contracts


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store without rows; the paper's numbers are there."""
    return Store.create(tmp_path_factory.mktemp("store") / "store").location


@pytest.fixture
def views() -> Iterator[Views]:
    with Views(duckdb.connect(), {}) as views:
        yield views


def test_standard_input_is_a_full_way_to_give_queries(
    store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each query ends with a semicolon at the end of a line; options hold for all, and the first mistake ends the call."""

    def piped(text: str, *options: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        return call(capsys, "sql", store, *options)

    code, out, err = piped("select 40 +\n2 as answer;\ndescribe decomposition;\n\nselect 7 as seven", "--format", "csv")
    answer, two, _, *columns, seven, last = out.splitlines()
    assert (code, err, answer, two, seven, last) == (0, "", "answer", "42", "seven", "7")
    assert [line.partition(",")[0] for line in columns] == [*contracts()["decomposition"].columns]
    code, out, err = piped("select 1 as a;\nselect nope;\nselect 2 as b;\n", "--format", "csv")
    assert (code, out, err.count("\n")) == (2, "a\n1\n", 1)
    assert '"nope"' in err
    assert piped("select 7 as seven", "-o", tmp_path / "x.json")[:2] == (0, "")
    assert json.loads((tmp_path / "x.json").read_text()) == [{"seven": 7}]
    code, out, err = piped("select 7;\nselect 8;\n", "-o", tmp_path / "y.csv")
    assert (code, out, (tmp_path / "y.csv").exists()) == (2, "", False)
    assert f"-o {tmp_path}/y.csv" in err


def test_csv_has_quotes_where_they_are_needed(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    query = """select 'b1' as doc, null::text as "a, b", '' as empty, 'x, "y"' as quoted, true as yes, .1 as share, [1, 2] as list"""
    code, out, _ = call(capsys, "sql", store, query, "--format", "csv")
    assert (code, out) == (0, 'doc,"a, b",empty,quoted,yes,share,list\nb1,,"","x, ""y""",true,0.1,"[1, 2]"\n')
    (row,) = csv.DictReader(io.StringIO(out))
    assert (row["quoted"], json.loads(row["list"])) == ('x, "y"', [1, 2])


def test_a_terminal_is_told_what_has_a_prompt(store: str) -> None:
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "kvdrift", "sql", store], stdin=theirs, capture_output=True, text=True, check=False
    )
    os.close(theirs)
    os.close(ours)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"duckdb -readonly {store}/catalog.duckdb" in done.stderr


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
    assert (tmp_path / "rows.csv").read_text() == "seven\n7\n"
    assert (tmp_path / "rows.tex").read_text().startswith(r"\begin{tabular}")
    assert (tmp_path / "rows.txt").read_text().split() == ["seven", "7"]
    for name in ("rows.json", "rows.parquet"):  # an object would keep one of them
        line = mistake(capsys, "sql", store, "select 1 as a, 2 as a", "-o", tmp_path / name)
        assert "2 columns are called 'a'" in line
    assert call(capsys, "sql", store, "select 1 as a, 2 as a", "--format", "csv")[1] == "a,a\n1,2\n"
    assert "--format" in mistake(capsys, "sql", store, "select 7", "-o", "rows.xlsx")
    call(capsys, "sql", store, "select 7 as seven", "--format", "csv", "-o", tmp_path / "rows.json")
    assert (tmp_path / "rows.json").read_text() == "seven\n7\n"


def test_a_file_is_written_into_no_store(capsys: pytest.CaptureFixture[str], store: str, tmp_path: Path) -> None:
    """Neither over a file of its log, under whatever name, nor as a new file."""
    (tmp_path / "link").symlink_to(store)
    log = Path(store, "events", "_delta_log", f"{0:020}.json")
    before = log.read_bytes()
    for file in (log, tmp_path / "link" / log.relative_to(store), Path(store, "new.csv"), Path(store, "sql", "x.json")):
        line = mistake(capsys, "sql", store, "select 7 as seven", "-o", file)
        assert line.startswith(f"kvdrift: -o {file}: lies in the store {store}, ")
    assert log.read_bytes() == before


def test_units_that_the_views_lack_are_noted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = Store.create(tmp_path / "store")
    made.append_units([make_unit(doc) for doc in ("a", "b")])
    asked = ("sql", made.location, "select count(*) as n from trajectories", "--format", "csv")
    code, out, err = call(capsys, *asked)
    assert (code, out) == (0, "n\n0\n")
    assert re.search(r"lack 2 units .* kvdrift derive", err)
    derive(made)
    code, out, err = call(capsys, *asked)
    assert (code, err) == (0, "")
    assert int(out.split()[1]) > 0
