"""The parts of layers are found by what they compute, in all families of ``fixtures.families``, and others are named."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import ref

import pytest
import torch
import transformers
from fixtures.families import BASE, FAMILIES
from fixtures.operation_names import OperationNames
from fixtures.pretend_device import SECOND, to_second_device
from fixtures.step_profile import computing_on
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
    LlamaRMSNorm,
)

from kvdrift.generator.attention.interface import IMPLEMENTATION, counted
from kvdrift.generator.attention.parts import PLAIN, LayerTerms, attention_modules
from kvdrift.generator.attention.states import LayerStates
from kvdrift.generator.transformer.fused.layers import fused_layers, join_weights, known_parts, layers_fault
from kvdrift.generator.transformer.fused.operations import OFFSET, ROUNDED, WIDE
from kvdrift.generator.transformer.fused.trial import Parts, tolerance

ALL = "layers 0 to 3"
# What is computed by its own modules, of the families that are fused; nothing, of most of them.
OWN = {
    "mixtral": [f"MLP of {ALL}"], "qwen2-moe": [f"MLP of {ALL}"], "qwen3-moe": [f"MLP of {ALL}"],
    "gpt-oss": [f"MLP of {ALL}"], "glm4-moe": ["MLP of layers 1 to 3"],
    "glm4": [f"attention of {ALL}"],  # it rotates channels side by side
    "starcoder2": [f"norm before attention of {ALL}", f"norm before the MLP of {ALL}", f"MLP of {ALL}", "last norm"],
    "cohere2": [f"norm before attention of {ALL}", "attention of layers 0, 2", "last norm"],  # as glm4, with windows
    "gemma4-dense": [f"attention of {ALL}"],  # it norms values
    "lfm2": ["conv of layers 0, 2"],
    "qwen3-next": ["linear_attn of layers 0, 2", f"MLP of {ALL}", "attention of layers 1, 3"],  # with gates
    "qwen3.5": ["linear_attn of layers 0, 2", "attention of layers 1, 3"],
    "qwen3.5-moe": ["linear_attn of layers 0, 2", f"MLP of {ALL}", "attention of layers 1, 3"],
}  # fmt: skip
# Transformers has other operations for experts on a CPU, and makes the frequencies of LongRoPE on one.
ONE_DEVICE = {"mixtral", "qwen2-moe", "qwen3-moe", "glm4-moe", "gpt-oss", "phi3-long", "phi3-short"}
# How the line begins that says why a family is not fused.
REFUSED = {
    "gemma4": "layer 0 calls its modules in an order that is not known (input_layernorm, self_attn",
    "falcon-h1": "layer 0 calls its modules in an order that is not known (input_layernorm, mamba",
}
# Files of these have joined weights, or no attention and no MLP of theirs is known.
NOT_JOINED = {"glm4", "phi3", "phi3-long", "phi3-short", "qwen3-next", "qwen3.5-moe"}
MULTIPLIED = {"granite": {"residual_multiplier": 0.22, "embedding_multiplier": 12.0}}
STYLES = {
    **dict.fromkeys(("gemma2", "gemma3", "qwen3-next", "qwen3.5", "qwen3.5-moe"), OFFSET),
    **dict.fromkeys(("olmo2", "olmo3", "gpt-oss", "gemma4-dense"), WIDE), "starcoder2": None,
}  # fmt: skip
FUSED = [family for family in FAMILIES if family not in REFUSED]
BRIEFLY = (
    "llama-3", "phi3", "qwen3-window", "olmo2", "granite", "gpt-oss", "glm4", "starcoder2", "cohere2", "gemma4-dense",
    "lfm2", "qwen3-next",
)  # fmt: skip


class Entry:
    """Attention to the row's own key and to one more with score 0 and value 0."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        terms: LayerTerms = PLAIN,  # noqa: ARG002 - the protocol's
    ) -> Tensor:
        group = query.shape[1] // key.shape[1]
        scores = (query * key.repeat_interleave(group, 1)).sum(-1, keepdim=True) * scaling * (1 + layer)
        return torch.tanh(scores) * value.repeat_interleave(group, 1)


class Queries:
    """Attention that returns its queries, without an operation."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:  # noqa: ARG002
        return query


@cache
def made(family: str, dtype: torch.dtype) -> Any:
    """A family's network with random weights, those of norms included."""
    kind, changes = FAMILIES[family]
    config = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    torch.manual_seed(0)
    network = getattr(transformers, f"{kind}ForCausalLM")._from_config(
        config(**BASE | changes | MULTIPLIED.get(family, {})), dtype=dtype, attn_implementation=IMPLEMENTATION
    )
    for name, weight in network.named_parameters():
        if weight.dim() == 1 and "norm" in name:
            weight.data += 0.3 * torch.randn(weight.shape).to(dtype)
    for name, buffer in network.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.75)
    return network.eval().requires_grad_(requires_grad=False)


