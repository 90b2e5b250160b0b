"""A GPU beside the CPU in float32: every family, selector, codec and policy.

On the pretended device, marked slow, the same tests run without rounding of another kind. The comparison's own tests
run everywhere.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures.agreement import assert_agree, compare
from fixtures.common_actions import CONTROL, HALF_RECENT, HALF_SNAPKV, steps_of
from fixtures.devices import Device
from fixtures.families import FAMILIES, saved_family

from kvdrift.generator.actions import Action, build_action
from kvdrift.generator.checks.random_models import random_document, save_random_model
from kvdrift.generator.codecs import CODECS
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.selectors import SELECTORS
from kvdrift.generator.selectors.policies import POLICIES
from kvdrift.generator.transformer.loading import LoadedModel, load_model
from kvdrift.log.store import Unit
from kvdrift.schema.study.actions import ActionSection

DOCUMENT = random_document("d230", 230)
REPLICATES, HORIZON, SEED = 3, 12, 3


def action(**keys: Any) -> Action:
    """Return an action as a study file has it."""
    return build_action(ActionSection.model_validate(keys))


CODECS_HERE = [name for name in CODECS if not name.startswith("hqq") or importlib.util.find_spec("hqq")]
OF_FAMILIES = [
    CONTROL, HALF_RECENT, HALF_SNAPKV,
    action(name="keydiff", selector="keydiff", keep="1/2"), action(name="int4", codec="int4", keep="all"),
    action(name="sliding", policy="sliding", keep=96), action(name="h2o", policy="h2o", keep=96),
]  # fmt: skip
EVERY = [
    *(
        action(name=f"selector-{name}", selector=name, keep="1/2")
        for name in SELECTORS
        if name not in {"full", "numerics"}
    ),
    action(name="numerics", selector="numerics", prefill_chunk=96, keep="all"),
    *(action(name=f"codec-{name}", codec=name, keep="all") for name in CODECS_HERE),
    *(
        action(name=f"generated-{name}", codec={"name": name, "generated": True}, selector="recent", keep="1/2")
        for name in ("fp8", "int4", "rotated-int4")
    ),
    *(action(name=f"policy-{name}", policy=name, keep=96) for name in POLICIES),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads and layers every codec takes."""
    changes = {"head_dim": 128, "vocab_size": 512, "initializer_range": 0.15, "num_hidden_layers": 6}
    return save_random_model(tmp_path_factory.mktemp("models") / "llama", "llama", **changes)


def units_of(model: LoadedModel, actions: list[Action]) -> list[Unit]:
    pending = [PendingUnit(one, 0, REPLICATES) for one in actions]
    return generate_units(model, "s", DOCUMENT, pending, HORIZON, SEED)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(device: Device, family: str) -> None:
    here, there = (load(saved_family(family), "float32") for load in (device.load_beside, device.load))
    compare(here, there, DOCUMENT, OF_FAMILIES, [units_of(model, OF_FAMILIES) for model in (here, there)])


@pytest.mark.parametrize("tried", EVERY, ids=lambda tried: tried.name)
def test_every_part(device: Device, tried: Action, folder: Path) -> None:
    here, there = (load(folder, "float32") for load in (device.load_beside, device.load))
    compare(here, there, DOCUMENT, [tried], [units_of(model, [tried]) for model in (here, there)])


# --- The comparison ---------------------------------------------------------------------------------------------------


@cache
def by_the_cpu() -> dict[str, Unit]:
    """The units of a family's actions."""
    units = units_of(load_model(str(saved_family("mistral"))), OF_FAMILIES)
    return {tried.name: unit for tried, unit in zip(OF_FAMILIES, units, strict=True)}


TRIED = {tried.name: tried for tried in OF_FAMILIES}
EVICTING = ("recent-half", "snapkv-half", "keydiff", "sliding", "h2o")


def moved(unit: Unit, by: float) -> Unit:
    """Return the unit with distances that differ by this much."""
    events = unit.events
    for name in ("delta", "f"):
        column = events[name].to_numpy() + np.float32(by)
        events = events.set_column(events.column_names.index(name), name, [column.astype(np.float32)])
    return replace(unit, events=events)


@pytest.mark.parametrize("name", EVICTING)
def test_a_fault_does_not_agree(name: str) -> None:
    """Evicting moves distances by much more than is allowed, and other entries by nearly as much."""
    unit, others = by_the_cpu()[name], set(EVICTING) - {name}
    assert steps_of(unit)["f"].mean() > 0.01
    with pytest.raises(AssertionError, match=f"{name}: delta differs by 0.001"):
        assert_agree(unit, moved(unit, 1e-3), TRIED[name])
    for other in others:
        with pytest.raises(AssertionError, match="differ"):
            assert_agree(unit, by_the_cpu()[other], TRIED[name])
