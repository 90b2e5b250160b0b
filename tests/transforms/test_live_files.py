"""Replicates in pieces: whatever the files, their order and their repetitions, the tables are those of the whole log."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from fixtures.dealt_files import dealt
from fixtures.event_logs import (
    PAIR_KEY,
    H,
    canonical,
    command,
    documents_csv,
    edit,
    ends_after,
    make_log,
    padded,
    place,
    stopped,
    stored,
    without,
    write,
)
from fixtures.refusals import refused
from fixtures.stored_units import killed_in
from hypothesis import given, settings

from kvdrift.ingestion.files import EventFile
from kvdrift.ingestion.ingest import IngestReport, ingest
from kvdrift.ingestion.records import read_documents
from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError
from kvdrift.schema.tables import TABLES
from kvdrift.transforms.streams.live_files import SETTLED_SECONDS, LiveIntake, Taking, WaitingRows, alone, ingest_pieces
from kvdrift.transforms.watch import watch

DERIVED = ("trajectories", "steps")


LOG = ends_after(make_log(), 5)


def take(folder: Path, *files: Path, horizon: int | None = H) -> IngestReport:
    return ingest_pieces(folder / "store", files, documents_csv(folder), horizon)


def early(log: pa.Table = LOG, last: int = 5) -> pa.Table:
    return log.filter(np.array(log["t"].to_numpy() <= last))


def later(log: pa.Table = LOG, last: int = 5) -> pa.Table:
    return log.filter(np.array(log["t"].to_numpy() > last))


def tables(location: Path) -> dict[str, pa.Table]:
    """Return events and derived rows in the order of their keys, without the units that they came in."""
    watch(location, 0.0, iter([False, True]).__next__)
    store = Store.open(location)
    return {
        name: store.read(name).drop_columns(["unit"]).sort_by([(column, "ascending") for column in TABLES[name].key])
        for name in ("events", *DERIVED)
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pa.Table]:
    """The tables of the log that came in one file."""
    folder = tmp_path_factory.mktemp("whole")
    assert take(folder, write(folder / "log.parquet", LOG)).findings == []
    found = tables(folder / "store")
    assert found["events"].equals(canonical(LOG))
    return found


@pytest.mark.parametrize("examples", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_permuted_split_repeated_and_late_pieces_end_in_the_same_tables(
    tmp_path: Path, whole: dict[str, pa.Table], examples: int
) -> None:
    folders = itertools.count()

    @settings(max_examples=examples)
    @given(dealt(LOG.num_rows))
    def check(pieces: tuple[list[list[int]], list[list[int]]]) -> None:
        dealt_rows, calls = pieces
        folder = tmp_path / str(next(folders))
        folder.mkdir()
        files = [write(folder / f"{number}.parquet", LOG.take(rows)) for number, rows in enumerate(dealt_rows)]
        for call in calls:
            assert take(folder, *(files[number] for number in call)).findings == []
            kept = stored(folder / "store")
            assert set(kept.group_by(PAIR_KEY[:-1]).aggregate([([], "count_all")])["count_all"].to_pylist()) <= {H}
        for name, table in tables(folder / "store").items():
            assert table.equals(whole[name]), name
        assert take(folder, *files).waiting.units == 0

    check()


def test_pieces_wait_until_a_replicate_is_whole(tmp_path: Path) -> None:
    first = write(tmp_path / "1.parquet", early())
    report = take(tmp_path, first)
    assert (report.taken.events, report.waiting.units, report.waiting.events) == (0, 32, early().num_rows)
    assert stored(tmp_path / "store").num_rows == 0
    assert take(tmp_path, first, write(tmp_path / "again.parquet", early())).waiting.events == 0, "it is remembered"
    report = take(tmp_path, write(tmp_path / "2.parquet", without(later(), doc="d1", t=6)))
    assert (report.taken.events, report.waiting.units) == (24 * H, 8)
    assert take(tmp_path, write(tmp_path / "3.parquet", LOG)).taken.events == 8 * H
    assert stored(tmp_path / "store").equals(canonical(LOG))
    left = [path for path in (tmp_path / "store" / "pieces").glob("*.parquet") if pq.read_metadata(path).num_rows]
    assert left == [], "what is whole waits no more"


@pytest.mark.parametrize("when", ["waiting", "stored", "same file"])
def test_what_contradicts_is_named_and_set_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str], when: str) -> None:
    key: dict[str, Any] = {"doc": "d1", "action": "half", "replicate": 2, "t": 3}
    wrong = edit(LOG, {"delta": 0.25}, **key)
    assert LOG["delta"][place(LOG, **key)].as_py() != 0.25
    if when == "same file":
        first = pa.concat_tables([LOG, wrong.slice(place(LOG, **key), 1)])
        second = LOG.slice(0, 0)
    else:
        first, second = early() if when == "waiting" else LOG, early(wrong)
    folder = tmp_path / "drop"
    folder.mkdir()
    write(folder / "1.parquet", first)
    write(folder / "2.parquet", second)
    options = ("--store", tmp_path / "store", "--documents", documents_csv(tmp_path), "--pieces", "--horizon", str(H))
    arguments = (folder, *options)
    code, _, err = command(capsys, *arguments)
    assert code == 2
    named = f"d1, action=half, replicate=2, t=3: the row contradicts an earlier row; this file's rows of the replicate are set aside in {tmp_path}/store/pieces/aside/"
    assert [named in line for line in err.splitlines()] == [True]
    (aside,) = (tmp_path / "store" / "pieces" / "aside").iterdir()
    kept = pq.read_table(aside)
    assert set(kept["replicate"].to_pylist()) == {2}
    assert kept.num_rows == {"waiting": 5, "stored": 5, "same file": H + 1}[when]
    code, _, again = command(capsys, *arguments)
    assert (code, again) == (2, err), "what is wrong is named each time"
    write(folder / "3.parquet", later())
    command(capsys, *arguments)
    missing = {name: key[name] for name in ("doc", "action", "replicate")}
    expected = without(LOG, **missing) if when == "same file" else LOG
    assert stored(tmp_path / "store").equals(canonical(expected)), "what came first stays"


def test_an_error_that_only_shows_across_pieces(tmp_path: Path) -> None:
    x_eos, y_eos = (LOG[name].to_numpy(zero_copy_only=False) for name in ("x_eos", "y_eos"))
    ends = LOG.filter(np.array(x_eos & ~y_eos & (LOG["t"].to_numpy() == H - 1)))
    key = {name: ends[name][0].as_py() for name in ("doc", "action", "replicate", "t")}
    wrong = edit(LOG, {"x_eos": False}, **(key | {"t": H}))
    assert take(tmp_path, write(tmp_path / "1.parquet", early(wrong, H - 1))).findings == []
    report = take(tmp_path, write(tmp_path / "2.parquet", later(wrong, H - 1)))
    assert [finding.kind for finding in report.findings] == ["EOS undone"]
    assert len(stored(tmp_path / "store")) % H == 0


def test_the_horizon_must_be_known(tmp_path: Path) -> None:
    piece = write(tmp_path / "1.parquet", early())
    report = take(tmp_path, piece, horizon=None)
    assert report.findings[0].text == "the horizon is unknown; give --horizon"
    late = take(tmp_path, write(tmp_path / "2.parquet", LOG), horizon=5)
    assert (late.findings[0].kind, late.findings[0].text) == ("position", "t is 6, but the horizon is 5")
    assert take(tmp_path, piece).waiting.units == 32, "a file with findings is taken again"


@pytest.mark.parametrize("step", ["forget", "taking", "finish"])
def test_a_kill_anywhere_is_gone_on_from(
    tmp_path: Path, whole: dict[str, pa.Table], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    files = [write(tmp_path / "1.parquet", early()), write(tmp_path / "2.parquet", later())]
    take(tmp_path, files[0])
    owner = Taking if step == "finish" else WaitingRows
    with killed_in(monkeypatch, owner, step):
        take(tmp_path, files[1])
    report = take(tmp_path, *files)
    assert (report.findings, report.waiting.units) == ([], 0)
    for name, table in tables(tmp_path / "store").items():
        assert table.equals(whole[name]), name


def test_two_at_once_and_a_url_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match="pieces of replicates need a store on a local disk"),
        alone("s3://b/s"),
    ):
        pass
    piece = write(tmp_path / "1.parquet", early())
    with alone(Store.create(tmp_path / "store").location):
        assert "another 'kvdrift ingest' takes pieces into this store" in refused(take, tmp_path, piece)


def test_files_are_taken_as_they_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command looks again and again until it is interrupted; before each look something is written."""
    folder = tmp_path / "drop"
    folder.mkdir()
    data = write(tmp_path / "2.parquet", later()).read_bytes()

    def writes() -> Iterator[None]:
        write(folder / "1.parquet", early())
        yield
        (folder / "2.parquet").write_bytes(data[:-100])  # it is still written
        write(folder / "_hidden.parquet", later())
        write(folder / "3.parquet", early())
        yield
        (folder / "2.parquet").write_bytes(data)
        yield
        signal.raise_signal(signal.SIGINT)
        yield

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout == 0.5
            next(before)
            return self.is_set()

    before, handlers = writes(), {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr("kvdrift.commands.ingest.threading", SimpleNamespace(Event=Interrupted))
    try:
        code, out, err = command(
            capsys, folder, "--store", tmp_path / "store", "--documents", documents_csv(tmp_path), "--watch",
            "--horizon", str(H), "--interval", "0.5",
        )  # fmt: skip
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    waiting = "nothing was added, 32 replicates wait for positions"
    said = (
        f"1.parquet: {waiting}",
        f"3.parquet: {waiting}",
        "2.parquet: 8 units, 384 events were added, 0 replicates wait for positions",
    )
    assert err.splitlines() == [f"{folder}/{line}" for line in said]
    assert (code, "went in:       8 units, 384 events" in out) == (0, True)
    assert stored(tmp_path / "store").equals(canonical(LOG))


def test_a_file_that_stays_unreadable_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 and no more")
    long_ago = time.time() - 2 * SETTLED_SECONDS
    reports: list[IngestReport] = []
    looks = iter([True, True, False])

    def wait() -> bool:
        os.utime(broken, (long_ago, long_ago))
        return next(looks)

    def note(_: str, report: IngestReport) -> None:
        reports.append(report)

    total = ingest_pieces(tmp_path / "store", [broken], None, H, taken=note, wait=wait)
    assert [report.unread for report in reports] == [1], "once, and not at the first look"
    assert "cannot be read as Parquet" in total.findings[0].text


def test_a_file_that_changes_while_it_is_taken_is_not_remembered(tmp_path: Path) -> None:
    piece = EventFile(write(tmp_path / "1.parquet", LOG))
    given = read_documents(documents_csv(tmp_path))
    taker = LiveIntake(Store.create(tmp_path / "store"), given, H)
    with alone(str(tmp_path / "store")):
        assert taker.take(piece, piece.digest(), lambda: False).taken.units == 8
        assert taker.take(piece, piece.digest()).present.events == LOG.num_rows
    assert stored(tmp_path / "store").num_rows == LOG.num_rows


def test_pieces_of_replicates_that_stop(tmp_path: Path) -> None:
    whole = padded(LOG, 0)
    short = stopped(whole)
    parts = np.random.default_rng(2).integers(0, 4, short.num_rows)
    files = [write(tmp_path / f"{n}.parquet", short.filter(pa.array(parts == n))) for n in range(4)]
    report = take(tmp_path, *files)
    assert (report.findings, report.waiting.units) == ([], 0)
    there = stored(tmp_path / "store")
    assert there.drop_columns(["x_token", "y_token"]).equals(canonical(whole).drop_columns(["x_token", "y_token"]))
    assert not there.equals(canonical(whole)), "pairs that end together repeat what ended them"
    late = take(tmp_path, write(tmp_path / "late.parquet", whole))
    assert (late.findings, late.present.events) == ([], LOG.num_rows), "which token pads says nothing"
    assert stored(tmp_path / "store").equals(there)


def assert_set_aside(report: IngestReport, folder: Path, key: dict[str, Any], positions: Sequence[int]) -> None:
    """One replicate contradicts, and its rows at some positions are in a file that the finding names."""
    (finding,) = report.findings
    assert (finding.kind, {name: finding.key[name] for name in key}) == ("conflict", key)
    (aside,) = (folder / "store" / "pieces" / "aside").iterdir()
    assert str(aside) in finding.text
    assert pq.read_table(aside)["t"].to_pylist() == [*positions]


def last_pieces_after(folder: Path, other: pa.Table) -> IngestReport:
    """Take the last pieces when another ingestion has just committed its rows."""
    last = EventFile(write(folder / "2.parquet", later()))
    with alone(str(folder / "store")):
        intake = LiveIntake(Store.open(folder / "store"), read_documents(documents_csv(folder)), H)
        brought = ingest(folder / "store", [write(folder / "other.parquet", other)], documents_csv(folder))
        assert brought.findings == []
        return intake.take(last, last.digest())


def test_waiting_rows_that_the_store_contradicts_are_set_aside(tmp_path: Path) -> None:
    """Another ingestion brings other content of a replicate of which rows wait; two of its replicates are equal."""
    key = {"doc": "d1", "action": "half", "replicate": 2}
    take(tmp_path, write(tmp_path / "1.parquet", edit(early(), {"x_token": 40}, **key, t=2)))
    other = write(tmp_path / "other.parquet", LOG)
    assert ingest(tmp_path / "store", [other], documents_csv(tmp_path)).findings == []
    told: list[tuple[str, IngestReport]] = []
    report = ingest_pieces(tmp_path / "store", [], None, H, taken=lambda *report: told.append(report))
    assert told == [(str(tmp_path / "store" / "pieces"), told[0][1])]
    assert_set_aside(report, tmp_path, key, range(1, 6))
    assert report.waiting.units == 0
    assert ingest_pieces(tmp_path / "store", [], None, H).findings == [], "set aside, the rows wait no more"
    assert stored(tmp_path / "store").equals(canonical(LOG))


def test_a_replicate_that_another_writer_brings_first_is_not_acknowledged(tmp_path: Path) -> None:
    """The last pieces come when another ingestion has committed other content of a replicate of which rows wait."""
    key = {"doc": "d1", "action": "half", "replicate": 2}
    take(tmp_path, write(tmp_path / "1.parquet", early()))
    other = edit(LOG, {"x_token": 40}, **key, t=8).filter(pc.equal(LOG["doc"], "d1"))
    report = last_pieces_after(tmp_path, other)
    assert (report.taken.events, report.waiting.units) == (24 * H, 0), "what the other did not bring"
    assert_set_aside(report, tmp_path, key | {"t": 8}, range(6, 13))
    there = stored(tmp_path / "store")
    assert there.equals(canonical(edit(LOG, {"x_token": 40}, **key, t=8)))


def test_waiting_rows_that_another_writer_contradicts_just_before_the_commit_are_named(tmp_path: Path) -> None:
    """The last pieces are as the other writer has them, and the rows that waited are not."""
    key = {"doc": "d1", "action": "half", "replicate": 2}
    take(tmp_path, write(tmp_path / "1.parquet", edit(early(), {"x_token": 40}, **key, t=2)))
    report = last_pieces_after(tmp_path, LOG)
    assert_set_aside(report, tmp_path, key, range(1, 6))
    assert stored(tmp_path / "store").equals(canonical(LOG))
