"""Softmax attention to some of the keys, in a form that can be joined with attention to the other keys.

A softmax over all keys is the average of the softmaxes over disjoint parts of them, weighted by each part's sum of
exponentials. This is how a stream attends to shared prompt entries and to its own suffix, and a prompt's chunk to the
chunks before it.

Layers can have terms besides a softmax over all earlier positions. With scaled products s of a query and its keys, a
soft cap c makes them c tanh(s / c). A window of W lets the query at position t see only the positions t - W + 1 .. t.
A sink is a learned number of a head, and acts as the score of one more key, whose value is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvdrift.generator.attention.cpu_products import fits_onednn, packed, product
from kvdrift.generator.attention.threads import torch_threads


@dataclass(frozen=True)
class LayerTraits:
    """Properties of a model's layers with full attention; None means unknown, and for ``softcap`` also no soft cap.

    ``kind`` is the model's type, as transformers names it. ``turned_by_halves``: whether every such layer rotates
    whole heads, channel i together with channel i + size / 2, by angles that the model's rotary embedding gives.
    """

    kind: str | None = None
    softcap: float | None = None
    turned_by_halves: bool | None = None


UNKNOWN = LayerTraits()


def attention_modules(network: Any) -> dict[int, Any]:
    """Return the attention module of each layer that has one, by the layer's number in the network, ascending."""
    layers = getattr(getattr(network, "model", None), "layers", ())
    modules = ((number, getattr(layer, "self_attn", None)) for number, layer in enumerate(layers))
    return {number: module for number, module in modules if module is not None}


_POSITIONS = 128  # of a prompt, whose queries' scores are computed at once


@dataclass(frozen=True, eq=False)
class LayerTerms:
    """The terms of a layer: a window W, a soft cap c, and sinks [heads]; each is None if the layer does not have it."""

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether the layer has none of these terms."""
        return self.window is None and self.softcap is None and self.sinks is None

    def first_seen(self, entries: int) -> int:
        """Return the place of the first of ``entries`` entries that a query sees; the last entry is the query's own."""
        return 0 if self.window is None else max(entries - self.window, 0)

    def held(self, entries: int) -> int:
        """Return how many of ``entries`` a later query may still see, which is how many a cache holds."""
        return entries if self.window is None else min(entries, self.window - 1)


PLAIN = LayerTerms()


def attend_capped(query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float) -> tuple[Tensor, Tensor]:
    """Attend with a soft cap from queries [..., T, size] to keys and values [..., S, size].

    Returns the output [..., T, size], float32, and the logarithm of the sum of exponentials, float32 [..., T].
    """
    if query.dim() == 3 and fits_onednn(query):
        heads = zip(query, key, value, strict=True)
        parts = [_weigh_scores(_scores(rows, keys, scaling, softcap), values) for rows, keys, values in heads]
        output, mass = (torch.stack(part) for part in zip(*parts, strict=True))
        return output, mass
    return _weigh_scores(_scores(query, key, scaling, softcap), value)


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Apply a soft cap to scores; None leaves them unchanged. An element's result does not depend on its place.

    tanh(x) is computed as 1 - 2 / (1 + exp(2 x)), since torch's own tanh computes a tensor's last elements differently.
    """
    if softcap is None:
        return scores
    return softcap - 2.0 * softcap / (1.0 + (scores * (2.0 / softcap)).exp())


def with_sinks(output: Tensor, mass: Tensor, sinks: Tensor | None) -> Tensor:
    """Return an attention output [..., KV heads, query heads, size] as it is with sinks [heads] in the softmax.

    ``mass`` is the logarithm of the sum of exponentials of all keys, float32 [..., KV heads, query heads]. If ``sinks``
    is None, the output is returned unchanged.
    """
    if sinks is None:
        return output
    return output * _beside(mass, sinks.view(mass.shape[-2:]))[..., None]


def attend_causally_by(query: Tensor, key: Tensor, value: Tensor, scaling: float, terms: LayerTerms) -> Tensor:
    """Attend causally in a layer with terms, from the last T of S positions; return [1, heads, T, size].

    Queries are [1, heads, T, size], keys and values [KV heads, S, size].
    """
    _, heads, length, size = query.shape
    kv_heads, positions, _ = key.shape
    group, before = heads // kv_heads, positions - length
    grouped = query.reshape(kv_heads, group, length, size)
    output = torch.empty_like(grouped)
    for first in range(0, length, _POSITIONS):
        last = min(first + _POSITIONS, length)
        since = terms.first_seen(before + first + 1)
        places = torch.arange(before + first, before + last, device=key.device)[:, None]
        seen = torch.arange(since, before + last, device=key.device)
        hidden = seen > places
        if terms.window is not None:
            hidden |= seen <= places - terms.window
        for head in range(kv_heads):
            rows = grouped[head, :, first:last].reshape(-1, size)
            keys, values = key[head, since : before + last], value[head, since : before + last]
            scores = _scores(rows, keys, scaling, terms.softcap)
            scores.view(group, last - first, -1).masked_fill_(hidden, -torch.inf)
            part, mass = _weigh_scores(scores, values)
            if terms.sinks is not None:
                sinks = terms.sinks.view(kv_heads, group)[head].repeat_interleave(last - first)
                part = part * _beside(mass, sinks)[:, None]
            output[head, :, first:last] = part.view(group, last - first, size)
    return output.view(query.shape)


def _beside(mass: Tensor, sinks: Tensor) -> Tensor:
    """Return the keys' share of a sum of exponentials of keys and a sink; ``mass`` is the log of the keys' sum."""
    return 1.0 / (1.0 + (sinks.float() - mass).exp())


def _scores(query: Tensor, key: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Return scores of queries [..., T, size] and keys [..., S, size], float32 [..., T, S]."""
    if query.dim() == 2 and fits_onednn(query):
        return capped(product(query * scaling, key), softcap)
    return capped((query @ key.transpose(-1, -2)).float() * scaling, softcap)


