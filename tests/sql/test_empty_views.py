"""Views that are kept in the cache folder: read if whole and of this version, otherwise made again."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdrift.sql.empty_views import kept_build


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvdrift"


class Builds:
    """Builds, and what they were made from."""

    def __init__(self) -> None:
        self.made: list[bytes] = []

    def of(self, made_from: bytes) -> bytes:
        """Return a build, which is made if it is not kept."""

        def build() -> bytes:
            self.made.append(made_from)
            return made_from * 3

        return kept_build(made_from, build)


def test_a_build_is_made_once_for_what_it_is_made_from(folder: Path) -> None:
    builds = Builds()
    assert [builds.of(text) for text in (b"one", b"one", b"two", b"one")] == [
        b"oneoneone", b"oneoneone", b"twotwotwo", b"oneoneone",
    ]  # fmt: skip
    assert builds.made == [b"one", b"two"]
    assert len([*folder.iterdir()]) == 2


@pytest.mark.parametrize("damaged", [b"", b"short", b"0" * 40])
def test_a_damaged_file_is_made_again(folder: Path, damaged: bytes) -> None:
    builds = Builds()
    builds.of(b"one")
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damaged)
    assert builds.of(b"one") == b"oneoneone"
    assert (len(builds.made), file.read_bytes()) == (2, whole)


def test_nothing_is_kept_if_the_folder_takes_no_file(folder: Path) -> None:
    folder.touch()
    builds = Builds()
    assert [builds.of(b"one") for _ in range(2)] == [b"oneoneone"] * 2
    assert len(builds.made) == 2


def test_files_of_many_versions_ago_go(folder: Path) -> None:
    builds = Builds()
    for number in range(20):
        builds.of(bytes([number]))
    assert len([*folder.iterdir()]) == 16
