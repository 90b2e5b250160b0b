"""Steps that are begun before the host has read the last tokens give the events of steps that wait for them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from fixtures.common_actions import CONTROL, HALF_SNAPKV

from kvdrift.generator.actions import Action
from kvdrift.generator.checks.random_models import random_document, random_model
from kvdrift.generator.coupling.streams import SharingOptions
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.selectors import Recent
from kvdrift.generator.transformer.prompts.streams import TransformerStreams
from kvdrift.log.store import Unit
from kvdrift.schema.retention import Retention
from kvdrift.schema.tables import SWRB

MOST = Action("recent-99", "recent", Recent(), Retention.parse("99%"))
PENDING = [
    PendingUnit(HALF_SNAPKV, 0, 5), PendingUnit(MOST, 0, 5), PendingUnit(CONTROL, 0, 2),
    PendingUnit(HALF_SNAPKV, 0, 3, SWRB), PendingUnit(MOST, 0, 3, SWRB),
]  # fmt: skip


def units(sharing: SharingOptions) -> list[Unit]:
    return generate_units(random_model("llama"), "s", random_document("d140", 140), PENDING, 40, 3, sharing)


def counting(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("feed", "give_up"):
        plain = getattr(TransformerStreams, name)

        def counted(*arguments: Any, name: str = name, plain: Any = plain) -> Any:
            calls[name] += 1
            return plain(*arguments)

        monkeypatch.setattr(TransformerStreams, name, counted)


@pytest.mark.parametrize("drop_ended", [True, False])
@pytest.mark.by_default("True")
def test_events_are_equal_to_the_bit(drop_ended: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    """Some pairs part late, so that steps are begun in vain; sides end; and branches join between steps."""
    sharing, calls = SharingOptions(fused=True, drop_ended=drop_ended), Counter[str]()
    with monkeypatch.context() as patched:
        patched.setattr(TransformerStreams, "ahead", None)
        counting(calls, patched)
        waiting = units(sharing)
        assert not calls["feed"]
    counting(calls, monkeypatch)
    for one, twin in zip(units(sharing), waiting, strict=True):
        assert one.events.equals(twin.events)
        for name in ("pair_evaluations", "kernel_evaluations"):
            assert one.record[name] == twin.record[name]
    assert calls["feed"] > calls["give_up"] > 0
    assert any(any(unit.events["x_eos"].to_pylist()) for unit in waiting)