def network_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    return copy.deepcopy(made(family, dtype))


def found(network: Any, *, joined: bool = True) -> Parts:
    parts = known_parts(network, joined=joined)
    assert isinstance(parts, Parts), parts
    return parts


def computed(network: Any, *, fused: bool | None, rows: int = 7, one_position: bool = False) -> tuple[Tensor, Tensor]:
    """The hidden states of a step by fused layers, and those by transformers, [rows, width] each.

    Rows of hybrids have read a token before; their states after the step are compared here.
    """
    tokens = torch.arange(rows) * 11 % BASE["vocab_size"]
    positions = torch.tensor([[900]]) if one_position else 100 * torch.arange(rows)[:, None] + 3
    layers = fused_layers(network, fused)
    assert layers is not None
    with torch.inference_mode():
        states, expected = states_after_a_token(network, tokens), states_after_a_token(network, tokens)
        attention = counted(Entry(), network)
        here = layers.hidden_states(tokens, positions, attention, states)
        wanted = network.model(
            input_ids=tokens[:, None], position_ids=positions, use_cache=False, past_key_values=expected,
            kvdrift_attention=attention,
        )[0]  # fmt: skip
    for place, state in {} if expected is None else expected.by_place.items():
        assert_near(states.by_place[place], state, exact=not fused)
    return here, wanted[:, 0]


def no_states(network: Any) -> LayerStates | None:
    """States before the first token; None if all layers have attention."""
    return LayerStates() if len(attention_modules(network)) < len(network.model.layers) else None


def states_after_a_token(network: Any, tokens: Tensor) -> LayerStates | None:
    """States of rows that have read one token each; None if all layers have attention."""
    if (states := no_states(network)) is None:
        return None
    network.model(
        input_ids=tokens.flip(0)[:, None], position_ids=torch.zeros_like(tokens)[:, None], use_cache=False,
        past_key_values=states, kvdrift_attention=counted(Entry(), network),
    )  # fmt: skip
    assert states.by_place
    return states


def assert_near(state: Tensor, wanted: Tensor, *, exact: bool) -> None:
    assert (
        torch.equal(state, wanted) if exact else (state - wanted).norm() < 20 * tolerance(state.dtype) * wanted.norm()
    )


def assert_equal(network: Any) -> None:
    """Fused layers on a CPU give the hidden states of transformers up to rounding in float32."""
    here, wanted = computed(network, fused=True)
    assert (here - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FUSED)
@pytest.mark.by_default(*(f"{family}-bfloat16" for family in BRIEFLY), "gemma2-float32")
def test_a_family_is_computed_as_by_transformers(family: str, dtype: torch.dtype) -> None:
    """Bit for bit by torch's own operations; with joined weights within rounding, which layers amplify."""
    network = network_of(family, dtype)
    for one_position in (False, True):
        assert torch.equal(*computed(network, fused=None, one_position=one_position))
    here, wanted = computed(network, fused=True)
    joined = any(name.endswith("joint_proj") for name, _ in network.named_modules())
    assert joined is (family not in NOT_JOINED)
    assert (here.float() - wanted.float()).norm() < 20 * tolerance(dtype) * wanted.float().norm()
    parts = found(network)
    assert parts.own_names() == OWN.get(family, [])
    norms = {part.style for layer in parts.layers for part in (layer.before_mlp, layer.after_mlp) if part is not None}
    wanted_style = STYLES.get(family, ROUNDED)
    wanted_style = ROUNDED if wanted_style == WIDE and dtype == torch.float32 else wanted_style
    parallel = family == "cohere2"  # its MLP gets what its attention gets
    assert {layer.parallel for layer in parts.layers} == {parallel}
    assert norms == (set() if parallel else {wanted_style})


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_is_not_fused_has_a_reason(family: str) -> None:
    assert str(layers_fault(network_of(family))).startswith(REFUSED[family])
    assert fused_layers(network_of(family), None) is None


@pytest.mark.parametrize(
    ("family", "operations"),
    [
        *((name, 8) for name in ("mistral", "llama-3", "seed-oss", "qwen3-window", "phi3", "gemma2", "gemma3")),
        ("granite", 10), ("olmo2", 10),
    ],
)  # fmt: skip
def test_a_layer_takes_as_few_operations_as_it_can(family: str, operations: int) -> None:
    """Attention, which takes two on CUDA, is left out, and so are views. Granite multiplies two outputs; OLMo 2 norms all queries together, and all keys."""
    counts = []
    for depth in (2, 4):
        network = network_of(family)
        network.model.layers = network.model.layers[:depth]
        layers = fused_layers(network, fused=True)
        assert layers is not None
        with torch.inference_mode(), OperationNames() as seen:
            layers.hidden_states(torch.arange(8), torch.full((1, 1), 7), Queries())
        counts.append(len(seen.names))
    assert counts[1] - counts[0] == 2 * operations


