"""The operations of a decoding step between its matrix products: norms, rotation, gated products.

On CUDA each operation is one launch of ``kvdrift.generator.transformer.fused.triton_kernels``. Elsewhere torch computes
them as transformers does, with the same roundings: norms in float32 and then in the weights' dtype, everything else in
the weights' dtype.

A norm is an RMSNorm of one of three styles, which models differ in: how the values of mean square 1 are multiplied with
the weights w, and when the product is rounded to the dtype.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from kvdrift.schema.errors import tried_once

ROUNDED, WIDE, OFFSET = 0, 1, 2
"""Styles of norms: w times the rounded values (Llama); w times the values, rounded (OLMo 2); 1 + w times the values,
rounded (Gemma)."""

STYLES = (ROUNDED, WIDE, OFFSET)


def norm(x: Tensor, weight: Tensor, epsilon: float, style: int = ROUNDED) -> Tensor:
    """Return the RMSNorm of x, [..., width], in its dtype; ``epsilon`` is added to the mean square."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    if style == ROUNDED:
        return weight * scaled.to(x.dtype)
    return (scaled * (1.0 + weight.float()) if style == OFFSET else weight * scaled).to(x.dtype)


def plain_add_norm(
    residual: Tensor, added: Tensor | None, weight: Tensor, epsilon: float, style: int = ROUNDED,
    added_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Add ``added`` to ``residual`` in place, and return the RMSNorm of the sum, [rows, width].

    Both are [rows, width], contiguous; None adds nothing. ``weight`` is [width]; ``epsilon`` is added to the mean
    square. If ``added_weight`` is given, [width], the RMSNorm of ``added`` with it is added.
    """
    if added is not None:
        residual.add_(added if added_weight is None else norm(added, added_weight, epsilon, style))
    return norm(residual, weight, epsilon, style)


def plain_add_normed(residual: Tensor, added: Tensor, weight: Tensor, epsilon: float, style: int = ROUNDED) -> None:
    """Add the RMSNorm of ``added`` to ``residual`` in place; both are [rows, width], contiguous."""
    residual.add_(norm(added, weight, epsilon, style))


def plain_norm_columns(x: Tensor, first: int, weight: Tensor, epsilon: float, style: int = ROUNDED) -> None:
    """Replace columns of x, [rows, columns], by their RMSNorm: as many as ``weight`` has, from number ``first`` on."""
    part = x[:, first : first + len(weight)]
    part.copy_(norm(part, weight, epsilon, style))


def plain_rotate(
    projected: Tensor, cos: Tensor | None, sin: Tensor | None, heads: int, query_weight: Tensor | None,
    key_weight: Tensor | None, epsilon: float, style: int = ROUNDED,
) -> None:  # fmt: skip
    """Apply RMSNorm to queries and to keys, if they have weights [size] for it, and rotate them by RoPE, in place.

    ``projected`` are queries, keys and values, [rows, heads + 2 KV heads, size], contiguous; ``cos`` and ``sin`` are
    [rows, turned], or [1, turned] if all rows have one position, or None if nothing is rotated. The first ``turned``
    channels of a head are rotated by halves. ``epsilon`` is added to the mean square.
    """
    kv_heads = (projected.shape[1] - heads) // 2
    for part, weight in ((projected[:, :heads], query_weight), (projected[:, heads : heads + kv_heads], key_weight)):
        values = part if weight is None else norm(part, weight, epsilon, style)
        turned = 0 if cos is None else cos.shape[1]
        if weight is not None and turned < part.shape[2]:
            part[..., turned:] = values[..., turned:]
        if cos is not None and sin is not None:
            rotated = values[..., :turned]
            low, high = rotated.chunk(2, dim=-1)
            part[..., :turned] = rotated * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]


@custom_op("kvdrift::silu_times", mutates_args=())
def silu_times(projected: Tensor) -> Tensor:
    """Return SiLU of the first half of the columns, times the second half: [rows, 2 x inner] -> [rows, inner]."""
    gate, up = projected.chunk(2, dim=-1)
    wide = gate.float()
    return (wide / wide.neg().exp_().add_(1.0)).to(gate.dtype) * up


@custom_op("kvdrift::gelu_times", mutates_args=())
def gelu_times(projected: Tensor) -> Tensor:
    """Return GELU, by tanh, of the first half of the columns, times the second: [rows, 2 x inner] -> [rows, inner].

    With z = sqrt(2 / pi) (x + .044715 x^3), GELU of x is x / (1 + exp(-2 z)).
    """
    gate, up = projected.chunk(2, dim=-1)
    wide = gate.float()
    inner = (wide * wide).mul_(0.044715).add_(1.0).mul_(wide).mul_(-2.0 * math.sqrt(2.0 / math.pi))
    return (wide / inner.exp_().add_(1.0)).to(gate.dtype) * up


add_norm = custom_op("kvdrift::add_norm", plain_add_norm, mutates_args=("residual",))
add_normed = custom_op("kvdrift::add_normed", plain_add_normed, mutates_args=("residual",))
norm_columns = custom_op("kvdrift::norm_columns", plain_norm_columns, mutates_args=("x",))
rotate = custom_op("kvdrift::rotate", plain_rotate, mutates_args=("projected",))


def _launch_on_cuda(name: str) -> Any:
    def launch(*arguments: Any) -> Any:
        from kvdrift.generator.transformer.fused import triton_kernels  # noqa: PLC0415 - Triton comes with CUDA only

        return getattr(triton_kernels, name)(*arguments)

    return launch


for name, operation in {
    "add_norm": add_norm, "add_normed": add_normed, "norm_columns": norm_columns, "rotate": rotate,
    "silu_times": silu_times, "gelu_times": gelu_times,
}.items():  # fmt: skip
    operation.register_kernel("cuda")(_launch_on_cuda(name))


@tried_once
def operations_fault(device: torch.device) -> str | None:
    """Return why this module's operations cannot be launched on a CUDA device; None if they can.

    They are tried once, on a few small rows. Triton builds a kernel at its first use, which needs a C compiler on this
    machine.
    """
    near = all(
        torch.allclose(result.cpu(), expected, atol=1e-5)
        for result, expected in zip(_tried(device), _tried(), strict=True)
    )
    return None if near else "the Triton kernels give wrong values"


def _tried(device: torch.device | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, added, weights, cos, sin = (torch.randn(2, 6, generator=generator).to(device) for _ in range(5))
    heads = torch.randn(2, 4, 6, generator=generator).to(device)
    results = [silu_times(x), gelu_times(x), add_norm(x, added, weights[0], 1e-6)]
    results.append(add_norm(x, added, weights[0], 1e-6, OFFSET, weights[1]))
    add_normed(x, added, weights[0], 1e-6, WIDE)
    norm_columns(added, 2, weights[0, :4], 1e-6)
    rotate(heads, cos, sin, 2, weights[0], weights[1], 1e-6)
    rotate(heads, cos[:, :4], sin[:, :4], 2, weights[0], weights[1], 1e-6)
    return [*results, x, added, heads]
