"""The case that generation benchmarks measure: a model of random weights, a random prompt, and three actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvdrift.generator.actions import Action
from kvdrift.generator.attention.cpu_products import replace_activations, replace_linear_layers
from kvdrift.generator.attention.holding import DTYPES
from kvdrift.generator.attention.interface import IMPLEMENTATION
from kvdrift.generator.attention.row_invariance import find_row_multiple
from kvdrift.generator.selectors import Recent, SnapKV
from kvdrift.generator.transformer.decoder import whole_sums
from kvdrift.generator.transformer.fused.layers import join_weights, layers_fault
from kvdrift.generator.transformer.loading import LoadedModel
from kvdrift.generator.transformer.memory import ModelShape
from kvdrift.schema.document import Document
from kvdrift.schema.retention import Retention

SEED = 3


@dataclass(frozen=True)
class Case:
    """A model's shape, its device and threads, and a run's sizes: n prompt ``entries``, K ``replicates``, horizon H."""

    layers: int = 8
    width: int = 512
    inner_width: int = 1408
    heads: int = 8
    kv_heads: int = 4
    vocabulary: int = 32_000
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    entries: int = 1024
    replicates: int = 64
    horizon: int = 32

    def actions(self) -> list[Action]:
        """Return three actions: SnapKV and Recent each keep half of the prompt, and SnapKV keeps 512 entries."""
        half = Retention.parse("1/2")
        return [
            Action("snapkv-half", "snapkv", SnapKV(), half),
            Action("recent-half", "recent", Recent(), half),
            Action("snapkv-512", "snapkv", SnapKV(), Retention(512)),
        ]

    def kept(self) -> list[int]:
        """Return how many prompt entries each action keeps."""
        return [action.retention.kept(self.entries) for action in self.actions()]


PRESETS = {
    "small": (Case(), (1024, 4096)),
    # The shapes of SmolLM2-135M and of Llama-3.1-8B.
    "smollm2": (Case(30, 576, 1536, 9, 3, 49_152, threads=2, replicates=16, horizon=64), (1000,)),
    "llama-8b-32k": (Case(32, 4096, 14_336, 32, 8, 128_256, "bfloat16", horizon=128), (32_768,)),
}


def model_shape(case: Case) -> ModelShape:
    """Return the model's shape as the memory planner reads it."""
    size = case.width // case.heads
    return ModelShape(
        case.layers, case.width, case.inner_width, case.heads, case.kv_heads, size, case.vocabulary, case.dtype
    )


def random_model(case: Case, *, plain: bool = False) -> LoadedModel:
    """Make a model of random weights on the case's device; ``plain`` leaves the network as transformers makes it."""
    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=case.vocabulary, hidden_size=case.width, intermediate_size=case.inner_width,
        num_hidden_layers=case.layers, num_attention_heads=case.heads, num_key_value_heads=case.kv_heads,
        max_position_embeddings=2 * case.entries + case.horizon, bos_token_id=None, eos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    loader: Any = AutoModelForCausalLM
    with torch.device(case.device):
        network = loader.from_config(config, dtype=DTYPES[case.dtype], attn_implementation=IMPLEMENTATION)
    network.eval().requires_grad_(requires_grad=False)
    if case.device == "cpu" and not plain:
        replace_activations(network)
        replace_linear_layers(network)
    elif case.device != "cpu" and not plain and layers_fault(network) is None:
        join_weights(network)
    shape = ModelShape.of(config.to_dict(), case.dtype)
    with whole_sums(case.device):
        rows = find_row_multiple(network)
    return LoadedModel("random", network, case.device, case.dtype, (), config.max_position_embeddings, shape, rows)


def random_document(case: Case) -> Document:
    """Make a document whose prompt is ``case.entries`` random tokens."""
    tokens = np.random.default_rng(SEED).integers(0, case.vocabulary, case.entries)
    return Document("random", "RANDOM", "random", "random", "random", tuple(tokens.tolist()))
