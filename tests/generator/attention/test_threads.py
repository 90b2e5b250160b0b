"""Threads wait asleep on a busy machine, and one thread computes there (llama.cpp pull request 13079 measures such waits)."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

import kvdrift.generator
from kvdrift.generator.attention import threads
from kvdrift.schema.free_processors import FreeProcessors, waited
from kvdrift.schema.own_process import own_environment

SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_IDLE_TEAM = """
import kvdrift.generator
import time, torch
torch.set_num_threads(2)
left = torch.ones(600, 600)
left @ left
torch.ones(200_000).exp()
time.sleep(0.2)
before = time.process_time()
time.sleep(0.5)
print(time.process_time() - before)
"""


class Clock:
    """A clock that the test moves, and the time that threads have waited."""

    def __init__(self) -> None:
        self.now = self.waited = 0.0

    def after(self, seconds: float, waited: float) -> None:
        self.now += seconds
        self.waited += waited


def test_one_thread_computes_while_threads_wait_for_processors() -> None:
    clock = Clock()
    free = FreeProcessors(lambda: clock.waited, lambda: clock.now)
    assert free.threads(4) == 4
    clock.after(1.0, 0.01)
    assert free.threads(4) == 4  # now and then a thread waits on every machine
    clock.after(0.5, 0.3)
    assert free.threads(4) == 1
    clock.after(3.0, 3.0)  # with one thread there is nothing to be seen of it
    assert free.threads(4) == 1
    clock.after(6.0, 0.0)
    assert free.threads(4) == 4  # tried again, and what waited before does not count
    clock.after(0.5, 0.05)
    assert free.threads(4) == 4
    assert free.threads(1) == 1


def test_the_number_is_chosen_within_a_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(threads, "FREE_PROCESSORS", FreeProcessors(lambda: clock.waited, lambda: clock.now))
    before = torch.get_num_threads()
    with threads.torch_threads(2):
        with threads.at_most(3):
            assert torch.get_num_threads() == 3
            clock.after(1.0, 0.9)
            threads.adapt()
            assert torch.get_num_threads() == 1
            clock.after(11.0, 0.0)
            threads.adapt()
            assert torch.get_num_threads() == 3
            with threads.torch_threads(2):
                threads.adapt()
                assert torch.get_num_threads() == 2
            threads.stay_alone()
            threads.adapt()
            assert torch.get_num_threads() == 1
        threads.adapt()
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == before


@pytest.mark.skipif(sys.platform != "linux", reason="the system counts how long threads wait")
def test_waits_are_counted_by_the_system() -> None:
    assert waited() >= 0.0


@pytest.mark.parametrize(
    ("given", "count"), [({}, "100000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_the_user_may_say_how_long_threads_wait(given: dict[str, str], count: str | None) -> None:
    """The package sets the variable when it is imported."""
    with mock.patch.dict(os.environ):
        for name in SETTINGS:
            os.environ.pop(name, None)
        os.environ.update(given)
        importlib.reload(kvdrift.generator)
        assert [os.environ.get(name) for name in SETTINGS] == [count, given.get("OMP_WAIT_POLICY")]


@pytest.mark.slow
def test_threads_without_work_sleep_soon() -> None:
    own = {name: value for name, value in own_environment().items() if name not in SETTINGS}
    done = subprocess.run([sys.executable, "-c", _IDLE_TEAM], env=own, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.1  # the CPU seconds that the idle threads take in half a second
