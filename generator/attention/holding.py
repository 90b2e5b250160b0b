"""How the compressed side stores the prompt entries that an action keeps; and checksums of these entries.

A holding takes keys and values in the model's dtype. It returns the numbers that attention reads in their place, in the
same dtype, and the bytes of the stored form. Generated entries are stored as computed.

Checksums are of the entries that the compressed side reads in place of the prompt's entries, one for each layer. They
show influences that an action's identity cannot see. Units of one document, action and revision must have equal
checksums, or they are refused (``kvdrift.log.units.conditions``). A sum of 64-bit integers is the same in any order, so
the number of threads changes no checksum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvdrift.generator.attention.cache_rules import CacheRule, StreamEntries
from kvdrift.generator.attention.prompt_reads import PrefixLayer
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.schema.errors import failing_as

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of keys and values as stored."""

    payload: int  # of the numbers themselves, in whatever number of bits each
    scales: int = 0  # of scales and zero points, if integers need them

    @property
    def total(self) -> int:
        """All bytes together."""
        return self.payload + self.scales


class Holding(Protocol):
    """A way to store a layer's kept keys and values. Equal holdings store equal entries in equal bytes."""

    def hold(self, layer: PrefixLayer) -> PrefixLayer:
        """Return the layer that attention reads, of the same shapes, dtype and device."""
        ...

    def layer_bytes(self, layer: PrefixLayer) -> StoredBytes:
        """Return the bytes that the layer's keys and values take as they are stored."""
        ...


@dataclass(frozen=True)
class AsComputed:
    """Stores keys and values as the model computed them."""

    def hold(self, layer: PrefixLayer) -> PrefixLayer:
        """Return the layer unchanged."""
        return layer

    def layer_bytes(self, layer: PrefixLayer) -> StoredBytes:
        """Return the bytes of the layer's keys and values."""
        return StoredBytes(layer.key.nbytes + layer.value.nbytes)


@dataclass(frozen=True)
class InDtype:
    """Stores keys and values rounded to another dtype, a name of ``DTYPES``."""

    dtype: str

    def hold(self, layer: PrefixLayer) -> PrefixLayer:
        """Return the layer with numbers rounded to the dtype and converted back to the model's dtype."""
        stored, read_dtype = DTYPES[self.dtype], layer.key.dtype
        return PrefixLayer(layer.key.to(stored).to(read_dtype), layer.value.to(stored).to(read_dtype))

    def layer_bytes(self, layer: PrefixLayer) -> StoredBytes:
        """Return the bytes of the layer's numbers in the dtype."""
        return StoredBytes((layer.key.numel() + layer.value.numel()) * DTYPES[self.dtype].itemsize)


def bytes_as_stored(layer: PrefixLayer, holding: Holding) -> StoredBytes:
    """Return how many bytes a layer's keys and values take as ``holding`` stores them; the tensors may have no data."""
    with failing_as("codec", holding):
        return holding.layer_bytes(layer)


_ODD = 0x9E3779B97F4A7C15 - 2**64  # Weyl's constant of 64 bits, signed: its multiples spread over all bits
_WORD_BYTES = 8  # of a word


def checksum(*parts: Tensor) -> Tensor:
    """Sum the bits of some tensors as 64-bit words modulo 2^64, each word times an odd number that its place decides.

    The tensors have one device and dtype. The sum is int64 [] on that device: nothing is copied to the host.
    """
    flat = torch.cat([part.flatten() for part in parts]).view(torch.uint8)
    if left_over := -len(flat) % _WORD_BYTES:
        flat = torch.nn.functional.pad(flat, (0, left_over))
    words = flat.view(torch.int64)
    weights = torch.arange(1, 1 + len(words), device=flat.device).mul_(_ODD).bitwise_or_(1)
    mixed = (words >> 32).bitwise_xor_(words)  # else a word's high bits would be lost in its product
    return mixed.mul_(weights).sum()


def in_words(sums: Sequence[Tensor]) -> tuple[str, ...]:
    """Return checksums as table ``units`` has them, 16 hexadecimal digits each."""
    return tuple(f"{int(word) % 2**64:016x}" for word in sums)


def first_decisions(rule: CacheRule, prompt: Sequence[PromptLayer], held: Sequence[PrefixLayer]) -> list[Tensor]:
    """Return for each layer a checksum, int64 [], of what a policy's rule does in its first step.

    The prompt's last token is fed once more, in place of a drawn token, so that the step is equal for all replicates.
    If the policy scores entries, a checksum covers which entries are left before the step, and which after it; else
    it covers the attention. ``prompt`` has the layers of the whole prompt, ``held`` the entries that eviction after
    prefill kept of each layer.
    """
    sums = []
    for layer, held_layer in zip(prompt, held, strict=True):
        kv_heads, _, size = layer.key.shape
        before = rule.first_scores(layer.number) if rule.scores else layer.key.new_empty(0)
        if rule.passes(1):
            sums.append(checksum(before >= 0))
            continue
        entries = StreamEntries(
            layer.number, layer.window_query[:, -1].reshape(1, kv_heads, -1, size), held_layer.key, held_layer.value,
            layer.key[None, :, -1:], layer.value[None, :, -1:], layer.scaling, terms=layer.terms,
        )  # fmt: skip
        joined = torch.nn.functional.pad(before, (0, 1))[None] if rule.scores else before  # the new entry's score is 0
        attention, after = rule.attend(entries, joined)
        sums.append(checksum(before >= 0, after >= 0) if rule.scores or attention is None else checksum(attention))
    return sums
