"""Triton kernels of ``kvdrift.generator.transformer.fused.operations``, which specifies each result.

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


def add_norm(
    residual: Tensor, added: Tensor | None, weight: Tensor, epsilon: float, style: int = 0,
    added_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Launch the kernel of ``operations.plain_add_norm``, with the same arguments and result."""
    output = torch.empty_like(residual)
    _launch_add_norm(residual, added, added_weight, weight, output, epsilon, style)
    return output


def add_normed(residual: Tensor, added: Tensor, weight: Tensor, epsilon: float, style: int = 0) -> None:
    """Launch the kernel of ``operations.plain_add_normed``, with the same arguments."""
    _launch_add_norm(residual, added, weight, None, residual, epsilon, style)


def _launch_add_norm(
    residual: Tensor, added: Tensor | None, added_weight: Tensor | None, weight: Tensor | None, output: Tensor,
    epsilon: float, style: int,
) -> None:  # fmt: skip
    rows, width = residual.shape
    with torch.cuda.device_of(residual):  # type: ignore[no-untyped-call] # Triton launches on the current device
        _add_norm[(rows,)](
            residual, residual if added is None else added, residual if added_weight is None else added_weight,
            residual if weight is None else weight, output, width, epsilon, ADDS=added is not None,
            NORMS_ADDED=added_weight is not None, NORMS=weight is not None, STYLE=style, **_of_width(width),
        )  # fmt: skip


def norm_columns(x: Tensor, first: int, weight: Tensor, epsilon: float, style: int = 0) -> None:
    """Launch the kernel of ``operations.plain_norm_columns``, with the same arguments."""
    rows, columns = x.shape
    width = len(weight)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _norm_columns[(rows,)](x, weight, columns, first, width, epsilon, STYLE=style, **_of_width(width))


