"""Checksums of what the compressed side reads in place of the prompt's entries, one to a layer.

They show what an action's identity cannot see: units of one document, action and revision have equal ones, or are
refused (``schema.store.kept_sets``). Sums of 64-bit integers have no order, so a device's threads change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from generator.attention.cache_rules import CacheRule, StreamEntries
from generator.attention.recording import PromptLayer
from generator.attention.shared_prefix import PrefixLayer

_ODD = 0x9E3779B97F4A7C15 - 2**64  # Weyl's constant of 64 bits, signed: its multiples spread over all bits
_BYTES = 8  # of a word
_TRIED_STEPS = 2  # of a policy; a step costs what decoding one token does


def checksum(*parts: Tensor) -> Tensor:
    """Sum the bits of some tensors as 64-bit words modulo 2^64, each word times an odd number of its place.

    Args:
        parts: Tensors of one device, any shapes and dtypes.

    Returns:
        int64 [], on that device: nothing is copied to the host.
    """
    sums, first = [], 1
    for part in parts:
        flat = part.contiguous().view(torch.uint8).flatten()
        words = torch.nn.functional.pad(flat, (0, -len(flat) % _BYTES)).view(torch.int64)
        places = torch.arange(first, first + len(words), device=part.device)
        mixed = words ^ (words >> 32)  # else the high bits of a word would be lost in its product
        sums.append((mixed * (places * _ODD | 1)).sum())
        first += len(words)
    return torch.stack(sums).sum()


def in_words(sums: Sequence[Tensor]) -> tuple[str, ...]:
    """Return checksums as ``units`` has them, 16 hexadecimal digits each."""
    return tuple(f"{int(one) % 2**64:016x}" for one in sums)


def first_decisions(rule: CacheRule, prompt: Sequence[PromptLayer], held: Sequence[PrefixLayer]) -> list[Tensor]:
    """Checksums of what a decode-time policy does first, the same for all replicates: no drawn token is fed.

    The prompt's last token is fed again in place of drawn ones. Of a policy that scores entries, the sums are of which
    entries are left before each step and after the last one; of another policy, of the attention.

    Args:
        rule: The policy's rule of the prompt's cache.
        prompt: Each layer of the whole prompt.
        held: Of each layer, what the first cut kept.

    Returns:
        One of each layer, int64 [].
    """
    return [checksum(*_decided(rule, layer, own)) for layer, own in zip(prompt, held, strict=True)]


def _decided(rule: CacheRule, layer: PromptLayer, own: PrefixLayer) -> list[Tensor]:
    kv_heads, _, size = layer.key.shape
    query = layer.window_query[:, -1].reshape(1, kv_heads, -1, size)
    scores = rule.first_scores(layer.number)[None] if rule.scores else torch.empty(0, device=layer.key.device)
    decided = [scores >= 0]
    for length in range(1, _TRIED_STEPS + 1):
        if rule.scores:
            scores = torch.nn.functional.pad(scores, (0, 1))  # the new entry's is 0
        if rule.passes(length):
            continue
        suffix = [part[None, :, -1:].expand(-1, -1, length, -1).contiguous() for part in (layer.key, layer.value)]
        entries = StreamEntries(layer.number, query, own.key, own.value, *suffix, layer.scaling)
        attention, scores = rule.attend(entries, scores)
        decided.append(scores >= 0 if rule.scores or attention is None else attention)
    return decided
