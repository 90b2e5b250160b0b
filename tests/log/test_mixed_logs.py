"""Files of one store copied over another's: an older backup of the same history goes on, another history is refused."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from deltalake import DeltaTable
from fixtures.command import call
from fixtures.stored_units import derive, make_unit

from kvdrift.log.store import Store
from kvdrift.schema.errors import DamagedStoreError
from kvdrift.verification.files import check_logs


def grown(path: Path, *docs: str) -> Store:
    """Make a store, with a commit for each document."""
    store = Store.create(path)
    for doc in docs:
        store.append_units([make_unit(doc)])
    return store


def copy_over(backup: Store, store: Store) -> Store:
    shutil.copytree(backup.location, store.location, dirs_exist_ok=True)
    return Store(store.location)


def breaks(store: Store) -> list[str]:
    return [str(fault) for fault in check_logs(store).faults]


def test_an_older_backup_of_the_same_history_changes_nothing(tmp_path: Path) -> None:
    store = grown(tmp_path / "store", "d0", "d1")
    backup = Store(shutil.copytree(store.location, tmp_path / "backup"))
    for doc in ("d2", "d3"):
        store.append_units([make_unit(doc)])
    derive(store)
    mixed = copy_over(backup, store)
    assert breaks(mixed) == []
    assert Store.create(mixed.location).append_units([make_unit(doc) for doc in ("d1", "d3", "d4")]) == 1
    assert breaks(mixed) == []


@pytest.mark.parametrize("more", [1, 30], ids=["a few commits", "checkpoints between"])
@pytest.mark.by_default("a few commits")
def test_a_shorter_log_of_another_store_is_named_and_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: int
) -> None:
    store = grown(tmp_path / "store", "d0", "d1", *(f"more-{number}" for number in range(more)))
    other = grown(tmp_path / "other", "d0")
    mixed = copy_over(other, store)
    version = other.version("events") + 1
    found = breaks(mixed)
    pattern = rf"events/_delta_log/{version:020}\.json: the log file .*(of another table|does not follow log file 0*{version - 1}\.json)"
    assert any(re.match(pattern, line) for line in found), found
    assert call(capsys, "verify", mixed.location)[0] == 1
    if more == 1:  # else everything that is read since the checkpoint is of one store
        with pytest.raises(
            DamagedStoreError, match=r"table 'events' has files of two histories \(log file 0*\d+\.json is of another"
        ):
            Store.open(mixed.location)
        with pytest.raises(DamagedStoreError):
            Store.create(mixed.location)


def test_another_course_of_the_same_store_is_named_and_refused(tmp_path: Path) -> None:
    """A backup went on by itself, and was then copied over the store, whose log is longer."""
    store = grown(tmp_path / "store", "d0")
    backup = Store(shutil.copytree(store.location, tmp_path / "backup"))
    backup.append_units([make_unit("of the backup")])
    for doc in ("d1", "d2"):
        store.append_units([make_unit(doc)])
    mixed = copy_over(backup, store)
    version = backup.version("events") + 1
    line = f"log file {version:020}.json does not follow log file {version - 1:020}.json: that has digest "
    with pytest.raises(DamagedStoreError, match=re.escape(line)):
        Store.open(mixed.location)
    assert any(
        fault.startswith(f"events/_delta_log/{version:020}.json: the log file does not") for fault in breaks(mixed)
    )


def test_commits_of_other_programs_are_taken_as_they_are(tmp_path: Path) -> None:
    store = grown(tmp_path / "store", "d0", "d1")
    DeltaTable(f"{store.location}/events").optimize.compact()
    DeltaTable(f"{store.location}/events").alter.set_table_properties(
        {"delta.deletedFileRetentionDuration": "interval 9 days"}
    )
    for doc in ("d2", "d3"):
        store.append_units([make_unit(doc)])
    DeltaTable(f"{store.location}/events").optimize.z_order(["t"])
    assert Store.create(store.location).append_units([make_unit("d4")]) == 1
    assert breaks(store) == []
