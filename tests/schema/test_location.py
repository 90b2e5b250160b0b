"""Locations: which are local, how they are made absolute and joined, and that only ``kvdrift.schema.location`` decides it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.house import PACKAGES, ROOT
from fixtures.refusals import refused

from kvdrift.schema.location import absolute, filesystem_of, folder_name, is_local, join


def test_paths_and_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for location, made in (
        ("store", f"{tmp_path}/store"),
        (Path("store"), f"{tmp_path}/store"),
        ("~/store", f"{tmp_path}/home/store"),
        ("file:///a%20b/store", "/a b/store"),
        ("s3://bucket/store/", "s3://bucket/store"),
    ):
        assert absolute(location) == made
    assert is_local("/store")
    assert not is_local("s3://bucket/store")
    assert join("s3://bucket/store", "events", "a.parquet") == "s3://bucket/store/events/a.parquet"


def test_two_dots_are_left_out_unless_a_link_gives_them_another_meaning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "deep")
    monkeypatch.chdir(tmp_path / "own")
    assert absolute("../store") == f"{tmp_path}/store"
    assert absolute("../link/../store") == f"{tmp_path}/own/../link/../store"
    assert Path(absolute("../link/../store")).resolve() == tmp_path / "elsewhere" / "store"


@pytest.mark.parametrize("location", ["", " ", "file://"])
def test_no_location_is_refused(location: str) -> None:
    """An empty location is refused, since a path library would take it for the working folder."""
    line = refused(absolute, location)
    assert line == "the store's location is empty; give a folder, which may be '.', or a URL"


def test_the_file_system_of_a_location(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    for location in (f"{tmp_path}/file", f"file://{tmp_path}/file"):
        filesystem, path = filesystem_of(location)
        assert filesystem.open_input_file(path).read() == b"content"
    assert "nonsense://bucket/store: not a URL that can be read" in refused(filesystem_of, "nonsense://bucket/store")


def test_no_other_module_looks_for_a_scheme() -> None:
    folders = [name for name in PACKAGES if name != "generator"]  # where servers have addresses
    sources = [source for folder in folders for source in (ROOT / folder).rglob("*.py")]
    assert [str(source.relative_to(ROOT)) for source in sources if '"://"' in source.read_text()] == [
        "schema/location.py"
    ]


def test_names_as_folders(tmp_path: Path) -> None:
    for name in ("quickstart", "my study, v2", "größe", "a.b-c_d"):
        assert folder_name(name) == name
    odd = (
        "../../../x",
        "/etc",
        "..",
        ".",
        "",
        ".hidden",
        "a/b",
        "a\\b",
        "c:x",
        "a\nb",
        "a\0b",
        " x",
        "x" * 300,
        "a-b/",
    )
    made = [folder_name(name) for name in odd]
    assert len(set(made)) == len(odd)
    for name in made:
        (tmp_path / name).mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(made)
