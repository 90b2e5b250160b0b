"""Checksums of the entries that the compressed side reads in place of the prompt's entries, one for each layer.

They show influences that an action's identity cannot see. Units of one document, action and revision must have equal
checksums, or they are refused (``kvdrift.log.units.kept_sets``). Sums of 64-bit integers have no order, so the threads
of a device change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvdrift.generator.attention.cache_rules import CacheRule, StreamEntries
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.attention.shared_prefix import PrefixLayer

_ODD = 0x9E3779B97F4A7C15 - 2**64  # Weyl's constant of 64 bits, signed: its multiples spread over all bits
_BYTES = 8  # of a word


def checksum(*parts: Tensor) -> Tensor:
    """Sum the bits of some tensors as 64-bit words modulo 2^64, each word times an odd number of its place.

    The tensors have one device and dtype. The sum is int64 [] on that device: nothing is copied to the host.
    """
    flat = torch.cat([part.flatten() for part in parts]).view(torch.uint8)
    if left_over := -len(flat) % _BYTES:
        flat = torch.nn.functional.pad(flat, (0, left_over))
    words = flat.view(torch.int64)
    weights = torch.arange(1, 1 + len(words), device=flat.device).mul_(_ODD).bitwise_or_(1)
    mixed = (words >> 32).bitwise_xor_(words)  # else a word's high bits would be lost in its product
    return mixed.mul_(weights).sum()


def in_words(sums: Sequence[Tensor]) -> tuple[str, ...]:
    """Return checksums as table ``units`` has them, 16 hexadecimal digits each."""
    return tuple(f"{int(one) % 2**64:016x}" for one in sums)


def first_decisions(rule: CacheRule, prompt: Sequence[PromptLayer], held: Sequence[PrefixLayer]) -> list[Tensor]:
    """Return a checksum, int64 [], for each layer of a policy's first step, which is equal for all replicates.

    No drawn token is fed: the prompt's last token is fed once more in place of one. If a policy scores entries, the
    sums are of the entries left before and after that step; else they are of the attention. ``prompt`` are the layers
    of the whole prompt, ``held`` the entries that the first cut kept of each.
    """
    return [_decided(rule, layer, own) for layer, own in zip(prompt, held, strict=True)]


def _decided(rule: CacheRule, layer: PromptLayer, own: PrefixLayer) -> Tensor:
    kv_heads, _, size = layer.key.shape
    before = rule.first_scores(layer.number) if rule.scores else layer.key.new_empty(0)
    if rule.passes(1):
        return checksum(before >= 0)
    entries = StreamEntries(
        layer.number, layer.window_query[:, -1].reshape(1, kv_heads, -1, size), own.key, own.value,
        layer.key[None, :, -1:], layer.value[None, :, -1:], layer.scaling, terms=layer.terms,
    )  # fmt: skip
    joined = torch.nn.functional.pad(before, (0, 1))[None] if rule.scores else before  # the new entry's score is 0
    attention, after = rule.attend(entries, joined)
    return checksum(before >= 0, after >= 0) if rule.scores or attention is None else checksum(attention)
