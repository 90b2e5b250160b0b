"""I/O errors: changes on the disk fail, the disk is full or read-only, listings lack a file, S3 answers with errors."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from faults.disk.failing import How, start
from faults.disk.trials import fault_of_end
from faults.outcomes import MENDED, SURVIVED, tell
from fixtures.processes import run_command
from fixtures.s3_server import S3Server, s3_server
from fixtures.small_study import run_of
from fixtures.stored_rows import rows
from fixtures.stored_units import make_unit
from fixtures.study_files import load_study

from kvdrift.flows.run import stages
from kvdrift.log.store import Store
from kvdrift.schema.errors import KvdriftError
from kvdrift.transforms.pipeline import run_derivation
from kvdrift.verification.whole_store import verify

# --- one change on the disk fails, or a listing lacks a file -------------------------------------------------------------

TRIED = 1  # trials of each way in the default suite
PROCESSES = 2


def outcomes(*programs: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Return the outcomes of the trials of programs, all of which must end well."""
    found = []
    with ThreadPoolExecutor() as readers:  # a pipe that nobody reads stops who writes
        for program, (out, err) in zip(programs, readers.map(subprocess.Popen.communicate, programs), strict=True):
            assert program.returncode == 0, err
            found += [json.loads(line) for line in out.splitlines()]
    return found


def test_commits_with_failing_changes(library: Path, tmp_path: Path) -> None:
    """A few changes are tried, chosen anew if the program's changes differ."""
    found = outcomes(start(library, "failing_commits.py", tmp_path, TRIED))
    assert len(found) == 4 * TRIED + 1
    assert [trial for trial in found if trial["outcome"] not in {SURVIVED, MENDED}] == []


@pytest.mark.slow
def test_every_change_of_a_study_failing(library: Path, tmp_path: Path) -> None:
    outcomes(start(library, "failing_study.py", tmp_path))
    found = outcomes(*(start(library, "failing_study.py", tmp_path, share, PROCESSES, 1) for share in range(PROCESSES)))
    tell(
        "I/O error",
        "each change of a study on the disk: killed at it, half done, full from it on, failing",
        (trial["outcome"] for trial in found),
    )
    assert [trial for trial in found if trial["outcome"] not in {SURVIVED, MENDED}] == []


@pytest.mark.slow
def test_listings_that_lack_a_file(library: Path, tmp_path: Path) -> None:
    """Whichever listing lacks a file, no log is called damaged, the store opens, and each commit counts once."""
    program = start(library, "incomplete_listings.py", tmp_path / "store")
    out, err = program.communicate()
    assert program.returncode == 0, err
    assert out.split() == ["faults", "1", "open", "1", *(word for at in range(1, 4) for word in ("commit", str(at)))]


# --- a disk that is read-only, or full from some change on ---------------------------------------------------------------

FULL_FROM = (1, 100, 300, 600, 850)  # of about 900 changes of a run


def ended(program: subprocess.Popen[str]) -> tuple[int, str, list[str]]:
    """Return the exit code, standard output, and the command's own lines on standard error."""
    out, err = program.communicate(timeout=300)
    assert "Traceback" not in err
    return program.returncode, out, [line for line in err.splitlines() if line.startswith("kvdrift: ")]


