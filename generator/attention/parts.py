"""Softmax attention to some of the keys, in a form that can be joined with attention to others.

A softmax over all keys is the average of the softmaxes over disjoint parts of them, weighted by each part's sum of
exponentials. This is how a stream attends to shared prompt entries and to its own suffix, and a prompt's chunk to the
chunks before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from kvdrift.generator.attention.cpu_products import fits_onednn, packed, product
from kvdrift.generator.attention.layer_terms import attend_capped

_aten = torch.ops.aten
_MANY_KEYS = 256  # with so many keys or more, oneDNN is faster than the fused kernels
CHUNK = 4096  # keys that are attended to apart from others, on every device
_POSITIONS = 128  # of queries of a prompt, all of them after each other, whose scores a CPU computes at once
_QUERIES = 256  # of decoding streams, likewise: with fewer of them, laying out the keys takes longer than it saves

PartialAttention = tuple[Tensor, Tensor]
"""An attention output [..., size], and the logarithm of its sum of exponentials, float32 [...]."""


class Chunks(NamedTuple):
    """For each head the chunks of its keys, [chunk, size], and of its values, [size, chunk]."""

    keys: Sequence[Sequence[Tensor]]
    values: Sequence[Sequence[Tensor]]


def attend_part(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, *, causal: bool = False, softcap: float | None = None
) -> PartialAttention:
    """Attend by torch's fused kernels, called by name since the public function does not return the sums.

    Queries are [B, heads, T, size], keys and values [B, heads, S, size]; if ``causal``, T = S and query t sees no key
    after t. A soft cap is not of causal attention. Returns the output [B, heads, T, size], and the logarithm of the sum
    of exponentials, float32 [B, heads, T].
    """
    if softcap is not None:
        return attend_capped(query, key, value, scaling, softcap)
    if query.device.type == "cpu":
        output, mass = _aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
            query, key, value, 0.0, causal, scale=scaling
        )
    elif query.dtype == torch.float32:  # flash attention on CUDA takes 16 bits only
        output, mass = _aten._scaled_dot_product_efficient_attention(  # noqa: SLF001
            query, key, value, None, compute_log_sumexp=True, is_causal=causal, scale=scaling
        )[:2]
        mass = mass[..., : query.shape[2]]  # padded to a multiple of 32
    else:
        output, mass = _aten._scaled_dot_product_flash_attention(  # noqa: SLF001
            query, key, value, 0.0, causal, return_debug_mask=False, scale=scaling
        )[:2]
    return output, mass


def attend_prompt(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None = None,
    chunks: Chunks | None = None,
) -> PartialAttention:  # fmt: skip
    """Attend from queries [heads, T, size] to keys and values [heads, S, size], by oneDNN if that is faster.

    A layer's soft cap is applied, if there is one. ``chunks`` are the same entries, as ``packed_chunks`` returns them.
    Returns the output [heads, T, size], and the logarithm of the sum of exponentials, float32 [heads, T].
    """
    if softcap is not None:
        return attend_capped(query, key, value, scaling, softcap)
    if by_onednn(query, key):
        return attend_by_onednn(query * scaling, chunks or _in_chunks(key, value))
    output, mass = attend_part(query[None], key[None], value[None], scaling)
    return output[0], mass[0]


def join_parts(
    first: PartialAttention, second: PartialAttention, *, log_of_sum: Callable[[Tensor, Tensor], Tensor] | None = None
) -> PartialAttention:
    """Join attention to two disjoint sets of keys, in float32.

    ``log_of_sum`` is log(exp(a) + exp(b)); by default ``seamless_logaddexp``, which streams need, since their rows
    differ from step to step. A prompt is computed only once.
    """
    (output, mass), (other, other_mass) = first, second
    joint = (log_of_sum or seamless_logaddexp)(mass, other_mass)
    weight, other_weight = (mass - joint).exp_(), (other_mass - joint).exp_()
    return weight[..., None] * output + other_weight[..., None] * other, joint


def seamless_logaddexp(one: Tensor, other: Tensor) -> Tensor:
    """Return log(exp(a) + exp(b)), elementwise; an element's value does not depend on its place.

    A CPU computes the last elements of contiguous tensors one by one, and rounds them differently. If the results are
    not contiguous, all elements are computed one by one.
    """
    return torch.logaddexp(one, other, out=one.new_empty((*one.shape, 2))[..., 0])


def attend_causally(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attend from the last T of S positions to all positions up to their own; return [1, heads, T, size].

    Queries are [1, heads, T, size], keys and values [KV heads, S, size].
    """
    _, heads, length, size = query.shape
    kv_heads, positions, _ = key.shape
    group, before = heads // kv_heads, positions - length
    if by_onednn(query, key):
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
    earlier, mass = earlier.reshape(query.shape), mass.reshape(own[1].shape)
    output, _ = join_parts(own, (earlier, mass), log_of_sum=torch.logaddexp)
    return output.to(query.dtype)


