"""The operations between matrix products: transformers' values, and kernels for CUDA that compile."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from kvdrift.generator.transformer.fused import operations
from kvdrift.generator.transformer.fused.operations import add_norm, rotate, silu_times

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_rotation_are_transformers(dtype: torch.dtype) -> None:
    """Bit for bit: queries and keys of three heads and one, each normed with weights of its own."""
    generator = torch.Generator().manual_seed(0)
    x, added, weight, *own = (torch.randn(5, 8, generator=generator).to(dtype) for _ in range(5))
    cos, sin = (torch.randn(5, 1, 8, generator=generator).to(dtype) for _ in range(2))
    projected = torch.randn(5, 5, 8, generator=generator).to(dtype)
    norms = [Qwen3RMSNorm(8) for _ in range(3)]
    for norm, values in zip(norms, (weight, *own), strict=True):
        norm.weight = torch.nn.Parameter(values[0], requires_grad=False)
    total = x + added
    residual = x.clone()
    assert torch.equal(add_norm(residual, added, weight[0], 1e-6), norms[0](total))
    assert torch.equal(residual, total)
    assert torch.equal(add_norm(residual, None, weight[0], 1e-6), norms[0](total))
    assert torch.equal(residual, total)

    for normed in (True, False):
        query, key, value = projected[:, :, None].split([3, 1, 1], dim=1)
        if normed:
            query, key = norms[1](query), norms[2](key)
        wanted = torch.cat([*apply_rotary_pos_emb(query, key, cos, sin), value], dim=1)[:, :, 0]
        weights = (own[0][0], own[1][0]) if normed else (None, None)
        found = projected.clone()
        rotate(found, cos[:, 0], sin[:, 0], 3, *weights, 1e-6)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_activation_is_silu(dtype: torch.dtype) -> None:
    """Equal up to the last bit of torch's own, whose vector and scalar instructions differ."""
    projected = torch.randn(5, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    gate, up = projected.chunk(2, dim=-1)
    wanted = (torch.nn.functional.silu(gate) * up).float()
    assert torch.allclose(silu_times(projected).float(), wanted, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


def test_a_machine_without_cuda_says_so() -> None:
    assert operations.operations_fault(torch.device("cuda")) is not None or torch.cuda.is_available()
