"""The folders of pages."""

from __future__ import annotations

from pathlib import Path

from flows.pages.reports import report_folder
from log.store import Store


def test_models_of_a_study_have_folders_of_their_own(tmp_path: Path) -> None:
    store = Store(tmp_path)
    folders = [report_folder(store, "s", model) for model in ("a/b", "a-b", "-a-b", "a b", "../b")]
    assert len(set(folders)) == len(folders)
    assert {folder.parent for folder in folders} == {tmp_path / "report" / "s"}
    assert folders[1].name == "a-b", "an id that is the name of a folder keeps it"
    assert folders[0].name.startswith("a-b-")
