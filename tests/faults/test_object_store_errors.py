"""If an object store answers a request with an error, the request is repeated, and no row changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.outcomes import SURVIVED, tell
from fixtures.stored_rows import rows
from fixtures.stored_units import make_unit

from benchmarks.s3_server import S3Server, s3_server
from kvdrift.log.store import Store
from kvdrift.schema.errors import KvdriftError
from kvdrift.transforms.pipeline import run_derivation
from kvdrift.verification.whole_store import verify

REQUESTS = range(1, 41)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as started, pytest.MonkeyPatch.context() as patch:
        for name, value in started.environment.items():
            patch.setenv(name, value)
        yield started


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
    tell("S3 answers one of the first 40 requests of writers and readers with 500 or 503", outcomes)
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
