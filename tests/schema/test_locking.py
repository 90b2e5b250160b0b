"""A repair has a store for itself: another one is refused, and commits wait. Runs come one after the other."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path

import pytest
from fixtures.refusals import refused
from fixtures.stored_units import make_unit

from kvdrift.log.store import Store
from kvdrift.schema.errors import OperationError
from kvdrift.schema.locking import run_alone
from kvdrift.verification.repair import repair


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def test_two_repairs_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdrift.schema.locking.PATIENCE", 0.1)
    folder = os.open(store.location, os.O_RDONLY)  # as another process has it
    fcntl.flock(folder, fcntl.LOCK_EX)
    message = refused(list, repair(store), error=OperationError)
    assert message == (
        f"{store.location}: another process repairs the store or writes to it; wait until that process ends, "
        "then run 'kvdrift verify --repair' again"
    )
    os.close(folder)
    assert list(repair(store)) == []


def test_a_commit_waits_for_a_repair(store: Store) -> None:
    folder = os.open(store.location, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    writer = threading.Thread(target=store.append_units, args=([make_unit("d0")],))
    writer.start()
    writer.join(0.5)
    assert writer.is_alive()
    assert Store(store.location).paths("events") == []
    os.close(folder)
    writer.join(60)
    assert len(store.paths("events")) == 1


def test_the_later_run_of_a_store_waits_and_says_so(store: Store) -> None:
    location, said, order = store.location, list[str](), list[str]()

    def later() -> None:
        with run_alone(location, said.append):
            order.append("later")

    with run_alone(location, said.append):
        waiting = threading.Thread(target=later)
        waiting.start()
        while not said:
            time.sleep(0.01)
        order.append("first")
    waiting.join()
    assert order == ["first", "later"]
    assert said == [f"another run works on {location}: this run waits for its end, and then does the rest"]
    with run_alone("s3://bucket/store", said.append), run_alone("s3://bucket/store", said.append):
        assert len(said) == 1