@pytest.mark.parametrize("family", sorted(set(FUSED) - ONE_DEVICE))
@pytest.mark.by_default("gemma3", "granite", "starcoder2")
def test_no_part_mixes_devices(family: str) -> None:
    """Nothing of a trial or a step is on the CPU if the network is not."""
    network = network_of(family)
    to_second_device(network)
    tokens, positions = torch.arange(8), 100 * torch.arange(8)[:, None]
    with computing_on(str(SECOND)):
        layers = fused_layers(network, fused=True)
        assert layers is not None, layers_fault(network)
        here = layers.hidden_states(tokens.to(SECOND), positions.to(SECOND), Entry(), no_states(network))
        there = here.cpu()
    wanted = fused_layers(network_of(family), fused=True).hidden_states(tokens, positions, Entry(), no_states(network))
    assert (there - wanted).norm() < 1e-5 * wanted.norm()


# --- Differences ------------------------------------------------------------------------------------------------------


class OffsetNorm(LlamaRMSNorm):
    """A norm that adds a half to its weights."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * 1.5


class DoubledMLP(LlamaMLP):
    """An MLP that overrides the forward of a known one."""

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


class ScaledAttention(LlamaAttention):
    """Attention that norms values, which no known one does."""

    def forward(self, hidden_states: Tensor, **named: Any) -> Any:
        return super().forward(hidden_states + 1.0, **named)


class LateAttention(LlamaAttention):
    """Attention that scales its input after 1000 positions, as no first token shows."""

    def forward(self, hidden_states: Tensor, **named: Any) -> Any:
        return super().forward(hidden_states * (1 + named["position_ids"][..., None] // 1000), **named)


class SwappedLayer(LlamaDecoderLayer):
    """A layer whose second sum subtracts."""

    def forward(self, hidden_states: Tensor, **named: Any) -> Tensor:
        return 2.0 * hidden_states - super().forward(hidden_states, **named)


def of_class(kind: type) -> Callable[[Any], None]:
    return lambda module: setattr(module, "__class__", kind)


@pytest.mark.parametrize(
    ("place", "change", "own"),
    [
        ("input_layernorm", of_class(OffsetNorm), ["norm before attention of layer 2"]),
        ("input_layernorm", lambda norm: setattr(norm, "variance_epsilon", 1.0), []),
        ("mlp", of_class(DoubledMLP), ["MLP of layer 2"]),
        ("mlp", lambda mlp: setattr(mlp, "act_fn", nn.ReLU()), ["MLP of layer 2"]),
        ("self_attn", of_class(ScaledAttention), ["attention of layer 2"]),
        ("self_attn", of_class(LateAttention), ["attention of layer 2"]),
        ("self_attn", lambda attention: setattr(attention, "o_proj", nn.Identity()), ["attention of layer 2"]),
    ],
)  # fmt: skip
def test_a_part_that_differs_is_computed_by_its_own_module(
    place: str, change: Callable[[Any], None], own: list[str]
) -> None:
    network = network_of("llama-3")
    change(network.model.layers[2].get_submodule(place))
    assert found(network).own_names() == own
    assert_equal(network)
    assert torch.equal(*computed(network_of("llama-3"), fused=None))


def test_a_weight_that_is_replaced_is_not_that_of_the_joined_weights() -> None:
    network = network_of("llama-3")
    join_weights(network)
    assert found(network).own_names() == []
    attention = network.model.layers[1].self_attn
    attention.q_proj.weight = nn.Parameter(attention.q_proj.weight * 1.5, requires_grad=False)
    assert found(network).own_names() == ["attention of layer 1"]
    assert_equal(network)


def test_what_was_found_keeps_neither_weights_nor_networks() -> None:
    gc.freeze()  # a collection then looks at nothing that tests before have left
    network = network_of("llama-3")
    found(network)
    weight, alive = ref(network.model.layers[0].self_attn.q_proj.weight), ref(network)
    join_weights(network)
    gc.collect()
    assert weight() is None
    del network
    gc.collect()
    gc.unfreeze()
    assert alive() is None


def test_sums_that_differ_are_refused_by_their_layer() -> None:
    network = network_of("llama-3")
    network.model.layers[1].__class__ = SwappedLayer
    assert str(layers_fault(network)).startswith("the sum of layer 1 differs from transformers' by ")
    assert known_parts(network, joined=False) == "the sum of layer 1 differs from transformers' in its bits"


class ShiftedModel(LlamaModel):
    """A decoder that changes its embeddings in a way of its own."""

    def forward(self, input_ids: Tensor, **named: Any) -> Any:
        return super().forward(inputs_embeds=self.embed_tokens(input_ids) + 1.0, **named)


def test_embeddings_that_differ_are_refused() -> None:
    network = network_of("llama-3")
    network.model.__class__ = ShiftedModel
    assert str(layers_fault(network)).startswith("the embedding differs from transformers' by ")
