"""Distributions from hidden states: rows that begin alike on a GPU, logits that are not rounded to 16 bits, and whole sums."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.common_actions import CONTROL, HALF_SNAPKV, assert_near
from fixtures.pretend_device import SECOND, TwoDevices, to_second_device
from fixtures.small_study import write_study
from fixtures.study_files import load_study
from torch import nn

from kvdrift.generator.checks.random_models import random_document, random_model
from kvdrift.generator.coupling.distributions import total_variation
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.transformer.decoder import whole_sums
from kvdrift.generator.transformer.fused.head import Head
from kvdrift.generator.transformer.other_weights.model import load_transformer
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.schema.errors import InputError

DOCUMENT = random_document("d150", 150)


def network(vocabulary: int, dtype: torch.dtype) -> Any:
    """A head alone, whose logits have standard deviation 4."""
    layer = nn.Linear(64, vocabulary, bias=False)
    layer.weight = nn.Parameter(torch.randn(vocabulary, 64, generator=torch.Generator().manual_seed(0)) / 2, False)  # noqa: FBT003 - torch's
    return SimpleNamespace(lm_head=layer.to(dtype), config=SimpleNamespace())


def hidden_states(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(24, 64, generator=torch.Generator().manual_seed(1)).to(dtype)


def distributions(head: Head, hidden: torch.Tensor) -> torch.Tensor:
    return head.distributions(hidden, head.room(len(hidden)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_logits_are_sums_in_float32(dtype: torch.dtype) -> None:
    """Against float64 products; logits of 16 bits are far from them. A vocabulary of several blocks of weights."""
    model, hidden = network(8193 + 8192, dtype), hidden_states(dtype)
    exact = (hidden.double() @ model.lm_head.weight.double().t()).softmax(-1)
    wide, narrow = (distributions(Head(model, "cpu", logits), hidden) for logits in ("float32", None))
    assert wide.dtype == narrow.dtype == torch.float32
    assert total_variation(wide, exact).max() < 1e-5
    assert total_variation(narrow, exact).max() > 1e-4


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_a_cap_keeps_small_logits_of_16_bits(dtype: torch.dtype, bound: float) -> None:
    """A cap of 30 leaves logits of some 0.04 nearly as they are; its own rounding would make them multiples of 0.1."""
    model, hidden = network(96, dtype), hidden_states(dtype) / 100
    model.config.final_logit_softcapping = 30.0
    logits = (hidden.double() @ model.lm_head.weight.double().t()).log_softmax(-1)
    off = distributions(Head(model, "cpu"), hidden).double().log() - logits
    assert off.abs().max() < bound * logits.std(-1).max() * 4


def test_wide_logits_of_wide_weights_are_the_same() -> None:
    model, hidden = network(97, torch.float32), hidden_states(torch.float32)
    assert torch.equal(*(distributions(Head(model, "cpu", logits), hidden) for logits in ("float32", None)))


@pytest.mark.parametrize("logits", ["float32", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_begin_at_multiples_of_16_bytes_on_a_gpu(dtype: torch.dtype, logits: str | None) -> None:
    """Columns beyond the vocabulary get no probability, and the distributions equal those of a CPU."""
    model, hidden = network(97, dtype), hidden_states(dtype)
    wanted = distributions(Head(model, "cpu", logits), hidden)
    other = copy.deepcopy(model)
    to_second_device(other.lm_head)
    with TwoDevices():
        head = Head(other, str(SECOND), logits)
        room = head.room(24)
        found = head.distributions(hidden.to(SECOND), room).cpu()
        rest = room[:, 97:].cpu()
    assert room.shape == (24, 104)
    assert room.stride(0) * room.dtype.itemsize % 16 == 0
    assert not rest.any()
    assert found.shape == (24, 97)
    assert total_variation(found, wanted).max() < (1e-12 if logits is None and dtype == torch.bfloat16 else 1e-5)


def test_units_say_what_their_logits_were() -> None:
    """The distribution of position 1 has them too; delta and f move, and a control's stay exactly zero."""
    model = random_model("qwen2", "bfloat16")
    wide = replace(model, logits_dtype="float32")
    pending = [PendingUnit(HALF_SNAPKV, 0, 3), PendingUnit(CONTROL, 0, 2)]
    (one, control), (other, _) = (generate_units(used, "s", DOCUMENT, pending, 8, 3) for used in (wide, model))
    assert json.loads(one.record["versions"])["logits_dtype"] == "float32"
    assert "logits_dtype" not in json.loads(other.record["versions"])
    assert not np.any(control.events["delta"].to_numpy())
    assert not one.events["delta"].equals(other.events["delta"])
    first, rounded = (Prompt(used, DOCUMENT.tokens, 8).first_distribution for used in (wide, model))
    assert not torch.equal(first, rounded)
    plain = random_model("qwen2")
    units = [
        generate_units(used, "s", DOCUMENT, pending, 8, 3)[0]
        for used in (plain, replace(plain, logits_dtype="float32"))
    ]
    assert_near(*units)