def _weigh_scores(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Average values [..., S, size] with the softmax of float32 scores [..., T, S] as weights.

    Returns the averages [..., T, size] and the logarithms of the sums of exponentials [..., T]; both float32.
    """
    top = scores.amax(-1)
    weights = torch.softmax(scores, -1)
    mass = top - weights.amax(-1).log()
    if weights.dim() == 2 and fits_onednn(weights) and value.dtype == torch.float32:
        return product(weights, value.t()), mass
    return (weights.to(value.dtype) @ value).float(), mass


_aten = torch.ops.aten
_MANY_KEYS = 256  # with so many keys or more, oneDNN is faster than the fused kernels
_FLASH_SIZE = 256  # of the largest heads that flash attention on CUDA takes, which must be of 16 bits
CHUNK = 4096  # the most keys of a chunk; attention to each chunk is computed separately, on every device
_ROWS_OF_PROMPT = 128  # consecutive positions of a prompt whose queries' scores a CPU computes at once
_QUERIES = 256  # of decoding streams, whose scores a CPU computes at once; for fewer, laying out keys costs too much

PartialAttention = tuple[Tensor, Tensor]
"""An attention output [..., size], and the logarithm of its sum of exponentials, float32 [...]."""


class Chunks(NamedTuple):
    """For each head the chunks of its keys, [chunk, size], and of its values, [size, chunk]; none without entries."""

    keys: Sequence[Sequence[Tensor]]
    values: Sequence[Sequence[Tensor]]


def attend_part(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, *, causal: bool = False, softcap: float | None = None
) -> PartialAttention:
    """Attend by torch's fused kernels, and return the logarithm of the sum of exponentials, too.

    The kernels are called by their internal names, since torch's public function does not return the sum. Queries are
    [B, heads, T, size], keys and values [B, heads, S, size]; if ``causal``, T = S and query t sees no key after t. With
    a soft cap ``causal`` is ignored. Returns the output [B, heads, T, size], and the logarithm of the sum of
    exponentials, float32 [B, heads, T].
    """
    if softcap is not None:
        return attend_capped(query, key, value, scaling, softcap)
    if query.device.type == "cpu":
        with torch_threads(1):  # MKL's rounding may depend on where a thread's buffer begins
            output, mass = _aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
                query, key, value, 0.0, causal, scale=scaling
            )
    elif query.dtype == torch.float32 or query.shape[-1] > _FLASH_SIZE:  # of CUDA's two, this one takes all sizes
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
    chunks: Chunks | None = None, lengths: Sequence[int] | None = None,
) -> PartialAttention:  # fmt: skip
    """Attend from queries [heads, T, size] to keys and values [heads, S, size], by oneDNN if that is faster.

    ``softcap`` is the layer's soft cap, if it has one. ``chunks`` are the keys and values as ``packed_chunks`` returns
    them, if they were packed. ``lengths`` has the entries of each head, if not every head has S.
    Returns the output [heads, T, size], and the logarithm of the sum of exponentials, float32 [heads, T]; that is minus
    infinity for a head without entries.
    """
    if lengths is not None:
        return _attend_by_head(query, key, value, scaling, softcap, chunks, lengths)
    if softcap is not None:
        return attend_capped(query, key, value, scaling, softcap)
    if by_onednn(query, key):
        return _attend_by_onednn(query * scaling, chunks or _in_chunks(key, value))
    output, mass = attend_part(query[None], key[None], value[None], scaling)
    return output[0], mass[0]


def _attend_by_head(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None, chunks: Chunks | None,
    lengths: Sequence[int],
) -> PartialAttention:  # fmt: skip
    """Attend as ``attend_prompt`` does, one head after the other; nothing is computed for padding."""
    multiplies = by_onednn(query, key)  # one way for all heads, whatever their lengths
    parts: list[PartialAttention] = []
    for head, entries in enumerate(lengths):
        only = slice(head, head + 1)
        rows, keys, values = query[only], key[only, :entries], value[only, :entries]
        if not entries:
            nothing = rows.new_full(rows.shape[:-1], -torch.inf, dtype=torch.float32)
            parts.append((torch.zeros_like(rows), nothing))
        elif softcap is None and multiplies:
            own = _in_chunks(keys, values) if chunks is None else Chunks(chunks.keys[only], chunks.values[only])
            parts.append(_attend_by_onednn(rows * scaling, own))
        elif softcap is None:
            own_output, own_mass = attend_part(rows[None], keys[None], values[None], scaling)
            parts.append((own_output[0], own_mass[0]))
        else:
            parts.append(attend_capped(rows, keys, values, scaling, softcap))
    output, mass = (torch.cat(part) for part in zip(*parts, strict=True))
    return output, mass


def join_parts(
    first: PartialAttention, second: PartialAttention, *, log_of_sum: Callable[[Tensor, Tensor], Tensor] | None = None
) -> PartialAttention:
    """Join attention to two disjoint sets of keys, in float32.

    ``log_of_sum`` computes log(exp(a) + exp(b)). Streams need the default, ``seamless_logaddexp``, whose results do not
    depend on the number of rows: that changes from step to step. A prompt is computed only once, and does not need it.
    """
    (output, mass), (other_output, other_mass) = first, second
    joint = (log_of_sum or seamless_logaddexp)(mass, other_mass)
    weight, other_weight = (mass - joint).exp_(), (other_mass - joint).exp_()
    return weight[..., None] * output + other_weight[..., None] * other_output, joint


def seamless_logaddexp(first: Tensor, second: Tensor) -> Tensor:
    """Return log(exp(a) + exp(b)), elementwise; an element's value does not depend on its place.

    A CPU computes the last elements of contiguous tensors one by one, and rounds them differently. Here the results
    are not contiguous, so that all elements are computed one by one.
    """
    return torch.logaddexp(first, second, out=first.new_empty((*first.shape, 2))[..., 0])


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
    suffix = attend_part(query, own_key, own_value, scaling, causal=True)
    grouped = query.reshape(kv_heads, group * length, size)
    earlier, mass = attend_prompt(grouped, key[:, :before], value[:, :before], scaling)
    earlier, mass = earlier.reshape(query.shape), mass.reshape(suffix[1].shape)
    output, _ = join_parts(suffix, (earlier, mass), log_of_sum=torch.logaddexp)
    return output.to(query.dtype)


def by_onednn(query: Tensor, key: Tensor) -> bool:
    """Return whether oneDNN can be used and is faster than the fused kernels, which multiply by MKL."""
    return key.shape[1] >= _MANY_KEYS and fits_onednn(query)


def _in_chunks(key: Tensor, value: Tensor, lengths: Sequence[int] | None = None) -> Chunks:
    """Divide keys and values, [heads, S, size] each, into chunks of CHUNK entries."""
    counts = [key.shape[1]] * len(key) if lengths is None else lengths
    keys, values = (
        [torch.split(head[:entries], CHUNK) if entries else () for head, entries in zip(part, counts, strict=True)]
        for part in (key, value)
    )
    return Chunks(keys, [[chunk.t() for chunk in head] for head in values])


def packed_chunks(key: Tensor, value: Tensor, lengths: Sequence[int] | None = None) -> Chunks:
    """Divide keys and values, [heads, S, size] each, into chunks of CHUNK entries; pack the keys for oneDNN.

    ``lengths`` has the entries of each head, if not every head has S.
    """
    chunks = _in_chunks(key, value, lengths)
    return Chunks([[packed(chunk) for chunk in head] for head in chunks.keys], chunks.values)


def _attend_by_onednn(query: Tensor, chunks: Chunks) -> PartialAttention:
    """Attend from scaled queries [heads, T, size], so few rows at a time that scores fit the processor's cache.

    If a head has few rows, the rows of several heads are taken together. The rows of a head are divided into parts of
    about equal length, so that no single row is left over: it would take other code paths than several rows.
    """
    heads, length, _ = query.shape
    if heads * length <= _QUERIES:
        return _attend_rows(query, *chunks)
    together = max(_QUERIES // length, 1)
    blocks = []
    for first in range(0, heads, together):
        block = slice(first, first + together)
        rows = torch.tensor_split(query[block], -(-length // _QUERIES), 1)
        parts = [_attend_rows(part, *(entries[block] for entries in chunks)) for part in rows]
        blocks.append(parts[0] if len(parts) == 1 else tuple(torch.cat(part, 1) for part in zip(*parts, strict=True)))
    output, mass = blocks[0] if len(blocks) == 1 else (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return output, mass


def _attend_causally_by_onednn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend causally from scaled queries [KV heads, group, T, size], some rows at a time."""
    output = torch.empty_like(query)
    _, group, length, size = query.shape
    before = key.shape[1] - length
    ahead = torch.full((_ROWS_OF_PROMPT, _ROWS_OF_PROMPT), -torch.inf).triu_(1)
    for head, (head_key, head_value) in enumerate(zip(key, value, strict=True)):
        for first in range(0, length, _ROWS_OF_PROMPT):
            last = min(first + _ROWS_OF_PROMPT, length)
            rows = query[head, :, first:last].reshape(-1, size)
            places = slice(before + first, before + last)
            scores = product(rows, head_key[places])
            scores.view(group, last - first, -1).add_(ahead[: last - first, : last - first])
            part = _weigh(scores[None], [head_value[places].t()])
            if places.start:
                earlier = _in_chunks(head_key[None, : places.start], head_value[None, : places.start])
                before_them = _attend_rows(rows[None], *earlier)
                part = join_parts(before_them, part, log_of_sum=torch.logaddexp)
            output[head, :, first:last] = part[0].view(group, -1, size)
    return output


def _attend_rows(
    query: Tensor, keys: Sequence[Sequence[Tensor]], values: Sequence[Sequence[Tensor]]
) -> PartialAttention:  # fmt: skip
    """Attend from scaled queries [heads, rows, size] to ``keys`` and ``values``, the ``Chunks`` of the same heads."""
    chunks = zip(zip(*keys, strict=True), zip(*values, strict=True), strict=True)
    return reduce(join_parts, (_weigh(_products(query, chunk), weighed) for chunk, weighed in chunks))


def _weigh(scores: Tensor, values: Iterable[Tensor]) -> PartialAttention:
    """Average each head's values [size, S] with the softmax of scores [heads, rows, S] as weights.

    Returns the averages and the logarithms of the sums of exponentials. The scores are overwritten.
    """
    top = scores.amax(-1)
    torch.softmax(scores, -1, out=scores)
    mass = top - scores.amax(-1).log_()  # the largest share is exp(top) over the sum
    return _products(scores, values), mass


def _products(rows: Tensor, others: Iterable[Tensor]) -> Tensor:
    """Multiply each head's rows [heads, R, in] by its matrix [out, in] of ``others``; return [heads, R, out]."""
    parts = [product(row, column) for row, column in zip(rows, others, strict=True)]
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)
