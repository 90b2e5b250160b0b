"""Steps by fused layers against transformers' own forward, and networks that do without them."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from fixtures.common_actions import CONTROL, HALF_SNAPKV, assert_near
from fixtures.pretend_device import SECOND, bring_inputs, to_second_device

from kvdrift.generator.checks.random_models import random_document, random_model
from kvdrift.generator.coupling.streams import SharingOptions
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.transformer.fused import layers
from kvdrift.generator.transformer.fused.layers import fused_layers, join_weights, layout_fault, slower
from kvdrift.generator.transformer.fused.operations import operations_fault
from kvdrift.generator.transformer.loading import LoadedModel
from kvdrift.log.store import Unit

DOCUMENT = random_document("d150", 150)


def own_model(architecture: str, dtype: str = "float32", layers: int = 2) -> LoadedModel:
    """A model whose network is the test's own."""
    model = random_model(architecture, dtype, layers)
    return replace(model, network=copy.deepcopy(model.network))


def units_of(model: LoadedModel, *, fused: bool) -> list[Unit]:
    pending = [PendingUnit(HALF_SNAPKV, 0, 3), PendingUnit(CONTROL, 0, 2)]
    return generate_units(model, "s", DOCUMENT, pending, 8, 3, SharingOptions(fused=fused))


@pytest.mark.parametrize(("architecture", "dtype"), [("qwen2", "float32"), ("qwen3", "bfloat16")])
def test_fused_layers_give_the_same_events(architecture: str, dtype: str) -> None:
    """Equal tokens, delta and f within 1e-5, in 16 bits too: every rounding is transformers'. Controls are zero."""
    model = own_model(architecture, dtype)
    plain = units_of(model, fused=False)
    assert not hasattr(model.network.model.layers[0].mlp, "joint_proj")
    fused = units_of(model, fused=True)
    assert hasattr(model.network.model.layers[0].mlp, "joint_proj")
    for one, other in zip(plain, fused, strict=True):
        assert_near(one, other)
    assert not np.any(fused[-1].events["delta"].to_numpy())


def test_weights_are_in_memory_once() -> None:
    """The modules' own weights are usable views of the joined weights, also in twins of the network."""
    model = own_model("qwen2")
    before = {name: weight.clone() for name, weight in model.network.named_parameters()}
    join_weights(model.network)
    join_weights(model.network)  # there is nothing left to do
    (twin,) = model.twins(1, lambda: None)
    for network in (model.network, twin.network):
        for layer in network.model.layers:
            for joint, parts in (
                (layer.self_attn.joint_proj, [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]),
                (layer.mlp.joint_proj, [layer.mlp.gate_proj, layer.mlp.up_proj]),
            ):
                assert {part.weight.untyped_storage().data_ptr() for part in parts} == {joint.weight.data_ptr()}
        held = {
            weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in network.parameters()
        }
        assert sum(held.values()) == sum(weight.nbytes for weight in before.values())
    for name, weight in before.items():
        assert torch.equal(model.network.get_parameter(name), weight)


def test_a_machine_without_cuda_says_so() -> None:
    assert operations_fault(torch.device("cuda")) is not None or torch.cuda.is_available()


def test_what_is_not_as_transformers_makes_it_is_computed_by_transformers() -> None:
    model = own_model("llama")
    hooked, replaced, quantized, mapped, mixed = (copy.deepcopy(model.network) for _ in range(5))
    hooked.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    replaced.model.layers[0].self_attn.o_proj = type("Other", (torch.nn.Linear,), {})(64, 64)
    quantized.model.layers[1].mlp.up_proj = torch.nn.Identity()
    quantized.model.layers[1].mlp.up_proj.register_buffer("weight", torch.zeros((2, 2), dtype=torch.int8))
    to_second_device(mapped.model.layers[1])
    bring_inputs(mapped.model.layers[1], SECOND)
    mixed.model.norm.to(torch.float64)
    for network, line in (
        (hooked, "layers.1.mlp has hooks"),
        (replaced, "layers.0.self_attn.o_proj is of class Other"),
        (quantized, "layers.1.mlp.up_proj has quantized weights"),
        (mapped, "the model's layers lie on several devices"),
        (mixed, "the model's weights are of several dtypes"),
    ):
        assert layout_fault(network) == line
        assert fused_layers(network, fused=True) is None


def test_one_line_says_all_that_decoding_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    network, faults = (
        own_model("llama").network,
        {"fused_fault": "no Triton", "attention_fault": None, "layers_fault": "hooks"},
    )
    assert slower(network, "cpu") is None
    for name, fault in faults.items():
        monkeypatch.setattr(layers, name, lambda _, fault=fault: fault)
    first, second = str(slower(network, "cuda:1")).split("; ")
    assert first.startswith("decoding on cuda:1 ")
    assert (first.endswith("(no Triton)"), second.endswith("(hooks)")) == (True, True)
    monkeypatch.setattr(layers, "attention_fault", lambda _: "no linker")
    assert str(slower(network, "cuda:1")).count("; ") == 2
    for name in faults:
        monkeypatch.setattr(layers, name, lambda _: None)
    assert slower(network, "cuda:1") is None
    network.model.layers[1].mlp.act_fn = torch.nn.ReLU()
    assert str(slower(network, "cuda:1")).endswith("computed by their own modules (MLP of layer 1)")
