"""A study whose store is behind an S3 server: the rows of one in a folder, whatever the server and the writers suffer."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.command import call
from fixtures.finite_study import write_finite_study
from fixtures.processes import forked
from fixtures.s3_server import S3Server, s3_server
from fixtures.small_study import finish, run_of
from fixtures.stored_units import make_unit
from fixtures.study_files import load_study

from schema.location import filesystem_of
from schema.store.store import Store, Unit
from sql.catalog import open_views

SMALLER = (
    ("development = 4", "development = 2"),
    ("evaluation = 6", "evaluation = 2"),
    ("documents = 6", "documents = 2"),
)

# What differs between two runs: times, and what follows from them.
OF_THE_RUN = {
    "path", "prefill_seconds", "decode_seconds", "frozen_at", "events_version", "plan", "plan_sha256", "inputs_sha256",
}  # fmt: skip
TABLES = (
    "studies",
    "documents",
    "actions",
    "events",
    "units",
    "trajectories",
    "steps",
    "plans",
    "results",
    "calibration",
)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as started, pytest.MonkeyPatch.context() as patch:
        for name, value in started.environment.items():
            patch.setenv(name, value)
        yield started


@pytest.fixture(scope="module")
def study_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_finite_study(tmp_path_factory.mktemp("study"), *SMALLER)


@pytest.fixture(scope="module")
def expected(study_file: Path) -> dict[str, list[str]]:
    """The rows of the study in a folder."""
    location = str(study_file.parent / "store")
    finish_study(study_file, location)
    return rows(location)


@pytest.fixture(scope="module")
def troubled(server: S3Server, study_file: Path) -> str:
    """The study behind the server, which was late and refused requests all the while."""
    location = f"{server.url}/troubled"
    server.trouble(every=25, seconds=0.001)
    finish_study(study_file, location)
    server.trouble()
    assert server.counts()["refused"] > 20
    return location


def test_a_slow_server_that_refuses_requests_changes_no_row(troubled: str, expected: dict[str, list[str]]) -> None:
    assert rows(troubled) == expected


@pytest.mark.slow
def test_commands_read_and_rewrite_a_store_behind_a_server(
    troubled: str, expected: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    files, root = filesystem_of(troubled)
    with files.open_output_stream(f"{root}/events/finite/of-a-killed-writer.parquet") as left:
        left.write(b"an upload that no commit names")
    code, out, _ = call(capsys, "verify", troubled)
    assert code == 0
    assert "events/finite/of-a-killed-writer.parquet: no commit names this file" in out

    with open_views(Store.open(troubled)) as views:
        decomposition = views.rows("decomposition")
    code, out, _ = call(capsys, "compact", troubled, "--vacuum", "--keep-days", "0")
    assert code == 0
    assert len(Store.open(troubled).paths("events")) == 1
    assert rows(troubled) == expected
    with open_views(Store.open(troubled)) as views:
        assert views.rows("decomposition").equals(decomposition)
    code, out, _ = call(capsys, "verify", troubled)
    assert code == 0
    assert out.count("no commit names this file") == 1  # what compaction replaced is deleted
    code, out, _ = call(capsys, "status", troubled)
    assert code == 0
    assert "0 still to derive" in out


def test_writers_at_once_lose_and_double_nothing(server: S3Server) -> None:
    location = f"{server.url}/writers"
    Store.create(location)
    shared = [make_unit(doc=f"shared-{number}") for number in range(3)]

    def write(number: int) -> None:
        own = [make_unit(doc=f"of-{number}-{turn}") for turn in range(3)]
        for pair in zip(own, shared, strict=True):
            Store.open(location).append_units(pair)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    docs = Store.open(location).units(columns=["doc"])["doc"].to_pylist()
    assert sorted(docs) == sorted(
        [f"of-{number}-{turn}" for number in range(3) for turn in range(3)] + doc_names(shared)
    )


def test_a_store_that_is_open_sees_what_others_commit(server: S3Server) -> None:
    location = f"{server.url}/open"
    writer, reader = Store.create(location), Store.open(location)
    for number in range(3):
        writer.append_units([make_unit(doc=str(number))])
        assert reader.units(columns=["doc"]).num_rows == number + 1
        before = server.counts()
        reader.version("events")
        assert sum((server.counts() - before).values()) <= 3  # a look for a later version, without the log


@pytest.mark.slow
def test_a_run_that_is_killed_amid_uploads_is_gone_on_from(
    server: S3Server, study_file: Path, expected: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    location = f"{server.url}/killed"
    server.trouble(seconds=0.05)
    for _ in range(4):
        until = server.counts()["PUT"] + 23
        process = forked().Process(target=finish_study, args=(study_file, location))
        process.start()
        while process.is_alive() and server.counts()["PUT"] < until:
            time.sleep(0.01)
        assert process.is_alive()
        process.kill()
        process.join()
    server.trouble()
    finish_study(study_file, location)
    assert rows(location) == expected
    code, _, _ = call(capsys, "verify", location)
    assert code == 0


def finish_study(study_file: Path, location: str) -> None:
    finish(run_of(load_study(study_file), location))


def rows(location: str) -> dict[str, list[str]]:
    """All rows of a study's tables, without what is of the run."""
    store, found = Store.open(location), {}
    for table in TABLES:
        kept = ({name: row[name] for name in row if name not in OF_THE_RUN} for row in store.read(table).to_pylist())
        found[table] = sorted(json.dumps(row, default=str) for row in kept)
    return found


def doc_names(units: list[Unit]) -> list[str]:
    return [unit.record["doc"] for unit in units]
