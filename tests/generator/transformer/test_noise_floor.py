"""The action ``numerics``: the whole cache computed another way, compared with plain twins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fixtures.common_actions import CONTROL, HALF_SNAPKV, assert_like_plain, eager_network, plain_twin, steps_of
from fixtures.refusals import refused
from oracles.plain_generator import keep_all
from transformers import DynamicCache

from kvdrift.generator.actions import Action, build_action
from kvdrift.generator.attention import shared_prefix
from kvdrift.generator.attention.row_invariance import RowInvariance
from kvdrift.generator.attention.shared_prefix import PrefixLayer, SharedPrefix, StreamCache
from kvdrift.generator.checks.random_models import random_document, random_model
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.transformer.footprint import plan_memory
from kvdrift.log.store import Unit
from kvdrift.schema.study import ActionSection
from kvdrift.schema.tables import PLAIN

DOCUMENT, HORIZON = random_document("d190", 190), 10


def numerics(name: str = "numerics", **parameters: Any) -> Action:
    return build_action(ActionSection(name=name, selector="numerics", keep="all", **parameters))


def generated(*actions: Action, kind: str = "qwen2", count: int = 3, model: Any = None) -> dict[str, Unit]:
    pending = [PendingUnit(action, 0, 2 if action.control else count) for action in actions]
    units = generate_units(model or random_model(kind), "s", DOCUMENT, pending, HORIZON, 3)
    return {unit.record["action"]: unit for unit in units}


@pytest.mark.parametrize(
    "parameters",
    [
        {}, {"prefill_chunk": 4096}, {"cache_dtype": "float32"}, {"row_tile": 3},
        {"row_tile": 1, "cache_dtype": "float32"},
    ],
    ids=str,
)  # fmt: skip
def test_where_the_computation_is_the_same_it_is_exactly_zero(parameters: dict[str, Any]) -> None:
    """Chunks of at least n tokens, the model's own dtype, and tiles of rows that do not depend on each other."""
    model = random_model("qwen2")
    assert model.batch_deviation == 0
    steps = steps_of(generated(numerics(**parameters), count=9, model=model)["numerics"])
    assert not steps["delta"].any()
    assert not steps["f"].any()
    assert (steps["x_token"] == steps["y_token"]).all()


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_another_dtype_is_that_of_a_plain_cache_that_holds_it(kind: str) -> None:
    """Transformers' own cache and attention; keys that differ by 1e-7 may round to neighbours in float16."""
    unit = generated(numerics(cache_dtype="float16"), kind=kind)["numerics"]
    held = plain_twin(
        eager_network(kind),
        DOCUMENT,
        "numerics",
        keep_all(),
        3,
        HORIZON,
        hold=lambda part: part.to(torch.float16).float(),
    )
    assert_like_plain(unit, held)
    steps = steps_of(unit)
    assert 0 < steps["delta"].max() < 0.01
    assert not steps["delta"][:, 0].any()
    assert not steps["f"][:, 0].any()


def test_other_chunks_are_those_of_a_plain_prefill() -> None:
    unit_cache = _held(numerics(prefill_chunk=48))
    cache, tokens = DynamicCache(), torch.tensor([DOCUMENT.tokens])
    with torch.no_grad():
        for chunk in torch.split(tokens, 48, dim=1):
            eager_network("qwen2")(chunk, past_key_values=cache)
    whole = _held(numerics())
    moved = 0
    for layer, plain, own in zip(unit_cache, cache.layers, whole, strict=True):
        for part, expected, reference in (
            (layer.key, plain.keys[0], own.key),
            (layer.value, plain.values[0], own.value),
        ):
            assert (part - expected).abs().max() < 1e-5
            assert (part - reference).abs().max() < 1e-5
            moved += int((part != reference).sum())
    assert moved > 0


def test_events_depend_on_the_action_alone() -> None:
    """The noise floor's events, and bit for bit those of the actions beside it, are the same without the others."""
    own = numerics(prefill_chunk=48, cache_dtype="bfloat16", row_tile=2)
    together = generated(HALF_SNAPKV, own, CONTROL)
    for alone in (generated(own), generated(HALF_SNAPKV, CONTROL)):
        for name, unit in alone.items():
            assert unit.events.equals(together[name].events), name
    assert steps_of(together["numerics"])["delta"].max() > 0
    assert steps_of(together["full"])["delta"].max() == 0


def test_bytes_are_counted_as_they_are_stored() -> None:
    units = generated(numerics("half", cache_dtype="bfloat16"), numerics(), CONTROL)
    payload = {name: unit.record["payload_bytes"] for name, unit in units.items()}
    assert payload["numerics"] == payload["full"] == 2 * payload["half"]
    assert {unit.record["kept_entries"] for unit in units.values()} == {190}
    shape = random_model("qwen2").shape
    plans = [plan_memory([(shape, [190], [1])], 190, 8, 2**30, PLAIN, apart=apart) for apart in (False, True)]
    assert plans[1].prefill_bytes - plans[0].prefill_bytes == shape.entry_bytes * 190


def test_tiles_of_ones_own_are_not_those_of_fused_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "are_fused", lambda *_: True)
    part = torch.zeros(1, 4, 8)
    cache = StreamCache([PrefixLayer(part, part)], tile=3)
    assert refused(SharedPrefix, [cache], 1, 0, 4, 1, RowInvariance(1, 0.0)).startswith("row_tile: ")


def _held(action: Action) -> Any:
    """The layers that an action's streams read."""
    return random_model("qwen2").prepare(DOCUMENT, [action], HORIZON).caches.caches[1].layers