@pytest.mark.slow
def test_a_store_that_may_only_be_read(library: Path, finished_study: Path, tmp_path: Path) -> None:
    store, study = Path(shutil.copytree(finished_study / "store", tmp_path / "store")), finished_study / "finite.toml"

    def call(*arguments: object) -> tuple[int, str, list[str]]:
        return ended(start(library, "failing_command.py", store, "READ_ONLY", 0, *arguments))

    readers = [
        call("status", store), call("sql", store, "select count(*) as n from events"), call("analyze", store),
        call("sql", store, "from estimates", "--checked"), call("report", store, "-o", tmp_path / "page"),
        call("verify", store), call("run", study, "--store", store, "--dry-run"), call("run", study, "--store", store),
        call("derive", store),
    ]  # fmt: skip
    assert [(code, said) for code, _, said in readers] == [(0, [])] * len(readers)
    assert (tmp_path / "page" / "index.html").is_file()
    shutil.rmtree(store / "report")
    redone = ("run", study, "--store", store, "--redo", "mixture")
    writers = [call("report", store), call(*redone), call("run", study, "--store", store)]
    for code, _, said in writers:
        assert code in {1, 2}
        assert len(said) == 1
        assert "ead-only file system" in said[0]
    assert rows(store) == rows(finished_study / "store")
    tell(
        "I/O error",
        "a store that may only be read: commands that read and that write",
        [SURVIVED] * (len(readers) + len(writers)),
    )


@pytest.mark.slow
def test_a_disk_that_is_full_amid_a_run(library: Path, finished_study: Path, tmp_path: Path) -> None:
    generated = run_of(load_study(finished_study / "finite.toml"), tmp_path / "generated")
    stages.prepare(generated)
    outcomes = []
    for at in FULL_FROM:
        store = Path(shutil.copytree(tmp_path / "generated", tmp_path / str(at)))
        arguments = (store, "FULL", at, "run", finished_study / "finite.toml", "--store", store)
        program = start(library, "failing_command.py", *arguments)
        out, err = program.communicate(timeout=300)
        fault = fault_of_end(How.FULL, program.returncode, out + err)
        if fault is None:
            assert run_command("run", finished_study / "finite.toml", "--store", store)[0] == 0
            assert run_command("verify", store)[0] == 0
        outcomes.append(fault or SURVIVED)
    tell("I/O error", "the disk full from some change of a whole run on", outcomes)
    assert set(outcomes) == {SURVIVED}


# --- an object store that answers a request with an error ----------------------------------------------------------------

REQUESTS = range(1, 41)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as started, pytest.MonkeyPatch.context() as patch:
        for name, value in started.environment.items():
            patch.setenv(name, value)
        yield started


@pytest.mark.slow
def test_an_error_at_each_of_the_first_requests(server: S3Server, tmp_path: Path) -> None:
    """The requests make, fill, derive and gather a store, append later units, and read all rows."""
    outcomes, expected = list[str](), [done(str(tmp_path / "store")) for done in (fill, grow, rows_of)]
    for status in (500, 503):
        for number in REQUESTS:
            location = f"{server.url}/{status}-{number}"
            before, found = server.counts()["refused"], []
            try:
                for done in (fill, grow, rows_of):
                    server.trouble(at=number, status=status)
                    found.append(done(location))
            except KvdriftError as error:
                outcomes.append(f"{status} at {number}: {error}")
                continue
            finally:
                server.trouble()
            assert server.counts()["refused"] >= before + 2, "requests were refused"
            outcomes.append(SURVIVED if found == expected else f"{status} at {number}: wrong")
        assert faults(location) == faults(str(tmp_path / "store"))
    tell("I/O error", "S3 answers one of the first 40 requests of writers and readers with 500 or 503", outcomes)
    assert set(outcomes) == {SURVIVED}


def fill(location: str) -> int:
    """Make a store of two units, and derive; return the number of units."""
    count = Store.create(location).append_units([make_unit(doc="first"), make_unit(doc="second")])
    run_derivation(location)
    return count


def grow(location: str) -> int:
    """Append an existing unit and a third unit, derive and gather; return the number of new units."""
    store = Store.open(location)
    count = store.append_units([make_unit(doc="second"), make_unit(doc="third")])
    run_derivation(location)
    store.gather()
    return count


def rows_of(location: str) -> dict[str, list[str]]:
    """Read all rows of all tables."""
    return rows(location)


def faults(location: str) -> list[str]:
    """Return the faults of ``verify``: only that the documents and actions of the units were never declared."""
    return [fault.what for check in verify(Store.open(location)) for fault in check.faults]