def test_a_study_asks_for_wide_logits(tmp_path: Path) -> None:
    """The setting is part of the study's settings."""
    plain = load_study(write_study(tmp_path))
    asked = 'id = "kvdrift/tiny"', 'id = "kvdrift/tiny"\nlogits_dtype = "float32"'
    wide = load_study(write_study(tmp_path, asked))
    assert json.loads(wide.settings)["model"] == json.loads(plain.settings)["model"] | {"logits_dtype": "float32"}
    assert load_transformer(wide).logits_dtype == "float32"
    assert load_transformer(plain).logits_dtype is None
    with pytest.raises(InputError, match=r"model.logits_dtype = 'float64': should be 'float32'"):
        load_study(write_study(tmp_path, (asked[0], asked[1].replace("32", "64"))))


SETTINGS = torch.backends.cuda.matmul
NAMES = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]


def split() -> Iterator[tuple[bool, bool]]:
    for name in NAMES:
        yield getattr(SETTINGS, name), getattr(SETTINGS, f"{name}_split_k")


class Libraries:
    """``torch.backends.cuda.preferred_blas_library`` of a torch with CUDA, which has two and warns of the second."""

    def __init__(self, preferred: str) -> None:
        self.preferred = preferred

    def __call__(self, name: str | None = None) -> str:
        if name == "cublaslt":
            warnings.warn("it is an experimental feature", stacklevel=2)
        self.preferred = name or self.preferred
        return self.preferred

    def multiply(self) -> None:
        """Multiply after torch's own checks for a product of 16 bits by cuBLAS (``gemm_internal_cublas``)."""
        if self.preferred != "cublaslt" and not SETTINGS.allow_bf16_reduced_precision_reduction_split_k:
            message = "allow_bf16_reduced_precision_reduction(..., allow_splitk=False) requires the cuBLASLt backend"
            raise RuntimeError(message)


@pytest.mark.filterwarnings("error")
def test_sums_are_whole_on_cuda_while_computing_and_all_is_as_before_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of 16 bits are cuBLASLt's meanwhile."""
    libraries, before = Libraries("cublas"), list(split())
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", libraries)
    SETTINGS.allow_fp16_reduced_precision_reduction = (False, True)  # the caller's
    try:
        with pytest.raises(RuntimeError, match="stop"), whole_sums("cuda:1"):  # noqa: PT012
            assert list(split()) == [(False, False)] * 2
            libraries.multiply()
            message = "stop"
            raise RuntimeError(message)
        with whole_sums("cpu"):
            assert list(split()) == [before[0], (False, True)]
        assert libraries.preferred == "cublas"
        libraries.multiply()
    finally:
        SETTINGS.allow_fp16_reduced_precision_reduction = before[1]


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [97, 128_256, 32_003])
def test_wide_logits_on_cuda(vocabulary: int) -> None:
    """A row's distribution depends neither on the rows beside it nor on its place."""
    model, hidden = network(vocabulary, torch.bfloat16), hidden_states(torch.bfloat16)
    wanted = distributions(Head(model, "cpu", "float32"), hidden)
    model.lm_head.cuda()
    with whole_sums("cuda"):
        found = distributions(Head(model, "cuda", "float32"), hidden.cuda())
        twice = distributions(Head(model, "cuda", "float32"), torch.cat([hidden[:7], hidden[:17]]).cuda())
    assert total_variation(found.cpu(), wanted).max() < 1e-5
    assert torch.equal(twice[:7], found[:7])
    assert torch.equal(twice[7:], found[:17])
