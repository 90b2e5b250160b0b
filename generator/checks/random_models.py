"""Inputs of checks: small random-weight models, random documents, and a document for the embedded model.

Random-weight models have distributions far from uniform, and EOS tokens that often end a side.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from kvdrift.generator.embedded.documents import make_document
from kvdrift.generator.transformer.files.configuration import library, quiet
from kvdrift.generator.transformer.loading import LoadedModel, load_model
from kvdrift.schema.document import Document

ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "llama": (library().LlamaConfig, library().LlamaForCausalLM),
    "qwen2": (library().Qwen2Config, library().Qwen2ForCausalLM),
    "qwen3": (library().Qwen3Config, library().Qwen3ForCausalLM),
}
VOCABULARY = 96
EOS_TOKENS = (5, 17, 40)


def save_random_model(folder: Path, architecture: str, *, seed: int = 0, layers: int = 2, **changes: Any) -> Path:
    """Write a small model: its weights, its configuration with the values ``changes``, its generation configuration."""
    config_class, model_class = ARCHITECTURES[architecture]
    # The last norm gives hidden states of mean square 1, so logits have standard deviation .25 * sqrt(64) = 2.
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
        "initializer_range": 0.25, "bos_token_id": None, "eos_token_id": EOS_TOKENS[0], "pad_token_id": None,
        "tie_word_embeddings": False,
    }  # fmt: skip
    config = config_class(**values | changes)
    with torch.random.fork_rng(devices=[]):  # checks watch torch's own state
        torch.manual_seed(seed)
        model = model_class(config)
    model.generation_config.eos_token_id = list(EOS_TOKENS)
    with quiet():
        model.save_pretrained(folder)
    return folder


@cache
def random_model(
    architecture: str, dtype: str = "float32", layers: int = 2, kv_heads: int = 2, head_size: int = 16
) -> LoadedModel:
    """Return a random-weight model, loaded like any folder; calls with the same arguments return the same model."""
    with TemporaryDirectory() as folder:
        shape = {"num_key_value_heads": kv_heads, "head_dim": head_size}
        saved = save_random_model(Path(folder), architecture, layers=layers, **shape)
        return load_model(str(saved), dtype=dtype)


def random_document(name: str, length: int) -> Document:
    """Return a prompt of ``length`` uniformly random tokens, which ``name`` seeds."""
    random = np.random.default_rng(list(name.encode()))
    tokens = tuple(int(token) for token in random.integers(0, VOCABULARY, length))
    return Document(doc=name, stratum="RANDOM", cluster=name, task="random", source="random", tokens=tokens)


def embedded_document() -> Document:
    """Return the document on which the checks try actions with the embedded model."""
    return make_document("needle", 384, 0, 7)
