"""Flipped bits in Parquet files: nothing is estimated, reported or answered with ``--checked`` from a damaged file."""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import duckdb
import pytest
from faults.outcomes import REFUSED, SURVIVED, tell
from fixtures.command import call
from fixtures.refusals import refused

from kvdrift.log.checked_files import MEMORY
from kvdrift.log.store import Store
from kvdrift.schema.errors import DamagedStoreError
from kvdrift.schema.tables import TABLES
from kvdrift.verification.whole_store import verify

FLIPPED = 30
FLIPPED_ANYWHERE = 300
QUERY = "select count(*) as n from events"


@pytest.fixture
def store(copied: Path) -> Store:
    """The store of the finished small study, to be damaged."""
    return Store.open(copied)


def flip(path: Path, chance: random.Random) -> bytes:
    """Change one bit in the middle of a file; return the earlier content."""
    before = path.read_bytes()
    rot(path, before, chance.randrange(4, len(before) * 2 // 3), chance)
    return before


def rot(path: Path, content: bytes, place: int, chance: random.Random) -> None:
    """Change one bit of a file's content, and keep the file's times, as a rotting disk does."""
    data, found = bytearray(content), path.stat()
    data[place] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def test_flipped_bits_are_refused(store: Store) -> None:
    lines: list[str] = []
    chance, versions = random.Random(3), store.versions()  # noqa: S311
    files = [(table, path) for table in ("events", "trajectories", "steps", "results") for path in store.paths(table)]
    for table, name in chance.choices(files, k=FLIPPED):
        path = Path(store.location, table, name)
        before = flip(path, chance)
        lines.append(refused(store.check_files, {table: versions[table]}, error=DamagedStoreError))
        path.write_bytes(before)
    for line in lines:
        assert re.fullmatch(rf"{store.location}: \w+/.*: kvdrift verify {store.location} --repair", line)
    store.check_files(versions)


@pytest.mark.slow
def test_a_flipped_bit_anywhere(store: Store) -> None:
    """A flipped bit is refused, unless it is harmless: it may hit the name under which a file holds its digest."""
    outcomes, versions = [], store.versions()
    files = [(table, path) for table in TABLES for path in store.paths(table)]
    for number in range(FLIPPED_ANYWHERE):
        chance = random.Random(number)  # noqa: S311
        table, name = chance.choice(files)
        path = Path(store.location, table, name)
        rows, before = answered(path), path.read_bytes()
        rot(path, before, chance.randrange(len(before)), chance)
        try:
            store.check_files({table: versions[table]})
        except DamagedStoreError:
            outcomes.append(REFUSED)
        else:
            harmless = answered(path) == rows or any(check.faults for check in verify(store))
            outcomes.append(SURVIVED if harmless else "silently wrong")
        path.write_bytes(before)
    tell("a flipped bit anywhere in a file of any table, whose times stay", outcomes)
    assert "silently wrong" not in outcomes


def answered(path: Path) -> list[tuple[Any, ...]]:
    """Return what DuckDB reads."""
    return duckdb.execute("from read_parquet($file)", {"file": str(path)}).fetchall()


def test_small_files_are_always_read_and_large_ones_after_a_time(store: Store) -> None:
    versions = store.versions()
    store.check_files(versions)
    remembered = Path(store.location, MEMORY).read_text(encoding="utf-8").splitlines()
    assert len(remembered) == len(set(remembered)) >= sum(len(store.paths(table)) for table in versions)
    large, small = Path(store.files("steps")[0]), Path(store.files("results")[0])
    before = flip(large, random.Random(1))  # noqa: S311
    store.check_files(versions, within=60.0)
    refused(store.check_files, versions, error=DamagedStoreError)
    refused(store.check_files, versions, 60.0, error=DamagedStoreError)  # what was found damaged is forgotten
    large.write_bytes(before)
    flip(small, random.Random(1))  # noqa: S311
    refused(store.check_files, versions, 60.0, error=DamagedStoreError)
    small.unlink()
    assert "cannot be read" in refused(store.check_files, versions, error=DamagedStoreError)


def test_commands_refuse_a_damaged_file(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(store.files("trajectories")[0])
    flip(path, random.Random(2))  # noqa: S311
    Path(store.location, MEMORY).unlink(missing_ok=True)  # a report looks at large files once a week
    for arguments in (("report", store.location), ("sql", store.location, QUERY, "--checked")):
        code, out, err = call(capsys, *arguments)
        assert (code, out) == (1, "")
        assert re.search(r"kvdrift: .*: trajectories/.*: kvdrift verify .* --repair\n$", err)
    assert call(capsys, "sql", store.location, QUERY)[0] == 0
    shutil.rmtree(Path(store.location, "results"))
    Store.create(store.location)
    code, _, err = call(capsys, "analyze", store.location)
    assert code == 1
    assert "trajectories/" in err
    assert list((Path(store.location) / "results").glob("*.parquet")) == []
