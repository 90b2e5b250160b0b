"""Softmax attention over some of the keys, in a form that parts can be joined in.

A softmax over all keys is the average of the softmaxes over disjoint parts of them, weighted by each part's sum of
exponentials. So shared prompt entries and a stream's own suffix, or earlier chunks of a prompt and the present one, are
attended to apart and joined.
"""

from __future__ import annotations

import torch
from torch import Tensor

from generator.onednn import has_product, product

_aten = torch.ops.aten
_MANY_KEYS = 256
_ROWS = 128


def attend_part(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention of ``query`` [B, heads, T, size] to ``key`` and ``value`` [B, heads, S, size].

    Returns the output, shaped as the query, and the logarithm of the sum of exponentials, float32 [B, heads, T].
    ``causal``, with T = S, keeps query t from keys after t. These are torch's fused attention kernels, called by name
    since the public function does not return the sums.
    """
    if query.device.type == "cpu" and _by_onednn(query, key, causal=causal):
        return _attend_by_onednn(query[0] * scaling, key[0], value[0])
    if query.device.type == "cpu":
        output, mass = _aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
            query, key, value, 0.0, causal, scale=scaling
        )
    elif query.dtype == torch.float32:  # flash attention on CUDA has 16 bits
        output, mass = _aten._scaled_dot_product_efficient_attention(  # noqa: SLF001
            query, key, value, None, compute_log_sumexp=True, is_causal=causal, scale=scaling
        )[:2]
        mass = mass[..., : query.shape[2]]  # padded to a multiple of 32
    else:
        output, mass = _aten._scaled_dot_product_flash_attention(  # noqa: SLF001
            query, key, value, 0.0, causal, return_debug_mask=False, scale=scaling
        )[:2]
    return output, mass


def _by_onednn(query: Tensor, key: Tensor, *, causal: bool) -> bool:
    """Whether oneDNN's products are faster than the fused kernel's, which are MKL's."""
    large = len(query) == 1 and key.shape[2] >= _MANY_KEYS
    return large and not causal and query.dtype == torch.float32 and has_product()


def _attend_by_onednn(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """``attend_part`` of one batch entry, [heads, T or S, size], by rows whose scores stay in the cache."""
    output, mass = torch.empty_like(query), query.new_empty(query.shape[:2])
    for head, (head_key, head_value) in enumerate(zip(key, value, strict=True)):
        for first in range(0, query.shape[1], _ROWS):
            rows = slice(first, first + _ROWS)
            scores = product(query[head, rows], head_key)
            top = scores.amax(-1)
            torch.softmax(scores, -1, out=scores)
            mass[head, rows] = top - scores.amax(-1).log_()  # the largest share is exp(top) over the sum
            output[head, rows] = product(scores, head_value.t())
    return output[None], mass[None]


def join_parts(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """The attention over the keys of both parts, each as ``attend_part`` returns it; float32."""
    (output, mass), (other, other_mass) = first, second
    joint = torch.logaddexp(mass, other_mass)
    weight, other_weight = (mass - joint).exp_(), (other_mass - joint).exp_()
    return weight[..., None] * output + other_weight[..., None] * other
