"""A study whose store is behind an S3 server: the rows of one in a folder, whatever the server and the writers suffer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.command import call
from fixtures.dask_cluster import DaskCluster, run_on
from fixtures.finite_study import write_finite_study
from fixtures.processes import start_process
from fixtures.s3_server import S3Server, s3_server
from fixtures.small_study import finish, run_of
from fixtures.stored_rows import rows
from fixtures.stored_units import make_unit
from fixtures.study_files import load_study

from benchmarks.store import write
from kvdrift.log.store import Store
from kvdrift.schema.location import filesystem_of
from kvdrift.sql.catalog import open_views

SMALLER = (
    ("development = 4", "development = 2"),
    ("evaluation = 6", "evaluation = 2"),
    ("documents = 6", "documents = 2"),
)
MEASURED = ("plan",)  # what has measured seconds in it


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
    return rows(location, MEASURED)


@pytest.fixture(scope="module")
def troubled(server: S3Server, study_file: Path) -> str:
    """The study behind the server, which was late and refused requests all the while."""
    location = f"{server.url}/troubled"
    server.trouble(every=40, seconds=0.001)
    finish_study(study_file, location)
    server.trouble()
    assert server.counts()["refused"] > 10
    return location


@pytest.mark.slow
def test_a_slow_server_that_refuses_requests_changes_no_row(troubled: str, expected: dict[str, list[str]]) -> None:
    assert rows(troubled, MEASURED) == expected


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
    assert rows(troubled, MEASURED) == expected
    with open_views(Store.open(troubled)) as views:
        assert views.rows("decomposition").equals(decomposition)
    code, out, _ = call(capsys, "verify", troubled)
    assert code == 0
    assert out.count("no commit names this file") == 1  # what compaction replaced is deleted
    code, out, _ = call(capsys, "status", troubled)
    assert code == 0
    assert "0 still to derive" in out


def test_a_store_that_is_open_sees_what_others_commit(server: S3Server) -> None:
    location = f"{server.url}/open"
    writer, reader = Store.create(location), Store.open(location)
    for number in range(2):
        writer.append_units([make_unit(doc=str(number))])
        assert reader.units(columns=["doc"]).num_rows == number + 1
        before = server.counts()
        reader.version("events")
        assert sum((server.counts() - before).values()) <= 3  # a look for a later version, without the log


@pytest.mark.parametrize(
    ("units", "allowed"), [(33, 1.0), pytest.param(99, 1.0, marks=pytest.mark.slow),
                           pytest.param(999, 1.1, marks=pytest.mark.slow)]
)  # fmt: skip
def test_requests_of_commands(
    server: S3Server, units: int, allowed: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands make few requests at 33 and 99 units, and hardly more at 999, in stores that nobody compacted.

    A page, which takes longest, is written of the larger stores alone.
    """
    location = f"{server.url}/requests-{units}"
    write(location, units)
    commands = [(("status",), 120), (("sql", "from summary"), 150)]
    if units > 33:
        commands.append((("report", "-o", str(tmp_path / "page")), 300))
    for (command, *options), most in commands:
        before = server.counts()
        assert call(capsys, command, location, *options)[0] == 0
        assert sum((server.counts() - before).values()) <= most * allowed, command


@pytest.mark.slow
def test_a_run_that_is_killed_amid_uploads_is_gone_on_from(
    server: S3Server, study_file: Path, expected: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    location = f"{server.url}/killed"
    server.trouble(seconds=0.05)
    for _ in range(4):
        until = server.counts()["PUT"] + 13
        process = start_process(finish_study, study_file, location)
        while process.is_alive() and server.counts()["PUT"] < until:
            time.sleep(0.01)
        assert process.is_alive()
        process.kill()
        process.join()
    server.trouble()
    finish_study(study_file, location)
    assert rows(location, MEASURED) == expected
    code, _, _ = call(capsys, "verify", location)
    assert code == 0


@pytest.mark.slow
def test_the_workers_of_a_cluster_write_and_derive_there(
    server: S3Server, study_file: Path, expected: dict[str, list[str]], tmp_path: Path
) -> None:
    location = f"{server.url}/cluster"
    cluster = DaskCluster(tmp_path)
    try:
        for _ in range(2):
            cluster.add_worker()
        with run_on(cluster.address, study_file, location) as run:
            finish(run)
    finally:
        cluster.close()
    assert rows(location, MEASURED) == expected


def finish_study(study_file: Path, location: str) -> None:
    finish(run_of(load_study(study_file), location))
