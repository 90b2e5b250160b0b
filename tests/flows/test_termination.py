"""SIGTERM ends a flow wherever it arrives."""

from __future__ import annotations

import signal
import sys
import time
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from prefect.exceptions import TerminationSignal

from kvdrift.flows.orchestration.flow_run import ended_by_sigterm


class Dying:
    """An object whose weak reference has a callback."""


def terminate(*_: object) -> NoReturn:
    raise TerminationSignal(signal.SIGTERM)


@pytest.fixture
def ignored(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The exceptions that Python ignores; SIGTERM has the handler ``terminate``."""
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: found.append(raised.exc_value))
    monkeypatch.setattr("kvdrift.flows.orchestration.flow_run.AGAIN", 0.05)
    before = signal.signal(signal.SIGTERM, terminate)
    yield found
    signal.signal(signal.SIGTERM, before)


def in_a_callback() -> None:
    """Let SIGTERM arrive while Python calls a weak reference's callback."""

    def callback(_: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        for _ in range(1000):  # the handler runs between two instructions
            pass

    dying = Dying()
    reference = weakref.ref(dying, callback)
    del dying
    assert reference() is None


def test_python_ignores_what_a_handler_raises_in_a_callback(ignored: list[Any]) -> None:
    in_a_callback()
    assert [type(error) for error in ignored] == [TerminationSignal]


def working(times: int) -> None:
    """Let SIGTERM arrive some times without effect, and go on for a minute."""
    for _ in range(times):
        in_a_callback()
    time.sleep(60)


@pytest.mark.parametrize("times", [1, 2])
def test_sigterm_ends_the_block_though_python_ignored_it(ignored: list[Any], times: int) -> None:
    with pytest.raises(TerminationSignal), ended_by_sigterm():
        working(times)
    assert not ignored


def test_sigterm_is_sent_once_if_its_exception_goes_its_way(ignored: list[Any]) -> None:
    """Whatever takes long to end, such as a task whose state is written to a server, is not disturbed."""

    def ending_slowly() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            time.sleep(0.25)

    with pytest.raises(TerminationSignal), ended_by_sigterm():
        ending_slowly()
    assert not ignored


def test_what_else_is_ignored_goes_to_the_earlier_hook(ignored: list[Any]) -> None:
    def failing(_: object) -> NoReturn:
        raise ZeroDivisionError

    with ended_by_sigterm():
        dying = Dying()
        reference = weakref.ref(dying, failing)
        del dying
    assert reference() is None
    assert [type(error) for error in ignored] == [ZeroDivisionError]


def test_the_handler_stays(ignored: list[Any]) -> None:
    """Prefect takes a run as cancelled only if its own handler is there."""
    with ended_by_sigterm():
        assert signal.getsignal(signal.SIGTERM) is terminate
    assert not ignored
