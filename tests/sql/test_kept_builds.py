"""Builds in the cache folder: read if whole and of this version, otherwise made again."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvdrift.sql.kept_builds import kept_build


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvdrift"


def build_of(made: list[str], name: str, made_from: bytes) -> bytes:
    def build() -> bytes:
        made.append(name)
        return made_from * 3

    return kept_build(name, made_from, build)


def test_a_build_is_made_once_for_what_it_is_made_from(folder: Path) -> None:
    made: list[str] = []
    assert [build_of(made, "views", text) for text in (b"one", b"one", b"two", b"one")] == [
        b"oneoneone", b"oneoneone", b"twotwotwo", b"oneoneone",
    ]  # fmt: skip
    assert len(made) == len([*folder.iterdir()]) == 2


@pytest.mark.parametrize("damaged", [b"", b"short", b"0" * 40])
def test_a_damaged_file_is_made_again(folder: Path, damaged: bytes) -> None:
    made: list[str] = []
    build_of(made, "views", b"one")
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damaged)
    assert build_of(made, "views", b"one") == b"oneoneone"
    assert (made, file.read_bytes()) == (["views", "views"], whole)


def test_nothing_is_kept_where_the_folder_takes_no_file(folder: Path) -> None:
    folder.touch()
    made: list[str] = []
    assert [build_of(made, "views", b"one") for _ in range(2)] == [b"oneoneone"] * 2
    assert len(made) == 2


def test_files_of_many_versions_ago_go(folder: Path) -> None:
    made: list[str] = []
    for number in range(20):
        build_of(made, "views", bytes([number]))
    assert len([*folder.iterdir()]) == 16


@pytest.mark.parametrize("jump", [-400 * 86400.0, 400 * 86400.0])
def test_a_clock_that_was_set_wrong_keeps_no_build_from_staying(folder: Path, jump: float) -> None:
    """What was made while the clock was wrong goes first, and builds of today are each made once."""
    made: list[str] = []
    for number in range(16):
        build_of(made, "views", bytes([number]))
    for file in folder.iterdir():
        os.utime(file, (time.time() + jump, time.time() + jump))
    made.clear()
    for _ in range(2):
        for number in range(20, 28):
            build_of(made, "views", bytes([number]))
    assert len(made) == 8
    assert len([*folder.iterdir()]) == 16


@pytest.mark.usefixtures("folder")
def test_a_build_survives_its_own_making_while_the_clock_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    for number in range(16):
        build_of(made, "views", bytes([number]))
    replace = Path.replace

    def behind(path: Path, target: Path) -> Path:
        os.utime(path, (1.0, 1.0))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", behind)
    made.clear()
    assert [build_of(made, "views", b"new") for _ in range(2)] == [b"new" * 3] * 2
    assert len(made) == 1
