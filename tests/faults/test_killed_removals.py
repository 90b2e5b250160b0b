"""A removal of a document that is killed at one of its steps: nothing else is lost, and the next call does the rest."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from faults.outcomes import SURVIVED, tell
from fixtures.removed_documents import DOC, grown, state, traces

from kvdrift.flows.run import forgetting
from kvdrift.flows.run.forgetting import find_removal, remove_document
from kvdrift.log.delta import folder as delta_folder
from kvdrift.log.delta.table_log import TableLog
from kvdrift.log.store import Store
from kvdrift.verification.logs import check_logs


def steps(monkeypatch: pytest.MonkeyPatch, at: int) -> list[str]:
    """Have the step ``at`` of a removal be the last one, as of a process that is killed then; return what was done."""
    done: list[str] = []

    def ending(owner: Any, name: str) -> None:
        whole = getattr(owner, name)

        def step(*arguments: Any, **options: Any) -> Any:
            if len(done) == at:
                raise Killed
            done.append(name)
            return whole(*arguments, **options)

        monkeypatch.setattr(owner, name, step)

    ending(forgetting, "add_forgotten")
    ending(Store, "rewrite_rows")
    ending(delta_folder, "replace_file")
    ending(delta_folder.DeltaFolder, "make_durable")
    ending(TableLog, "delete_before")
    ending(Path, "unlink")
    ending(forgetting.shutil, "rmtree")
    ending(forgetting, "refresh_catalog")
    return done


class Killed(BaseException):
    """The end of the process."""


@pytest.fixture(scope="module")
def removed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[str]]:
    """A store before a removal, what is left after it, and its steps."""
    folder = tmp_path_factory.mktemp("removed")
    grown(folder / "store")
    shutil.copytree(folder / "store", folder / "after")
    store = Store.open(folder / "after")
    with pytest.MonkeyPatch.context() as patch:
        done = steps(patch, -1)
        remove_document(store, find_removal(store, DOC, None), lambda _: None)
    return folder / "store", state(Store(folder / "after")), done


@pytest.mark.parametrize("part", [*range(8), *(pytest.param(part, marks=pytest.mark.slow) for part in range(8, 64))])
def test_a_removal_that_was_killed_is_finished_by_the_next_call(
    removed: tuple[Path, dict[str, Any], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    before, wanted, done = removed
    at = (part * 37 + 11) % len(done)
    location = Path(shutil.copytree(before, tmp_path / "store"))
    store = Store.open(location)
    with monkeypatch.context() as patch:
        steps(patch, at)
        with pytest.raises(Killed):
            remove_document(store, find_removal(store, DOC, None), lambda _: None)
    store = Store.open(location)
    kept = {row["doc"] for row in store.read("events").to_pylist()} - {DOC}
    assert kept == {"d0", "d1"}
    remove_document(store, find_removal(store, DOC, None), lambda _: None)
    assert traces(location, DOC) == []
    assert state(Store.create(location)) == wanted
    assert check_logs(Store(location)).faults == ()
    tell("a removal of a document killed at one of its steps; then the same call", [SURVIVED])
