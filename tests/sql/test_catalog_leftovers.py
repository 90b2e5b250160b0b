"""What a catalogue's writing leaves if the disk is full or the process is killed: nothing after the next command."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import NoReturn

import pytest
from fixtures.processes import start_process

from kvdrift.log.store import Store
from kvdrift.schema.errors import OperationError
from kvdrift.schema.locking import TEMPORARY, temporary_folder
from kvdrift.sql import catalog_file
from kvdrift.sql.catalog_file import CATALOG_NAME, write_catalog


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def left(store: Store) -> list[str]:
    return [path.name for path in Path(store.location).glob(f"{TEMPORARY}*")]


def write_and_die(location: str) -> None:
    """Write a catalogue, and be killed before it gets its name."""

    def die(aside: Path, _: Path) -> None:
        aside.with_name(f"{aside.name}.wal").write_bytes(b"as DuckDB leaves it")
        os.kill(os.getpid(), signal.SIGKILL)

    catalog_file.replace_durably = die
    write_catalog(Store(location))


def test_a_full_disk_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(aside: Path, _: Path) -> NoReturn:
        aside.with_name(f"{aside.name}.wal").write_bytes(b"as DuckDB leaves it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(catalog_file, "replace_durably", full)
    before = sorted(Path(store.location).iterdir())
    with pytest.raises(OperationError, match=f"{CATALOG_NAME}: cannot be written .*No space left on device"):
        write_catalog(store)
    assert sorted(Path(store.location).iterdir()) == before


@pytest.mark.parametrize("sweeping", [write_catalog, lambda store: Store.create(store.location)])
@pytest.mark.slow
def test_the_next_writer_sweeps_what_a_killed_one_left(store: Store, sweeping: object) -> None:
    writer = start_process(write_and_die, store.location)
    writer.join(120)
    assert writer.exitcode == -signal.SIGKILL
    (killed,) = left(store)
    assert len([*Path(store.location, killed).iterdir()]) == 2
    with temporary_folder(Path(store.location)) as alive:
        (alive / "half").write_bytes(b"of a living process")
        assert callable(sweeping)
        sweeping(store)
        assert left(store) == [alive.name]
        assert (alive / "half").exists()
    assert left(store) == []
