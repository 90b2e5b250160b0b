"""Sums over pairs of laws in one pass over memory: a Triton kernel for CUDA.

``generator.coupling.laws`` imports this module where Triton is installed, and else computes the sums from copies of the
laws.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def pair_sums(laws: Tensor, left: Tensor, right: Tensor, absorbed_token: int, block: int) -> tuple[Tensor, Tensor]:
    """Sum |p - q| and max(q - p, 0) over blocks of tokens.

    Args:
        laws: [rows, V], on CUDA.
        left: Rows of p, int64 [B]; -1 for the point mass on ``absorbed_token``.
        right: Rows of q, int64 [B]; -1 for the point mass on ``absorbed_token``.
        absorbed_token: What an ended side emits.
        block: Tokens of a block, a power of two.

    Returns:
        Both sums, float64 [B, blocks] each.
    """
    blocks = triton.cdiv(laws.shape[1], block)
    apart, excess = (torch.empty((len(left), blocks), dtype=laws.dtype, device=laws.device) for _ in range(2))
    if len(left):
        _sum_pairs[len(left), blocks](
            laws, left, right, apart, excess, laws.stride(0), laws.shape[1], absorbed_token, blocks, BLOCK=block
        )
    return apart.double(), excess.double()


@triton.jit  # type: ignore[untyped-decorator]
def _sum_pairs(
    laws: Any,
    left: Any,
    right: Any,
    apart: Any,
    excess: Any,
    row_stride: Any,
    size: Any,
    absorbed_token: Any,
    blocks: Any,
    BLOCK: tl.constexpr,  # noqa: N803 - a compile-time constant
) -> None:
    pair, place = tl.program_id(0), tl.program_id(1)
    token = place * BLOCK + tl.arange(0, BLOCK)
    row_p, row_q = tl.load(left + pair), tl.load(right + pair)
    inside = token < size
    p = tl.load(laws + tl.maximum(row_p, 0) * row_stride + token, mask=inside, other=0.0)
    q = tl.load(laws + tl.maximum(row_q, 0) * row_stride + token, mask=inside, other=0.0)
    point = tl.where(token == absorbed_token, 1.0, 0.0).to(p.dtype)
    p, q = tl.where(row_p < 0, point, p), tl.where(row_q < 0, point, q)
    difference = q - p
    tl.store(apart + pair * blocks + place, tl.sum(tl.abs(difference)))
    tl.store(excess + pair * blocks + place, tl.sum(tl.maximum(difference, 0.0)))