def by_onednn(query: Tensor, key: Tensor) -> bool:
    """Tell whether oneDNN can be used and is faster than the fused kernels, which multiply by MKL."""
    return key.shape[1] >= _MANY_KEYS and fits_onednn(query)


def _in_chunks(key: Tensor, value: Tensor) -> Chunks:
    """Divide keys and values, [heads, S, size] each."""
    keys, values = ([torch.split(head, CHUNK) for head in part] for part in (key, value))
    return Chunks(keys, [[chunk.t() for chunk in head] for head in values])


def packed_chunks(key: Tensor, value: Tensor) -> Chunks:
    """Divide keys and values, [heads, S, size] each; the keys are packed for products of oneDNN."""
    chunks = _in_chunks(key, value)
    return Chunks([[packed(chunk) for chunk in head] for head in chunks.keys], chunks.values)


def attend_by_onednn(query: Tensor, chunks: Chunks) -> PartialAttention:
    """Attend from scaled queries [heads, T, size], a few rows at a time, whose scores fit the processor's cache.

    If a head has few rows, the rows of several heads are taken together. The parts of a head are about equally long,
    because a single row takes other code paths than several rows.
    """
    heads, length, _ = query.shape
    if heads * length <= _QUERIES:
        return _attend_rows(query, *chunks)
    together = max(_QUERIES // length, 1)
    found = []
    for first in range(0, heads, together):
        some = slice(first, first + together)
        rows = torch.tensor_split(query[some], -(-length // _QUERIES), 1)
        parts = [_attend_rows(part, *(entries[some] for entries in chunks)) for part in rows]
        found.append(parts[0] if len(parts) == 1 else tuple(torch.cat(part, 1) for part in zip(*parts, strict=True)))
    output, mass = found[0] if len(found) == 1 else (torch.cat(parts) for parts in zip(*found, strict=True))
    return output, mass


def _attend_causally_by_onednn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend causally from scaled queries [KV heads, group, T, size], some rows at a time."""
    output = torch.empty_like(query)
    _, group, length, size = query.shape
    before = key.shape[1] - length
    ahead = torch.full((_POSITIONS, _POSITIONS), -torch.inf).triu_(1)
    for head, (head_key, head_value) in enumerate(zip(key, value, strict=True)):
        for first in range(0, length, _POSITIONS):
            last = min(first + _POSITIONS, length)
            rows = query[head, :, first:last].reshape(-1, size)
            own = slice(before + first, before + last)
            scores = product(rows, head_key[own])
            scores.view(group, last - first, -1).add_(ahead[: last - first, : last - first])
            part = _weigh(scores[None], [head_value[own].t()])
            if own.start:
                earlier = _in_chunks(head_key[None, : own.start], head_value[None, : own.start])
                before_them = _attend_rows(rows[None], *earlier)
                part = join_parts(before_them, part, log_of_sum=torch.logaddexp)
            output[head, :, first:last] = part[0].view(group, -1, size)
    return output


def _attend_rows(
    query: Tensor, keys: Sequence[Sequence[Tensor]], values: Sequence[Sequence[Tensor]]
) -> PartialAttention:  # fmt: skip
    """Attend from scaled queries [heads, rows, size] to ``Chunks`` of the same heads."""
    chunks = zip(zip(*keys, strict=True), zip(*values, strict=True), strict=True)
    return reduce(join_parts, (_weigh(_products(query, some), weighed) for some, weighed in chunks))


def _weigh(scores: Tensor, values: Iterable[Tensor]) -> PartialAttention:
    """Average values, [size, S] of each head, by the softmax of scores [heads, rows, S], which are overwritten."""
    top = scores.amax(-1)
    torch.softmax(scores, -1, out=scores)
    mass = top - scores.amax(-1).log_()  # the largest share is exp(top) over the sum
    return _products(scores, values), mass


def _products(rows: Tensor, others: Iterable[Tensor]) -> Tensor:
    """Multiply each head's rows [heads, R, in] by its others [out, in]: [heads, R, out]; one head is not copied."""
    found = [product(some, other) for some, other in zip(rows, others, strict=True)]
    return found[0][None] if len(found) == 1 else torch.stack(found)
