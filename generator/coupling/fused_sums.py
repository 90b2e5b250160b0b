"""A Triton kernel for CUDA that sums over pairs of distributions in one pass over memory.

``kvdrift.generator.coupling.distributions`` uses it if Triton is installed and can build the kernel. Otherwise
that module computes the sums from copies of the distributions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def pair_sums(distributions: Tensor, rows: Tensor, absorbed_token: int, block: int) -> Tensor:
    """Return what ``kvdrift.generator.coupling.distributions.pair_sums`` returns, by one launch.

    Distributions are on CUDA, with a row's values beside each other. A row of -1 is the point mass on
    ``absorbed_token``, -2 no mass at all. ``block`` is the number of tokens of a block, a power of two.
    """
    blocks, pairs = triton.cdiv(distributions.shape[1], block), rows.shape[1]
    sums = torch.empty((3, pairs, blocks), dtype=torch.float64, device=distributions.device)
    if pairs:
        with torch.cuda.device_of(distributions):  # type: ignore[no-untyped-call] # Triton launches on the current device
            _sum_pairs[pairs, blocks](
                distributions, rows, sums, distributions.stride(0), rows.stride(0), distributions.shape[1],
                absorbed_token, pairs, blocks, BLOCK=block, TINY=torch.finfo(distributions.dtype).tiny,
                enable_fp_fusion=False,
            )  # fmt: skip
    return sums


# Triton's front end evaluates annotations, and knows no others than its own.
@triton.jit  # type: ignore[untyped-decorator]
def _sum_pairs(  # type: ignore[no-untyped-def]
    distributions, rows, sums, distribution_stride, row_stride, size, absorbed_token, pairs, blocks,
    BLOCK: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    pair, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = place * BLOCK + tl.arange(0, BLOCK)
    row_p, row_q = tl.load(rows + pair), tl.load(rows + row_stride + pair)
    read = tl.where(row_p == row_q, 0, size)  # one row's distributions are equal
    p = tl.load(
        distributions + row_p * distribution_stride + token, mask=token < tl.where(row_p >= 0, read, 0), other=0.0
    )
    q = tl.load(
        distributions + row_q * distribution_stride + token, mask=token < tl.where(row_q >= 0, read, 0), other=0.0
    )
    point = tl.where(token == absorbed_token, 1.0, 0.0).to(p.dtype)
    p, q = tl.where(row_p == -1, point, p), tl.where(row_q == -1, point, q)
    difference = q - p
    tl.store(sums + pair * blocks + place, tl.sum(tl.abs(difference)))
    tl.store(sums + (pairs + pair) * blocks + place, tl.sum(tl.maximum(difference, 0.0)))
    tl.store(sums + (2 * pairs + pair) * blocks + place, tl.sum(_entropy_terms(p, q, difference, TINY)))


@triton.jit  # type: ignore[untyped-decorator]
def _entropy_terms(p, q, difference, TINY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return p log(p/q) - p + q, infinite if p can draw a token that q cannot.

    Triton has no log1p, and its float32 logarithm is off by 2e-7 near 1. So for x = |q - p| / min(p, q) below 1/2, the
    series log(1 + x) = 2 (s + s^3/3 + s^5/5 + ...) with s = x / (2 + x) is inserted into the terms, and the parts that
    cancel are left out. The series is exact to 1e-8 of its value.
    """
    apart, least = tl.abs(difference), tl.maximum(tl.minimum(p, q), TINY)
    x = apart / least
    s = x / (2.0 + x)
    square = s * s
    rest = 2.0 * s * square * (1.0 / 3 + square * (1.0 / 5 + square * (1.0 / 7 + square * (1.0 / 9 + square / 11))))
    near = least * tl.where(difference > 0.0, x * s - rest, x * s + (1.0 + x) * rest)
    logarithm = tl.log(1.0 + x)
    far = difference - p * tl.where(difference > 0.0, logarithm, -logarithm)
    terms = tl.where(x < 0.5, near, far)
    return tl.where((q == 0.0) & (p >= TINY), float("inf"), terms)
