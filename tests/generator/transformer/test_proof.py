"""The proof of a model: right models load whatever their weights, and a fault in a single layer is refused.

Routers with nearly equal scores, and rounding that grows from layer to layer, make two right implementations differ at
the end of a network. So each layer is compared on the reference's own input.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from fixtures.common_actions import CONTROL, HALF_SNAPKV
from fixtures.devices import PRETENDED, one_of
from fixtures.families import BASE, saved_family
from torch import Tensor, nn
from transformers import AttentionInterface

from kvdrift.generator.attention.interface import IMPLEMENTATION
from kvdrift.generator.attention.parts import attention_modules
from kvdrift.generator.attention.states import StreamStates
from kvdrift.generator.checks.random_models import random_document
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.transformer import decoder, loading
from kvdrift.generator.transformer.files.configuration import quiet
from kvdrift.generator.transformer.fused.head import Head
from kvdrift.generator.transformer.loading import LoadedModel, load_model
from kvdrift.generator.transformer.prompts.streams import TransformerStreams
from kvdrift.generator.transformer.proof import (
    OUTPUT,
    TOLERANCES,
    Point,
    Probe,
    Reference,
    difference,
    prove,
    reference_forward,
    refusal,
    visited,
)

pytestmark = pytest.mark.usefixtures("own_cache")

DTYPES = ("float32", "bfloat16", "float16")
LAYERS = 5
SINKS = "windows and sinks"  # a GPT-OSS whose first, middle and last layers have windows
WINDOWS = {
    "num_hidden_layers": LAYERS,
    "sliding_window": 40,
    "layer_types": [*["sliding_attention", "full_attention"] * 2, "sliding_attention"],
}


def save(folder: Path, kind: str, dtype: str, seed: int, **changes: Any) -> Any:
    """Write a random model, made in a dtype, and return its network."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    config = config(**BASE | changes)
    with quiet():
        network = getattr(transformers, f"{kind}ForCausalLM")(config).to(getattr(torch, dtype))
        network.save_pretrained(folder)
    return network


# --- Right models load ------------------------------------------------------------------------------------------------

