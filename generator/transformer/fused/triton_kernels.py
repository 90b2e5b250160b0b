"""Triton kernels of ``kvdrift.generator.transformer.fused.layers``, which specifies each result.

A value is rounded to the tensors' dtype wherever torch would have stored it. Sums are in float32, and a product and a
sum are rounded separately. So values differ from torch's only by the order of a row's sum and by the last bit of roots
and exponentials.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024  # of the MLP that one program computes


def add_norm(residual: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """Launch the kernel of ``layers.plain_add_norm``, with the same arguments and result."""
    rows, width = residual.shape
    output = torch.empty_like(residual)
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(residual):  # type: ignore[no-untyped-call] # Triton launches on the current device
        _add_norm[(rows,)](
            residual, residual if added is None else added, weight, output, width, epsilon,
            ADDS=added is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 16), enable_fp_fusion=False,
        )  # fmt: skip
    return output


def rotate(
    projected: Tensor, cos: Tensor, sin: Tensor, heads: int, query_weight: Tensor | None, key_weight: Tensor | None,
    epsilon: float,
) -> None:  # fmt: skip
    """Launch the kernel of ``layers.plain_rotate``, with the same arguments."""
    rows, all_heads, size = projected.shape
    with torch.cuda.device_of(projected):  # type: ignore[no-untyped-call]
        _rotate[rows, (all_heads + heads) // 2](
            projected, cos, sin, cos if query_weight is None else query_weight,
            cos if key_weight is None else key_weight, all_heads * size, size if len(cos) > 1 else 0, heads, size,
            epsilon, NORMED=query_weight is not None, HALF=triton.next_power_of_2(size // 2),
            num_warps=1,  # a head's values stay in one warp, which has read all of them before it writes
            enable_fp_fusion=False,
        )  # fmt: skip


def silu_times(projected: Tensor) -> Tensor:
    """Launch the kernel of ``layers.silu_times``, with the same argument and result."""
    rows, inner = projected.shape[0], projected.shape[1] // 2
    output = projected.new_empty((rows, inner))
    with torch.cuda.device_of(projected):  # type: ignore[no-untyped-call]
        _silu_times[rows, triton.cdiv(inner, _COLUMNS)](
            projected, output, inner, BLOCK=_COLUMNS, enable_fp_fusion=False
        )
    return output


# Triton's front end evaluates annotations, and knows no others than its own.
@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(  # type: ignore[no-untyped-def]
    residual, added, weight, output, width, epsilon, ADDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = tl.program_id(0).to(tl.int64) * width + column
    total = tl.load(residual + place, mask=inside, other=0.0)
    dtype = total.dtype
    if ADDS:
        total = (total.to(tl.float32) + tl.load(added + place, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual + place, total, mask=inside)
    wide = total.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide) / width + epsilon)).to(dtype).to(tl.float32)
    weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + place, (weights * normed).to(dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    projected, cos, sin, query_weight, key_weight, row_stride, angle_stride, heads, size, epsilon,
    NORMED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half = size // 2
    column = tl.arange(0, HALF)
    inside = column < half
    place = projected + row * row_stride + head * size + column
    angle = row * angle_stride + column
    low, high = tl.load(place, mask=inside, other=0.0), tl.load(place + half, mask=inside, other=0.0)
    dtype = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt((tl.sum(low * low) + tl.sum(high * high)) / size + epsilon)
        is_query = head < heads
        low_query = tl.load(query_weight + column, mask=inside, other=0.0)
        low_key = tl.load(key_weight + column, mask=inside, other=0.0)
        low_weight = tl.where(is_query, low_query, low_key).to(tl.float32)
        high_query = tl.load(query_weight + half + column, mask=inside, other=0.0)
        high_key = tl.load(key_weight + half + column, mask=inside, other=0.0)
        high_weight = tl.where(is_query, high_query, high_key).to(tl.float32)
        low = (low_weight * (low * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        high = (high_weight * (high * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    low_cos = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    high_cos = tl.load(cos + angle + half, mask=inside, other=0.0).to(tl.float32)
    low_sin = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    high_sin = tl.load(sin + angle + half, mask=inside, other=0.0).to(tl.float32)
    turned_low = (low * low_cos).to(dtype).to(tl.float32) - (high * low_sin).to(dtype).to(tl.float32)
    turned_high = (high * high_cos).to(dtype).to(tl.float32) + (low * high_sin).to(dtype).to(tl.float32)
    tl.store(place, turned_low.to(dtype), mask=inside)
    tl.store(place + half, turned_high.to(dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_times(  # type: ignore[no-untyped-def]
    projected, output, inner, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    place = projected + 2 * row * inner + column
    gate, up = tl.load(place, mask=inside, other=0.0), tl.load(place + inner, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(output + row * inner + column, (activated * up.to(tl.float32)).to(gate.dtype), mask=inside)
