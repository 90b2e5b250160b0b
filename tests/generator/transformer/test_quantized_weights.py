"""Checkpoints that a library quantized, as it reads them on a CPU: proven, and as transformers computes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.common_actions import CONTROL, HALF_RECENT, steps_of
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TorchAoConfig

from kvdrift.generator.checks.random_models import random_document
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.transformer import model_checks as proofs
from kvdrift.generator.transformer.loading import load_model

DOCUMENT = random_document("d100", 100)


@pytest.fixture
def dense(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A random model whose matrices are large enough for oneDNN; no earlier proof of a model counts."""
    request.getfixturevalue("own_cache")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.1, bos_token_id=None, eos_token_id=5,
        pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def check(folder: Path, whole: Any) -> None:
    """The model is proven, its control is 0, and the distribution of the first token is that of transformers' own pass."""
    model = load_model(str(folder))
    assert proofs.results() == {str(folder): None}
    half, control = generate_units(
        model, "s", DOCUMENT, [PendingUnit(action, 0, 2) for action in (HALF_RECENT, CONTROL)], 6, 3
    )
    assert not steps_of(control)["delta"].any()
    assert steps_of(half)["delta"].any()
    distribution = model.prepare(DOCUMENT, [CONTROL], 6).caches.first_distribution
    with torch.inference_mode():
        own = whole(torch.tensor([DOCUMENT.tokens])).logits[0, -1].double().softmax(-1)
    assert (distribution - own).abs().max() < 1e-5  # float32 products, in another order


def test_torchao(dense: Path, tmp_path: Path) -> None:
    """8-bit weights stay 8-bit: a layer multiplies by torchao."""
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao and accelerate")
    given = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    whole = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32, quantization_config=given)
    whole.save_pretrained(tmp_path / "int8")
    check(tmp_path / "int8", whole)


def test_compressed_tensors(dense: Path, tmp_path: Path) -> None:
    """8-bit weights are read as dense: the model computes with their values."""
    library = pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    quantization = library.quantization
    whole = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    weights = quantization.QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
    groups = {"all": quantization.QuantizationScheme(targets=["Linear"], weights=weights)}
    quantization.apply_quantization_config(
        whole, quantization.QuantizationConfig(config_groups=groups, ignore=["lm_head"])
    )
    for module in whole.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = module.weight.abs().amax(1, keepdim=True) / 127
    compressor = library.compressors.ModelCompressor.from_pretrained_model(whole)
    compressor.compress_model(whole)
    whole.save_pretrained(tmp_path / "int8")
    compressor.update_config(tmp_path / "int8")
    compressor.decompress_model(whole)
    check(tmp_path / "int8", whole)