MIXTURE = {
    "num_hidden_layers": 12, "num_local_experts": 32, "num_experts": 32, "num_experts_per_tok": 4,
    "intermediate_size": 64, "moe_intermediate_size": 64, "sliding_window": None,
}  # fmt: skip
GPT_OSS = MIXTURE | {
    "sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"] * 6, "initializer_range": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kind", "dtype", "changes"),
    [
        pytest.param("GptOss", "bfloat16", GPT_OSS, id="gpt-oss"),  # case 11, with fewer layers
        pytest.param("GptOss", "float16", GPT_OSS | {"initializer_range": 0.25}, id="gpt-oss-float16"),
        # TransformerLens 570, CTranslate2 1644: routing of Mixtral makes small differences large.
        pytest.param("Mixtral", "bfloat16", MIXTURE, id="mixtral"),
        pytest.param("Qwen3Moe", "bfloat16", MIXTURE, id="qwen3-moe"),
        # transformers 26869: hidden states of bfloat16 drift apart from layer to layer, without any router.
        pytest.param("Mistral", "bfloat16", {"num_hidden_layers": 24, "sliding_window": None}, id="mistral"),
    ],
)
@pytest.mark.by_default("gpt-oss-0")
def test_a_deep_model_loads_whatever_its_seed(
    kind: str, dtype: str, changes: dict[str, Any], seed: int, tmp_path: Path
) -> None:
    """All of these were refused for differences between one and two times the tolerance."""
    save(tmp_path, kind, dtype, seed, **changes)
    load_model(str(tmp_path), dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_case_11_at_its_size(seed: int, tmp_path: Path) -> None:
    save(
        tmp_path, "GptOss", "bfloat16", seed, vocab_size=2048, hidden_size=512, intermediate_size=512,
        num_hidden_layers=24, num_attention_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
        sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 12, initializer_range=0.02,
    )  # fmt: skip
    load_model(str(tmp_path), dtype="bfloat16")


@pytest.mark.parametrize(("dtype", "off"), [("float32", 1e-7), ("bfloat16", 0.004)])
def test_nearly_tied_experts_are_the_references(dtype: str, off: float, tmp_path: Path) -> None:
    """vLLM 58076: which of two experts with nearly the same score is chosen is rounding, and changes the layer's output.

    Here each expert has a twin, whose scores differ from its own by rounding alone; all rows are tied.
    """
    changes = {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": None}
    network = save(tmp_path, "Mixtral", dtype, 2, **changes)
    with torch.no_grad():
        for layer in network.model.layers:
            router = layer.mlp.gate.weight
            router[2:] = router[:2] * (1 + off * torch.randn_like(router[:2]))
    network.save_pretrained(tmp_path)
    load_model(str(tmp_path), dtype=dtype)


def by_eager_experts(network: Any, probe: Probe) -> Reference:
    """The reference with transformers' other implementation of experts."""
    before = network.config._experts_implementation
    assert before != "eager"
    network.set_experts_implementation("eager")
    try:
        return reference_forward(network, probe)
    finally:
        network.set_experts_implementation(before)


@pytest.mark.slow
def test_experts_may_be_computed_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 42697: the implementations of experts, eager and grouped_mm, round differently."""
    monkeypatch.setattr(loading, "reference_forward", by_eager_experts)
    save(tmp_path, "Mixtral", "bfloat16", 0, **MIXTURE | {"num_hidden_layers": 6})
    load_model(str(tmp_path), dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_gpt_oss_at_its_width(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,880 wide, 32 experts, 4 of them active; only the experts' inner width is an eighth of the real one.

    Transformers' two implementations of experts, each on its own input, differ by .2 after four layers, since nearly
    tied experts are chosen otherwise: more than a proof allows. On the same input, with the same choices, they agree;
    and a fault of one layer is refused.
    """
    network = save(
        tmp_path, "GptOss", "bfloat16", seed, hidden_size=2880, intermediate_size=360, head_dim=64,
        num_attention_heads=8, num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2, initializer_range=0.02,
    )  # fmt: skip
    hidden: list[Tensor] = []

    def note(point: Point, rows: Tensor) -> Tensor:
        if point.kind == OUTPUT:
            hidden.append(rows)
        return rows

    for implementation in ("grouped_mm", "eager"):
        network.set_experts_implementation(implementation)
        with torch.inference_mode(), visited(network.eval(), note):
            network(Probe.of(BASE["vocab_size"]).prompt[None])
    assert difference(*hidden).max() > TOLERANCES["bfloat16"]
    del network
    proofs: list[tuple[Any, ...]] = []
    monkeypatch.setattr(loading, "reference_forward", by_eager_experts)
    monkeypatch.setattr(loading, "prove", lambda *given: proofs.append(given) or prove(*given))
    load_model(str(tmp_path), dtype="bfloat16")
    for fault in ("sign of values", "no sinks", "window"):
        with pytest.MonkeyPatch.context() as patch:
            plant(patch, fault, 2)
            assert str(refusal(*proofs[0])).startswith("attention of layer 2 differs")


# --- Faults are refused -----------------------------------------------------------------------------------------------


@cache
def tried(family: str, dtype: str) -> tuple[LoadedModel, Probe, Reference]:
    """What a model's results are compared with; the model itself is right."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setattr(loading, "prove", lambda *given: found.append(given) or prove(*given))
        if family == SINKS:
            network = save(Path(folder), "GptOss", "float32", 0, **WINDOWS, num_local_experts=4, num_experts_per_tok=2)
            for layer in network.model.layers:
                layer.self_attn.sinks.data *= 8  # as large as scores; random ones are near 0
            network.save_pretrained(folder)
        load_model(folder if family == SINKS else str(saved_family(family)), dtype=dtype)
    return found[0]


Attended = dict[str, Any]  # the arguments of transformers' attention interface

OF_ATTENTION: dict[str, Callable[[Attended], Attended]] = {
    "sign of scores": lambda a: {"scaling": -a["scaling"]},
    "sign of values": lambda a: {"value": -a["value"]},
    "no sinks": lambda _: {"s_aux": None},
    "sign of sinks": lambda a: {"s_aux": -a["s_aux"]},
    "rotated otherwise": lambda a: {"query": torch.cat(a["query"].chunk(2, -1)[::-1], -1)},
    "window": lambda a: {"sliding_window": a["sliding_window"] and a["sliding_window"] + 1},
    "no window": lambda _: {"sliding_window": None},
}


def plant(patch: pytest.MonkeyPatch, fault: str, layer: int) -> None:
    """Change what attention of one layer is given."""
    right = AttentionInterface()[IMPLEMENTATION]

    def wrong(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **named: Any) -> Any:
        named |= {"query": query, "key": key, "value": value}
        if module.layer_idx == layer:
            named |= OF_ATTENTION[fault](named)
        return right(module, attention_mask=mask, **named)

    patch.setitem(AttentionInterface._global_mapping, IMPLEMENTATION, wrong)


BRIEFLY = (
    "0-sign of scores-bfloat16", "2-no sinks-bfloat16", "4-window-bfloat16", "4-sign of values-float16",
    "0-no window-float16", "2-sign of sinks-float32", "4-rotated otherwise-float32",
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", OF_ATTENTION)
@pytest.mark.parametrize("layer", [0, 2, LAYERS - 1])
@pytest.mark.by_default(*BRIEFLY)
def test_a_fault_in_the_attention_of_one_layer_is_refused(
    fault: str, layer: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first layer, a middle one or the last; the line names the layer."""
    given = tried(SINKS, dtype)
    plant(monkeypatch, fault, layer)
    assert str(refusal(*given)).startswith(f"attention of layer {layer} differs")


Plant = Callable[[Any, pytest.MonkeyPatch], None]  # of a network and of what all networks share


def negated(place: str) -> Plant:
    """Change the sign of a parameter."""
    return lambda network, _: network.get_parameter(place).neg_()


def one_position_on(_: Any, patch: pytest.MonkeyPatch) -> None:
    right = TransformerStreams._positions
    patch.setattr(TransformerStreams, "_positions", lambda kernels: right(kernels) + 1)


def no_terms_of_logits(_: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Head, "_on_logits", lambda _, logits: logits)


def no_states(_: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamStates, "open", lambda *_: None)


ELSEWHERE: dict[str, tuple[str, Plant, str]] = {
    "router": (SINKS, negated("model.layers.2.mlp.router.weight"), "the router of layer 2 differs"),
    "experts": (SINKS, negated("model.layers.2.mlp.experts.down_proj"), "layer 2 differs"),
    "mlp": ("gemma3", negated("model.layers.2.mlp.down_proj.weight"), "layer 2 differs"),
    "norm": ("granite", negated("model.norm.weight"), "its logits differ"),
    "embedding": ("gemma3", lambda net, _: net.model.embed_tokens.embed_scale.fill_(4.0), "the embedding differs"),
    "residual": ("granite", lambda net, _: setattr(net.model.layers[2], "residual_multiplier", 0.5), "layer 2 differs"),
    "positions": ("granite", one_position_on, "attention of layer 0 differs"),
    "logits' factor": ("granite", no_terms_of_logits, "its logits differ"),
    "states": ("falcon-h1", no_states, "layer 0 differs"),
    "convolutions": ("lfm2", no_states, "layer 0 differs"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", ELSEWHERE)
@pytest.mark.by_default("bfloat16")
def test_a_fault_elsewhere_is_refused(fault: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, change, line = ELSEWHERE[fault]
    model, probe, reference = tried(family, dtype)
    faulty = replace(model, network=copy.deepcopy(model.network))
    change(faulty.network, monkeypatch)
    assert str(refusal(faulty, probe, reference)).startswith(line)


# --- Large heads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_heads_of_512_on_a_device_whose_flash_attention_takes_256(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 4 with heads as large as the real ones: it is right there, and its control is exactly 0."""
    windows = {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]}
    save(
        tmp_path, "Gemma4", dtype, 0, **windows, num_hidden_layers=2, head_dim=256, global_head_dim=512,
        vocab_size_per_layer_input=BASE["vocab_size"], hidden_size_per_layer_input=16,
    )  # fmt: skip
    proofs: list[tuple[Any, ...]] = []
    monkeypatch.setattr(loading, "prove", lambda *given: proofs.append(given) or prove(*given))
    with one_of(PRETENDED) as device:
        there = device.load(tmp_path, dtype)
        ((_, probe, reference),) = proofs
        assert refusal(there, probe, reference) is None
        asked = [PendingUnit(HALF_SNAPKV, 0, 2), PendingUnit(CONTROL, 0, 2)]
        evicted, control = generate_units(there, "s", random_document("d150", 150), asked, 8, 3)
    for name in ("delta", "f"):
        assert np.any(evicted.events[name].to_numpy())
        assert not np.any(control.events[name].to_numpy())


# --- What is said -----------------------------------------------------------------------------------------------------


def test_a_proof_that_takes_a_while_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line before it and a line after it, once; nothing of a small model."""
    folder, said = str(saved_family("mistral")), []
    monkeypatch.setattr(decoder, "ONE_THREAD_PARAMETERS", 0)
    for _ in range(2):
        load_model(folder, say=said.append)
    before, after = said
    assert folder in before
    assert " s" in after
    monkeypatch.undo()
    load_model(str(saved_family("phi3")), say=said.append)
    assert len(said) == 2


def test_a_forward_pass_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that cannot be computed, a module that fails elsewhere, and attention that calls no interface."""
    model, probe, reference = tried(SINKS, "float32")

    def failing(*_: Any, **__: Any) -> Tensor:
        message = "heads are too large\nfor this kernel"
        raise RuntimeError(message)

    with monkeypatch.context() as patch:
        patch.setitem(AttentionInterface._global_mapping, IMPLEMENTATION, failing)
        assert str(refusal(model, probe, reference)).endswith("with kvdrift's attention it fails (heads are too large)")
    with monkeypatch.context() as patch:
        patch.setattr(model.network.model.layers[1].mlp, "forward", failing)
        assert str(refusal(model, probe, reference)).endswith("(heads are too large)")
    for module in list(attention_modules(model.network).values())[1:]:
        monkeypatch.setattr(module, "forward", lambda hidden_states, **_: (hidden_states, None))
    assert f"(1 of {LAYERS} layers attend through" in str(refusal(model, probe, reference))
