"""Softmax attention over some of the keys, in a form that parts can be joined in.

A softmax over all keys is the average of the softmaxes over disjoint parts of them, weighted by each part's sum of
exponentials. So shared prompt entries and a stream's own suffix, or earlier chunks of a prompt and the present one, are
attended to apart and joined.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from generator.attention.onednn import has_product, product

_aten = torch.ops.aten
_MANY_KEYS = 256  # from which on oneDNN's calls gain more than they cost
_ROWS, _KEYS = 128, 4096  # queries, or positions of them, and keys whose scores are computed at once

Part = tuple[Tensor, Tensor]  # an output, and the logarithm of its sum of exponentials


def attend_part(query: Tensor, key: Tensor, value: Tensor, scaling: float, *, causal: bool = False) -> Part:
    """Attention of ``query`` [B, heads, T, size] to ``key`` and ``value`` [B, heads, S, size].

    Returns the output, shaped as the query, and the logarithm of the sum of exponentials, float32 [B, heads, T].
    ``causal``, with T = S, keeps query t from keys after t. These are torch's fused attention kernels, called by name
    since the public function does not return the sums.
    """
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


def attend_prompt(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Part:
    """``attend_part`` of [heads, T or S, size], without a batch: by oneDNN where that is faster."""
    if _by_onednn(query, key):
        return _attend_by_onednn(query * scaling, key, value)
    output, mass = attend_part(query[None], key[None], value[None], scaling)
    return output[0], mass[0]


def join_parts(first: Part, second: Part) -> Part:
    """The attention over the keys of both parts, in float32."""
    (output, mass), (other, other_mass) = first, second
    joint = torch.logaddexp(mass, other_mass)
    weight, other_weight = (mass - joint).exp_(), (other_mass - joint).exp_()
    return weight[..., None] * output + other_weight[..., None] * other, joint


def attend_causally(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attention of the last T of S positions to all up to their own, shaped as the query.

    ``query`` is [1, heads, T, size], ``key`` and ``value`` [KV heads, S, size].
    """
    _, heads, length, size = query.shape
    kv_heads, positions, _ = key.shape
    group, before = heads // kv_heads, positions - length
    if _by_onednn(query, key):
        grouped = (query * scaling).view(kv_heads, group, length, size)
        return _attend_causally_by_onednn(grouped, key, value).view(query.shape)
    if not before:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key[None], value[None], is_causal=True, scale=scaling, enable_gqa=True
        )
    own_key, own_value = (part[None, :, before:].repeat_interleave(group, 1) for part in (key, value))
    own = attend_part(query, own_key, own_value, scaling, causal=True)
    grouped = query.reshape(kv_heads, group * length, size)
    earlier, mass = attend_prompt(grouped, key[:, :before], value[:, :before], scaling)
    output, _ = join_parts(own, (earlier.reshape(query.shape), mass.reshape(own[1].shape)))
    return output.to(query.dtype)


def _by_onednn(query: Tensor, key: Tensor) -> bool:
    """Whether oneDNN's products are there and faster than the fused kernels, whose products are MKL's."""
    fitting = query.device.type == "cpu" and query.dtype == torch.float32 and key.shape[1] >= _MANY_KEYS
    return fitting and has_product()


def _attend_by_onednn(query: Tensor, key: Tensor, value: Tensor) -> Part:
    """``attend_prompt`` of scaled queries, by rows whose scores stay in the processor's cache."""
    output, mass = torch.empty_like(query), query.new_empty(query.shape[:2])
    for head, keys_and_values in enumerate(zip(key, value, strict=True)):
        for first in range(0, query.shape[1], _ROWS):
            rows = slice(first, first + _ROWS)
            output[head, rows], mass[head, rows] = _attend_rows(query[head, rows], *keys_and_values)
    return output, mass


def _attend_causally_by_onednn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """``attend_causally`` of scaled queries [KV heads, group, T, size], by rows as above."""
    output = torch.empty_like(query)
    _, group, length, size = query.shape
    before = key.shape[1] - length
    ahead = torch.full((_ROWS, _ROWS), -torch.inf).triu_(1)
    for head, (head_key, head_value) in enumerate(zip(key, value, strict=True)):
        for first in range(0, length, _ROWS):
            last = min(first + _ROWS, length)
            rows = query[head, :, first:last].reshape(-1, size)
            own = slice(before + first, before + last)
            scores = product(rows, head_key[own])
            scores.view(group, last - first, -1).add_(ahead[: last - first, : last - first])
            part = _weigh(scores, head_value[own])
            if own.start:
                part = join_parts(_attend_rows(rows, head_key[: own.start], head_value[: own.start]), part)
            output[head, :, first:last] = part[0].view(group, -1, size)
    return output


def _attend_rows(query: Tensor, key: Tensor, value: Tensor) -> Part:
    """Attention of scaled queries [rows, size] to keys and values [S, size], some keys at a time."""
    parts = (
        _weigh(product(query, some_keys), some_values)
        for some_keys, some_values in zip(torch.split(key, _KEYS), torch.split(value, _KEYS), strict=True)
    )
    return reduce(join_parts, parts)


def _weigh(scores: Tensor, value: Tensor) -> Part:
    """Values [S, size] weighed by the softmax of scores [rows, S], which are overwritten."""
    top = scores.amax(-1)
    torch.softmax(scores, -1, out=scores)
    mass = top - scores.amax(-1).log_()  # the largest share is exp(top) over the sum
    return product(scores, value.t()), mass
