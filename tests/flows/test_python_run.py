"""``kvdrift.run`` is the command: its options, its progress, and one run at a time."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures.finite_study import write_finite_study, write_smallest_study
from fixtures.refusals import refused
from huggingface_hub import constants

import kvdrift
from kvdrift.console import listener
from kvdrift.log.store import Store
from kvdrift.schema.errors import OperationError


@pytest.mark.filterwarnings("error::UserWarning")  # matplotlib's: systems may have no variance ratio yet
def test_options_stop_a_run_and_the_next_one_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study, store = write_smallest_study(tmp_path), tmp_path / "store"
    assert kvdrift.run(study, store, dry_run=True, progress=False) is None
    out, err = capsys.readouterr()
    assert "events" in out
    assert (err, store.exists()) == ("", False)
    assert kvdrift.run(study, store, limit=1, progress=False) is None
    assert len(Store.open(store).read("units")["doc"].unique()) == 1
    assert Store.open(store).row_count("plans") == 0
    assert kvdrift.run(study, store, plan_only=True, progress=False) is None
    assert Store.open(store).row_count("plans") == 1
    assert len(Store.open(store).read("units")["doc"].unique()) == 2
    assert capsys.readouterr() == ("", "")
    page = kvdrift.run(study, store)
    assert page is not None
    assert page.is_file()
    assert "documents: " in capsys.readouterr().err
    assert kvdrift.run(study, store) == page


def test_a_dry_run_leaves_later_runs_online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # as if the dry run had imported it
    assert kvdrift.run(write_finite_study(tmp_path), tmp_path / "store", dry_run=True, progress=False) is None
    assert "HF_HUB_OFFLINE" not in os.environ
    assert not constants.HF_HUB_OFFLINE


def test_a_second_run_of_a_process_is_refused_and_the_first_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = write_finite_study(tmp_path)
    begun, ended, pages = threading.Event(), threading.Event(), list[Path | None]()

    def run_file(*_: object, **__: object) -> SimpleNamespace:
        begun.set()
        ended.wait(60)
        return SimpleNamespace(pages=[tmp_path / "index.html"])

    monkeypatch.setattr("kvdrift.flows.run.study.run_file", run_file)
    first = threading.Thread(target=lambda: pages.append(kvdrift.run(study, tmp_path / "store", progress=False)))
    first.start()
    begun.wait(60)
    assert "another run" in refused(kvdrift.run, study, tmp_path / "store", progress=False, error=OperationError)
    ended.set()
    first.join()
    assert pages == [tmp_path / "index.html"]
    assert kvdrift.run(study, tmp_path / "store", progress=False) == tmp_path / "index.html"


def test_a_notebook_shows_a_line_for_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[list[str]] = []

    class Handle:
        def __init__(self) -> None:
            self._shown = lines[-1]

        def update(self, line: dict[str, str], **_: Any) -> None:
            self._shown.append(line["text/plain"])

    def display(line: dict[str, str], **_: Any) -> Handle:
        lines.append([line["text/plain"]])
        return Handle()

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=None)))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    with listener(shown=True) as progress:
        progress.begin("evaluation documents", 2, "documents")
        progress.advance(1)
        progress.advance(1)
        progress.begin("bootstrap", 1, "parts")
    (documents, parts) = lines
    assert [line.partition(",")[0] for line in documents] == [
        "evaluation documents: 2 documents to do",
        "evaluation documents: 1 of 2 documents",
        "evaluation documents: 2 of 2 documents",
    ]
    assert parts == ["bootstrap: 1 part to do"]
