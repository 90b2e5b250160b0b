"""Steps that are begun before the host has read the last tokens give the events of steps that wait for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from fixtures.common_actions import CONTROL, HALF_SNAPKV, assert_same_kept

from kvdrift.generator.actions import Action, build_action
from kvdrift.generator.checks.random_models import random_document, random_model
from kvdrift.generator.coupling.streams import SharingOptions
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.selectors import Recent
from kvdrift.generator.transformer.prompts.streams import TransformerStreams
from kvdrift.log.store import Unit
from kvdrift.schema.retention import Retention
from kvdrift.schema.study import ActionSection
from kvdrift.schema.tables import PLAIN, SWRB

MOST = Action("recent-99", "recent", Recent(), Retention.parse("99%"))
SELECTORS = [
    PendingUnit(HALF_SNAPKV, 0, 5), PendingUnit(MOST, 0, 5), PendingUnit(CONTROL, 0, 2),
    PendingUnit(HALF_SNAPKV, 0, 3, SWRB), PendingUnit(MOST, 0, 3, SWRB),
]  # fmt: skip
# m is reached after 12 tokens, and pairs part later still, so that policies' scores move in steps that are begun.
POLICIES = [
    PendingUnit(build_action(ActionSection(name=name, policy={"name": name}, keep=152)), 0, 3, estimator)
    for name, estimator in (("h2o", PLAIN), ("tova", PLAIN), ("sliding", PLAIN), ("h2o", SWRB))
]


def units(pending: Sequence[PendingUnit], sharing: SharingOptions) -> list[Unit]:
    return generate_units(random_model("llama"), "s", random_document("d140", 140), pending, 40, 3, sharing)


def counting(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("place", "feed", "give_up", "confirm"):
        plain = getattr(TransformerStreams, name)

        def counted(*arguments: Any, name: str = name, plain: Any = plain) -> Any:
            calls[name] += 1
            return plain(*arguments)

        monkeypatch.setattr(TransformerStreams, name, counted)


@pytest.mark.parametrize("pending", [SELECTORS, POLICIES], ids=["selectors", "policies"])
def test_events_are_equal_to_the_bit(pending: Sequence[PendingUnit], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some pairs part late, so that steps are begun in vain; sides end; and branches join between steps."""
    sharing, calls = SharingOptions(fused=True), Counter[str]()
    with monkeypatch.context() as patched:
        patched.setattr(TransformerStreams, "ahead", None)
        counting(calls, patched)
        waiting = units(pending, sharing)
        assert not calls["feed"]
    counting(calls, monkeypatch)
    for one, twin in zip(units(pending, sharing), waiting, strict=True):
        assert one.events.equals(twin.events)
        assert_same_kept(one, twin)
        for name in ("pair_evaluations", "kernel_evaluations"):
            assert one.record[name] == twin.record[name]
    assert calls["feed"] > calls["give_up"] > 0
    assert any(any(unit.events["x_eos"].to_pylist()) for unit in waiting)
    assert calls["confirm"] == calls["place"] + calls["feed"] - calls["give_up"]


def test_a_scan_that_ends_early_gives_up_what_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only pair of these scans ends before the horizon, when the next position is begun already."""
    calls = Counter[str]()
    counting(calls, monkeypatch)
    for replicate in (0, 2):
        (unit,) = units([PendingUnit(HALF_SNAPKV, replicate, 1, SWRB)], SharingOptions(fused=True))
        assert any(unit.events["x_eos"].to_pylist())
    assert calls["give_up"] > 0
    assert calls["confirm"] == calls["place"] + calls["feed"] - calls["give_up"]
