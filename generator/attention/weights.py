"""Attention that also returns its weights, for decoding streams over shared prompt entries and their own suffixes."""

from __future__ import annotations

import torch
from torch import Tensor

from kvdrift.generator.attention.cache_rules import StreamEntries
from kvdrift.generator.attention.cpu_products import fits_onednn, product
from kvdrift.generator.attention.layer_terms import capped


def attend_with_weights(entries: StreamEntries, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Attend by one softmax over prompt and suffix; scores and weights are float32.

    Args:
        entries: R rows with E entries each, first the prompt's, then the suffix's.
        hidden: The numbers added to the scores: 0, or minus infinity for an entry that is not read; float32 [R, KV
            heads, E].

    Returns:
        The output in the queries' dtype, [R, KV heads, query heads of it, size], and the weights, float32 [R, KV heads,
            query heads of it, E].
    """
    rows, kv_heads, group, size = entries.query.shape
    prompt = entries.prompt_key.shape[1]
    query = entries.query * entries.scaling
    packed = query.transpose(0, 1).reshape(kv_heads, rows * group, size)
    shared = _products(packed, entries.prompt_key).view(kv_heads, rows, group, prompt).transpose(0, 1)
    own = query @ entries.suffix_key.transpose(-1, -2)
    scores = capped(torch.cat([shared, own], -1).float(), entries.terms.softcap).add_(hidden[:, :, None])
    if entries.terms.sinks is not None:  # one more key, whose value is 0
        sinks = entries.terms.sinks.float().view(1, kv_heads, group, 1).expand(rows, -1, -1, -1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    share = weights.to(entries.query.dtype)
    to_prompt = share[..., :prompt].transpose(0, 1).reshape(kv_heads, rows * group, prompt)
    output = _products(to_prompt, entries.prompt_value.transpose(-1, -2)).view(kv_heads, rows, group, size)
    return output.transpose(0, 1) + share[..., prompt:] @ entries.suffix_value, weights


def _products(rows: Tensor, others: Tensor) -> Tensor:
    """Return rows [heads, R, in] times others [heads, out, in], [heads, R, out]; by oneDNN on a CPU."""
    if fits_onednn(rows):
        return torch.stack([product(some, other) for some, other in zip(rows, others, strict=True)])
    return rows @ others.transpose(-1, -2)
