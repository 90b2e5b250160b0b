"""The operations between the matrix products of a layer: norms, rotation and the MLP's activation.

On CUDA each is one launch of ``kvdrift.generator.transformer.fused.triton_kernels``. Elsewhere torch computes it as
transformers does, with the same roundings: norms in float32 and then in the weights' dtype, everything else in the
weights' dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from kvdrift.schema.errors import tried_once


@tried_once
def fault(device: torch.device) -> str | None:
    """Return why the operations cannot be launched on a CUDA device; None if they can. Tried once, with small rows.

    Triton builds a kernel at its first use, which needs a C compiler on this machine.
    """
    near = all(torch.allclose(one.cpu(), own, atol=1e-5) for one, own in zip(_tried(device), _tried(), strict=True))
    return None if near else "the kernels' values are wrong"


def _tried(device: torch.device | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, added, weights, cos, sin = (torch.randn(2, 6, generator=generator).to(device) for _ in range(5))
    heads = torch.randn(2, 4, 6, generator=generator).to(device)
    results = [silu_times(x), add_norm(x, added, weights[0], 1e-6), x]
    rotate(heads, cos, sin, 2, weights[0], weights[1], 1e-6)
    return [*results, heads]


def plain_add_norm(residual: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """Add to the residual stream, in place, and return the RMSNorm of the sum, with ``epsilon`` in the mean square.

    The stream and what is added are [rows, width], contiguous; None adds nothing. The weight is [width].
    """
    if added is not None:
        residual.add_(added)
    return _norm(residual, weight, epsilon)


def plain_rotate(
    projected: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    epsilon: float,
) -> None:
    """Norm the heads of queries and keys, if there are weights [size] for it, and rotate them, in place.

    ``projected`` are queries, keys and values, [rows, heads + 2 KV heads, size], contiguous; ``cos`` and ``sin`` are
    [rows, size], or [1, size] if all rows have one position. ``epsilon`` is added to the mean square.
    """
    kv_heads = (projected.shape[1] - heads) // 2
    for part, weight in ((projected[:, :heads], query_weight), (projected[:, heads : heads + kv_heads], key_weight)):
        turned = part if weight is None else _norm(part, weight, epsilon)
        low, high = turned.chunk(2, dim=-1)
        part.copy_(turned * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None])


@custom_op("kvdrift::silu_times", mutates_args=())
def silu_times(projected: Tensor) -> Tensor:
    """Return SiLU of the first half of the columns, times the second half: [rows, 2 x inner] -> [rows, inner]."""
    gate, up = projected.chunk(2, dim=-1)
    wide = gate.float()
    return (wide / wide.neg().exp_().add_(1.0)).to(gate.dtype) * up


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * (wide * scale).to(x.dtype)


add_norm = custom_op("kvdrift::add_norm", plain_add_norm, mutates_args=("residual",))
rotate = custom_op("kvdrift::rotate", plain_rotate, mutates_args=("projected",))


def _launch_on_cuda(name: str) -> Any:
    def launch(*arguments: Any) -> Any:
        from kvdrift.generator.transformer.fused import triton_kernels  # noqa: PLC0415 - Triton comes with CUDA only

        return getattr(triton_kernels, name)(*arguments)

    return launch


for name, operation in {"add_norm": add_norm, "rotate": rotate, "silu_times": silu_times}.items():
    operation.register_kernel("cuda")(_launch_on_cuda(name))