def _of_width(width: int) -> dict[str, int | bool]:
    """Return what a kernel is launched with whose programs have a row of ``width`` values each."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16), "enable_fp_fusion": False}


def rotate(
    projected: Tensor, cos: Tensor | None, sin: Tensor | None, heads: int, query_weight: Tensor | None,
    key_weight: Tensor | None, epsilon: float, style: int = 0,
) -> None:  # fmt: skip
    """Launch the kernel of ``operations.plain_rotate``, with the same arguments."""
    rows, all_heads, size = projected.shape
    half = size // 2 if cos is None else cos.shape[1] // 2
    angle_stride = 0 if cos is None or len(cos) == 1 else cos.stride(0)
    wide = cos is not None and cos.dtype != projected.dtype  # float32 angles: a product is not rounded before the sum
    with torch.cuda.device_of(projected):  # type: ignore[no-untyped-call]
        _rotate[rows, (all_heads + heads) // 2](
            projected, projected if cos is None else cos, projected if sin is None else sin,
            projected if query_weight is None else query_weight, projected if key_weight is None else key_weight,
            all_heads * size, angle_stride, heads, size, half, epsilon, NORMED=query_weight is not None,
            TURNS=cos is not None, WIDE=wide, STYLE=style, HALF=triton.next_power_of_2(half),
            REST=triton.next_power_of_2(size - 2 * half) if size > 2 * half else 0,
            num_warps=1,  # a head's values stay in one warp, which has read all of them before it writes
            enable_fp_fusion=False,
        )  # fmt: skip


def silu_times(projected: Tensor) -> Tensor:
    """Launch the kernel of ``operations.silu_times``, with the same argument and result."""
    return _launch_gated(projected, gelu=False)


def gelu_times(projected: Tensor) -> Tensor:
    """Launch the kernel of ``operations.gelu_times``, with the same argument and result."""
    return _launch_gated(projected, gelu=True)


def _launch_gated(projected: Tensor, *, gelu: bool) -> Tensor:
    rows, inner = projected.shape[0], projected.shape[1] // 2
    output = projected.new_empty((rows, inner))
    with torch.cuda.device_of(projected):  # type: ignore[no-untyped-call]
        _gated[rows, triton.cdiv(inner, _COLUMNS)](
            projected, output, inner, GELU=gelu, BLOCK=_COLUMNS, enable_fp_fusion=False
        )
    return output


# Triton's front end evaluates annotations, and knows no others than its own.
@triton.jit  # type: ignore[untyped-decorator]
def _weighed(scaled, weights, dtype: tl.constexpr, STYLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply values of mean square 1 with a norm's weights, both float32, as the norm's style says."""
    if STYLE == 0:
        scaled = scaled.to(dtype).to(tl.float32)
    if STYLE == 2:
        weights = 1.0 + weights
    return (weights * scaled).to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _normed_row(  # type: ignore[no-untyped-def]
    values, weight, column, inside, width, epsilon, STYLE: tl.constexpr,
):  # fmt: skip
    """Return the RMSNorm of a row's values, which are 0 where they are not ``inside``."""
    wide = values.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide) / width + epsilon)
    weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    return _weighed(scaled, weights, values.dtype, STYLE)


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(  # type: ignore[no-untyped-def]
    residual, added, added_weight, weight, output, width, epsilon, ADDS: tl.constexpr, NORMS_ADDED: tl.constexpr,
    NORMS: tl.constexpr, STYLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = tl.program_id(0).to(tl.int64) * width + column
    total = tl.load(residual + place, mask=inside, other=0.0)
    dtype = total.dtype
    if ADDS:
        more = tl.load(added + place, mask=inside, other=0.0)
        if NORMS_ADDED:
            more = _normed_row(more, added_weight, column, inside, width, epsilon, STYLE)
        total = (total.to(tl.float32) + more.to(tl.float32)).to(dtype)
        tl.store(residual + place, total, mask=inside)
    if NORMS:
        normed = _normed_row(total, weight, column, inside, width, epsilon, STYLE)
        tl.store(output + place, normed, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_columns(  # type: ignore[no-untyped-def]
    x, weight, columns, first, width, epsilon, STYLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = x + tl.program_id(0).to(tl.int64) * columns + first + column
    values = tl.load(place, mask=inside, other=0.0)
    tl.store(place, _normed_row(values, weight, column, inside, width, epsilon, STYLE), mask=inside)


@triton.jit
def _head_weights(  # type: ignore[no-untyped-def]
    query_weight, key_weight, is_query, column, inside,
):  # fmt: skip
    of_query = tl.load(query_weight + column, mask=inside, other=0.0)
    of_key = tl.load(key_weight + column, mask=inside, other=0.0)
    return tl.where(is_query, of_query, of_key).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    values, angles, dtype: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    product = values * angles
    if not WIDE:
        product = product.to(dtype).to(tl.float32)
    return product


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    projected, cos, sin, query_weight, key_weight, row_stride, angle_stride, heads, size, half, epsilon,
    NORMED: tl.constexpr, TURNS: tl.constexpr, WIDE: tl.constexpr, STYLE: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, HALF)
    inside = column < half
    whole = projected + row * row_stride + head * size
    place = whole + column
    angle = row * angle_stride + column
    low, high = tl.load(place, mask=inside, other=0.0), tl.load(place + half, mask=inside, other=0.0)
    dtype = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    if NORMED:
        squares = tl.sum(low * low) + tl.sum(high * high)
        if REST > 0:  # channels that are not rotated
            later = 2 * half + tl.arange(0, REST)
            last = later < size
            rest = tl.load(whole + later, mask=last, other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest)
        scale = tl.rsqrt(squares / size + epsilon)
        is_query = head < heads
        low_weight = _head_weights(query_weight, key_weight, is_query, column, inside)
        high_weight = _head_weights(query_weight, key_weight, is_query, half + column, inside)
        low = _weighed(low * scale, low_weight, dtype, STYLE).to(tl.float32)
        high = _weighed(high * scale, high_weight, dtype, STYLE).to(tl.float32)
        if REST > 0:
            rest_weight = _head_weights(query_weight, key_weight, is_query, later, last)
            tl.store(whole + later, _weighed(rest * scale, rest_weight, dtype, STYLE), mask=last)
    if TURNS:
        low_cos = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        high_cos = tl.load(cos + angle + half, mask=inside, other=0.0).to(tl.float32)
        low_sin = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        high_sin = tl.load(sin + angle + half, mask=inside, other=0.0).to(tl.float32)
        turned_low = _product(low, low_cos, dtype, WIDE) - _product(high, low_sin, dtype, WIDE)
        high = _product(high, high_cos, dtype, WIDE) + _product(low, high_sin, dtype, WIDE)
        low = turned_low
    tl.store(place, low.to(dtype), mask=inside)
    tl.store(place + half, high.to(dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gated(  # type: ignore[no-untyped-def]
    projected, output, inner, GELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    place = projected + 2 * row * inner + column
    gate, up = tl.load(place, mask=inside, other=0.0), tl.load(place + inner, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    power = -wide
    if GELU:
        power = (wide * wide * 0.044715 + 1.0) * wide * -1.5957691216057308  # -2 sqrt(2 / pi)
    activated = (wide / (1.0 + tl.exp(power))).to(gate.dtype).to(tl.float32)
    tl.store(output + row * inner + column, (activated * up.to(tl.float32)).to(gate.dtype), mask=inside)
