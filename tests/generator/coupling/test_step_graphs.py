"""Which steps are captured, and which are replayed; CUDA is replaced by a record of calls.

Replayed steps on a GPU are compared with steps that are not in ``tests/generator/test_cuda.py``.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from kvdrift.generator.coupling.steps import StepGraphs


class Graph:
    """A graph whose operations are the calls to ``calls`` between its begin and its end."""

    calls: list[str]
    pools: list[object]
    capturing = False

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.pools.append(pool)
        self.first, Graph.capturing = len(self.calls), True

    def capture_end(self) -> None:
        Graph.capturing = False
        self.operations = self.calls[self.first :]
        del self.calls[self.first :]  # which were not executed

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        self.calls.extend(f"{call}, replayed" for call in self.operations)


class Stream:
    """A stream on which nothing waits."""

    def wait_stream(self, other: object) -> None:
        """Return at once."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the device did, in order."""
    done: list[str] = []
    monkeypatch.setattr(Graph, "calls", done, raising=False)
    monkeypatch.setattr(Graph, "pools", [], raising=False)
    fakes: dict[str, Any] = {
        "CUDAGraph": Graph, "Stream": Stream, "current_stream": Stream, "stream": nullcontext, "device": nullcontext,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return done


def test_the_second_step_of_a_bucket_is_captured_and_later_ones_are_replayed(calls: list[str]) -> None:
    graphs, prepared = StepGraphs("cuda", print), list[str]()

    def step(bucket: str) -> None:
        calls.append(bucket)
        prepared.append(bucket)

    for bucket in "abaab":
        graphs.run(bucket, partial(step, bucket))
    assert calls == ["a", "b", "a, replayed", "a, replayed", "b, replayed"]
    assert prepared == ["a", "b", "a", "b"], "the host's part of a step: computed, then captured"
    assert Graph.pools == [None, "pool"]


def test_a_step_that_cannot_be_captured_is_computed_operation_by_operation(calls: list[str]) -> None:
    said: list[str] = []
    graphs = StepGraphs("cuda", said.append)

    def step() -> None:
        if Graph.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        calls.append("step")

    for _ in range(4):
        graphs.run("a", step)
    assert calls == ["step"] * 4
    (line,) = said
    assert "cuda" in line
    assert "operation not permitted when stream is capturing" in line
