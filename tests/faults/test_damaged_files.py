"""Flipped bits in Parquet files: nothing is estimated, reported or answered with ``--checked`` from a damaged file."""

from __future__ import annotations

import random
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb
import pytest
from fixtures.command import call
from fixtures.refusals import refused

from schema.errors import DamagedStoreError
from schema.store import checked_files
from schema.store.checked_files import DERIVED_TABLES, MEMORY
from schema.store.store import Store

FLIPPED = 30
QUERY = "select count(*) as n from events"


@pytest.fixture
def store(finished: Path, tmp_path: Path) -> Store:
    """The store of the finished small study, to be damaged."""
    return Store.open(shutil.copytree(finished, tmp_path / "store"))


def flip(path: Path, chance: random.Random) -> bytes:
    """Change one bit in the middle of a file, as a disk does; return what was there."""
    data = bytearray(before := path.read_bytes())
    data[chance.randrange(4, len(data) * 2 // 3)] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return before


def test_flipped_bits_are_refused(store: Store) -> None:
    """Or they change no row: a derived file has no digest, and its page headers no checksum."""
    lines: list[str] = []
    chance, versions = random.Random(3), store.versions()  # noqa: S311
    files = [(table, path) for table in ("events", "trajectories", "steps", "results") for path in store.paths(table)]
    for table, name in chance.sample(files, FLIPPED):
        path = Path(store.location, table, name)
        rows = answered(path)
        before = flip(path, chance)
        try:
            store.check_files({table: versions[table]})
        except DamagedStoreError as error:
            lines.append(str(error))
        else:
            assert table in DERIVED_TABLES, "the name of every other file holds its digest"
            with suppress(duckdb.Error):  # it refuses the file by itself
                assert answered(path) == rows
        path.write_bytes(before)
    assert len(lines) > FLIPPED * 0.6
    for line in lines:
        assert re.fullmatch(rf"{store.location}: \w+/.*: kvdrift verify {store.location} --repair", line)
    store.check_files(versions)


def answered(path: Path) -> list[tuple[Any, ...]]:
    """What DuckDB reads."""
    return duckdb.execute("from read_parquet($file)", {"file": str(path)}).fetchall()


def test_every_file_is_read_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = store.versions()
    store.check_files(versions)
    remembered = Path(store.location, MEMORY).read_text(encoding="utf-8").splitlines()
    assert len(remembered) == len(set(remembered)) >= sum(len(store.paths(table)) for table in versions)
    with monkeypatch.context() as patch:
        patch.setattr(checked_files, "parse", None)
        store.check_files(versions)
    path = Path(store.files("steps")[0])
    flip(path, random.Random(1))  # noqa: S311
    refused(store.check_files, versions, error=DamagedStoreError)
    path.unlink()
    assert "cannot be read" in refused(store.check_files, versions, error=DamagedStoreError)


def test_commands_refuse_a_damaged_file(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(store.files("trajectories")[0])
    flip(path, random.Random(2))  # noqa: S311
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
