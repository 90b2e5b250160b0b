"""An object store that answers one request with an error: the request is made again, and no row is another one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.disk.laws import write_laws
from faults.outcomes import SURVIVED, tell
from fixtures.s3_server import S3Server, s3_server
from fixtures.small_study import finish, run_of
from fixtures.stored_rows import rows
from fixtures.study_files import load_study

from log.store import Store
from schema.errors import KvdriftError
from verification.whole_store import verify

REQUESTS = range(1, 41)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as started, pytest.MonkeyPatch.context() as patch:
        for name, value in started.environment.items():
            patch.setenv(name, value)
        yield started


def test_an_error_at_each_of_the_first_requests(server: S3Server, tmp_path: Path) -> None:
    """Of a study's run from nothing, and of the look at what it left."""
    study, outcomes = load_study(write_laws(tmp_path)), list[str]()
    finish(run_of(study, tmp_path / "store"))
    expected = unmeasured(tmp_path / "store")
    for status in (500, 503):
        for number in REQUESTS:
            location = f"{server.url}/{status}-{number}"
            before = server.counts()["refused"]
            server.trouble(at=number, status=status)
            try:
                finish(run_of(study, location))
                server.trouble(at=number, status=status)
                same = unmeasured(location) == expected
            except KvdriftError as error:
                outcomes.append(f"{status} at {number}: {error}")
                continue
            finally:
                server.trouble()
            assert server.counts()["refused"] == before + 2, "a request of each was refused"
            sound = not any(check.faults for check in verify(Store.open(location)))
            outcomes.append(SURVIVED if same and sound else f"{status} at {number}: wrong")
    tell("S3 answers one of a run's first 40 requests, and one of the first 40 that read it, with 500 or 503", outcomes)
    assert set(outcomes) == {SURVIVED}


def unmeasured(location: str | Path) -> dict[str, list[str]]:
    """All rows but the estimates of measured seconds; of the plan, which has such seconds, that there is one."""
    found = rows(location)
    estimates = [row for row in found["results"] if "second" not in json.loads(row)["quantity"]]
    return found | {"plans": ["one"] * len(found["plans"]), "results": estimates}
