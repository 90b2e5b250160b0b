"""Sums over pairs of laws in one pass over memory: a Triton kernel for CUDA.

``generator.coupling.laws`` imports this module where Triton is installed and can build the kernel, and else computes
the sums from copies of the laws.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from schema.errors import first_line


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
        with torch.cuda.device_of(laws):  # type: ignore[no-untyped-call] # Triton launches on the current device
            _sum_pairs[len(left), blocks](
                laws, left, right, apart, excess, laws.stride(0), laws.shape[1], absorbed_token, blocks,
                BLOCK=block, enable_fp_fusion=False,
            )  # fmt: skip
    return apart.double(), excess.double()


@cache
def fault(device: torch.device) -> str | None:
    """Why the sums cannot be computed on a device; None where they can. Tried once, with two small laws.

    Triton builds a kernel when it is first used, which takes a C compiler on this machine.
    """
    laws = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]], device=device)
    left, right = torch.tensor([0, -1], device=device), torch.tensor([1, 1], device=device)
    try:
        apart, excess = pair_sums(laws, left, right, absorbed_token=2, block=4)
    except Exception as error:  # noqa: BLE001 - of compilers, linkers, drivers, the file system
        return f"{type(error).__name__}: {first_line(error)}"
    exact = apart.flatten().tolist() == [0.5, 1.5] and excess.flatten().tolist() == [0.25, 0.75]
    return None if exact else "the kernel's sums are wrong"


# Triton's front end evaluates annotations, and knows no others than its own.
@triton.jit  # type: ignore[untyped-decorator]
def _sum_pairs(  # type: ignore[no-untyped-def]
    laws,
    left,
    right,
    apart,
    excess,
    row_stride,
    size,
    absorbed_token,
    blocks,
    BLOCK: tl.constexpr,  # noqa: N803 - a compile-time constant
):
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
