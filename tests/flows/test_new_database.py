"""The database of a new store's server: a copy of one that Prefect made earlier, or one that Prefect makes."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from flows.orchestration.new_database import DATABASE, copy_kept, keep


@pytest.fixture
def made(unbroken: tuple[Path, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of a server that has run, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copytree(unbroken[0] / ".prefect", tmp_path / "made"))


def new_home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    return home


def content(home: Path) -> list[str]:
    with closing(sqlite3.connect(home / DATABASE)) as connection:
        return list(connection.iterdump())


def kept_file(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "cache" / "kvdrift").iterdir()
    return file


def test_a_kept_database_is_copied_into_homes_without_one(made: Path, tmp_path: Path) -> None:
    home = new_home(tmp_path)
    assert not copy_kept(home), "none is kept yet"
    keep(made)
    assert copy_kept(home)
    assert content(home) == content(made)
    assert [path.name for path in home.iterdir()] == [DATABASE]
    kept_file(tmp_path).unlink()
    assert copy_kept(home), "it has one"


@pytest.mark.parametrize("length", [0, 11, 500_000])
def test_a_kept_database_that_is_not_whole_is_left_alone(made: Path, tmp_path: Path, length: int) -> None:
    keep(made)
    kept = kept_file(tmp_path)
    assert kept.stat().st_size > length
    kept.write_bytes(kept.read_bytes()[:length])
    home = new_home(tmp_path)
    assert not copy_kept(home)
    assert list(home.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_no_fault(made: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    keep(made)
    assert not copy_kept(new_home(tmp_path))


def test_a_home_without_the_file_keeps_nothing(made: Path, tmp_path: Path) -> None:
    """Prefect's settings name another database."""
    (made / DATABASE).unlink()
    keep(made)
    assert not (tmp_path / "cache").exists()
    assert not (made / DATABASE).exists()
