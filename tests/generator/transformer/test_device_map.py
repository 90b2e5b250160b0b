"""Layers on several devices: data of a prompt stays with its layers, and unsupported settings are refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures.common_actions import CONTROL, HALF_SNAPKV, assert_near
from fixtures.pretend_device import SECOND, TwoDevices, bring_inputs, to_second_device
from fixtures.refusals import refused
from fixtures.small_study import write_study
from fixtures.study_files import load_study

from kvdrift.generator.actions import Action
from kvdrift.generator.attention import fused, parts, tables
from kvdrift.generator.checks.random_models import random_document, random_model, save_random_model
from kvdrift.generator.coupling.streams import SHARE_ALL, SharingOptions
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.selectors import SELECTORS, Full
from kvdrift.generator.transformer.loading import LoadedModel, load_model
from kvdrift.schema.retention import Retention
from kvdrift.schema.study import Study
from kvdrift.schema.tables import PLAIN, SWRB

DOCUMENT = random_document("d197", 197)
HORIZON = 8


def two_device_model(head: torch.device) -> LoadedModel:
    """A model of three layers, the last two and the head's norm on the second device."""
    model = random_model("llama", layers=3)
    network = copy.deepcopy(model.network)
    for part in (*network.model.layers[1:], network.model.norm):
        to_second_device(part)
        bring_inputs(part, SECOND)
    bring_inputs(network.lm_head, head)
    if head == SECOND:
        network.lm_head.weight = torch.nn.Parameter(network.lm_head.weight.clone(), requires_grad=False)  # not tied
        to_second_device(network.lm_head)
    return replace(model, network=network)


@pytest.mark.parametrize("head", [torch.device("cpu"), SECOND])
@pytest.mark.by_default("head1")
def test_two_devices_give_the_same_events(head: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every selector is tried. Residual branching sets streams aside, which plain coupling does not.

    The prompt's attention is another kernel on the second device, so distributions move by some 1e-7; tokens are equal unless a
    uniform falls as near to a boundary.
    """
    actions = [
        Action(name, name, selector(), Retention(None) if issubclass(selector, Full) else Retention.parse("1/2"))
        for name, selector in SELECTORS.items()
    ]
    pending = [PendingUnit(action, 0, 2, PLAIN) for action in actions]
    pending += [PendingUnit(action, 0, 3, SWRB) for action in actions if action.name == "snapkv"]
    whole = generate_units(random_model("llama", layers=3), "s", DOCUMENT, pending, HORIZON, 3)
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # tensors of our own cannot be inference tensors
    with TwoDevices():
        split = generate_units(two_device_model(head), "s", DOCUMENT, pending, HORIZON, 3)
    for one, other in zip(whole, split, strict=True):
        assert_near(one, other)
        assert one.record["kept_sha256"] == other.record["kept_sha256"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sharing", [SHARE_ALL, SharingOptions(fused=True)], ids=["plain", "fused"])
@pytest.mark.by_default("float32")
def test_a_device_of_its_own_gives_the_same_events(
    sharing: SharingOptions, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distributions, too, lie on the second device, all decisions on the CPU; the control is exactly zero there.

    Fused operations join chunks of 64 entries there.
    """
    if sharing.fused:
        for module in (parts, tables, fused):
            monkeypatch.setattr(module, "CHUNK", 64)
    model = random_model("qwen2", dtype)
    network = copy.deepcopy(model.network)
    to_second_device(network)
    pending = [PendingUnit(HALF_SNAPKV, 0, 3, estimator) for estimator in (PLAIN, SWRB)] + [PendingUnit(CONTROL, 0, 2)]
    whole = generate_units(model, "s", DOCUMENT, pending, HORIZON, 3)
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)
    monkeypatch.setattr("kvdrift.generator.transformer.prompts.document.available_bytes", lambda _: 2**33)
    there = replace(model, network=network, device=str(SECOND))
    with TwoDevices():
        other = generate_units(there, "s", DOCUMENT, pending, HORIZON, 3, sharing)
    for one, twin in zip(whole, other, strict=True):
        if one.record["action"] == "full":
            assert not np.any(twin.events["delta"].to_numpy())
            assert not np.any(twin.events["f"].to_numpy())
        elif dtype == "float32":
            assert_near(one, twin)


def test_the_two_devices_do_refuse_each_other() -> None:
    with TwoDevices(), pytest.raises(RuntimeError, match="takes tensors of both devices"):
        torch.ones(3)[torch.arange(2, device=SECOND)]


def test_a_study_names_a_device_or_a_map(tmp_path: Path) -> None:
    def study_with(lines: str) -> Study:
        return load_study(write_study(tmp_path, ('id = "kvdrift/tiny"', f'id = "kvdrift/tiny"\n{lines}')))

    mapped = study_with('device_map = "auto"')
    assert mapped.model.device_map == "auto"
    assert Study.model_validate_json(mapped.model_dump_json()).model_dump() == mapped.model_dump()
    assert mapped.sha256 != study_with("").sha256
    assert "model.device: " in refused(study_with, 'device_map = "auto"\ndevice = "cuda"')
    assert "model.device_map = 'all': should be 'auto'" in refused(study_with, 'device_map = "all"')


def test_accelerate_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_random_model(tmp_path / "model", "llama")
    monkeypatch.setattr("kvdrift.generator.transformer.model_checks.importlib.util.find_spec", lambda _: None)
    line = refused(load_model, str(folder), device_map="auto")
    assert line.startswith("model.device_map = 'auto': needs accelerate")


@pytest.mark.slow
class TestWithAccelerate:
    """``make slow`` installs it."""

    def test_a_map_onto_one_device_changes_nothing(self, tmp_path: Path) -> None:
        folder = save_random_model(tmp_path / "model", "llama")
        pending = [PendingUnit(CONTROL, 0, 4)]
        mapped, plain = (load_model(str(folder), device_map=device_map) for device_map in ("auto", None))
        assert mapped.device == "cpu" or torch.cuda.is_available()
        one, other = (generate_units(model, "s", DOCUMENT, pending, HORIZON, 3) for model in (mapped, plain))
        assert one[0].events.equals(other[0].events) or torch.cuda.is_available()

    def test_layers_without_a_place_in_memory_are_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = save_random_model(tmp_path / "model", "llama", layers=8)
        monkeypatch.setattr("transformers.integrations.accelerate.get_max_memory", lambda *_: {"cpu": 400_000})
        line = refused(load_model, str(folder), device_map="auto")
        assert line.startswith("model.device_map = 'auto': the weights")
