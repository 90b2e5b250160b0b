"""Actions that differ only in their retention share scores: they keep the same entries, in the same seconds, as alone."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from torch import Tensor

from kvdrift.generator.actions import Action
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.checks.random_models import random_document, random_model
from kvdrift.generator.selectors import Knorm, Recent, SnapKV
from kvdrift.generator.selectors.selector import ScoringSelector
from kvdrift.schema.retention import Retention

ENTRIES, LAYERS = 150, 3
SCORED: Counter[str] = Counter()  # layers, by the name of a selector's class


class Clock:
    """Seconds that pass only when somebody lets them."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


@dataclass(frozen=True)
class SlowSnapKV(SnapKV):
    """Takes a second for every layer."""

    def score(self, layer: PromptLayer) -> Tensor:
        SCORED[type(self).__name__] += 1
        CLOCK.now += 1
        return super().score(layer)


@dataclass(frozen=True)
class Overwriting(SlowSnapKV):
    """Does something of its own with its scores."""

    summary: ClassVar[str] = "first positions alone"

    def keep(self, layer: PromptLayer, kept: int) -> Tensor:
        scores = self.score(layer)
        scores[:, kept:] = -1
        return ScoringSelector.keep(self, layer, kept)


def records(monkeypatch: pytest.MonkeyPatch, actions: dict[str, tuple[Any, int]]) -> dict[str, dict[str, Any]]:
    """Return the columns of ``units`` about each action, by selector and m."""
    monkeypatch.setattr(time, "perf_counter", CLOCK)
    SCORED.clear()
    model = random_model("qwen2", layers=LAYERS)
    chosen = [Action(name, "own", selector, Retention(m)) for name, (selector, m) in actions.items()]
    prepared = model.prefill(random_document("d150", ENTRIES), chosen, horizon=4).evict()
    return {name: prepared.record(number, 1) for number, name in enumerate(actions, start=1)}


def test_equal_selectors_score_once_and_keep_what_they_keep_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    actions: dict[str, tuple[Any, int]] = {
        "20": (SlowSnapKV(8), 20),
        "recent": (Recent(), 75),
        "75": (SlowSnapKV(8), 75),
        "all": (SlowSnapKV(8), ENTRIES),
        "135": (SlowSnapKV(8), 135),
        "narrow": (SlowSnapKV(4), 75),
        "keys": (Knorm(), 75),
    }
    together = records(monkeypatch, actions)
    assert SCORED["SlowSnapKV"] == 2 * LAYERS  # of the window of 8, and of that of 4
    for name, action in actions.items():
        (alone,) = records(monkeypatch, {name: action}).values()
        assert together[name] == alone  # the seconds too: nothing but scores takes any here
    assert [record["prefill_seconds"] for record in together.values()] == [LAYERS, 0, LAYERS, 0, LAYERS, LAYERS, 0]
    assert together["75"]["kept_sha256"] != together["narrow"]["kept_sha256"]


def test_selectors_that_change_their_scores_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    together = records(monkeypatch, {"20": (Overwriting(8), 20), "75": (Overwriting(8), 75)})
    assert SCORED["Overwriting"] == 4 * LAYERS  # each action's ``keep`` asks for them twice a layer
    (alone,) = records(monkeypatch, {"75": (Overwriting(8), 75)}).values()
    assert together["75"]["kept_sha256"] == alone["kept_sha256"]
