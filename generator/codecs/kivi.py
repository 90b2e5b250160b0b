"""KIVI: keys in groups of entries for each channel, values in groups of channels for each entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvdrift.generator.attention.holding import StoredBytes
from kvdrift.generator.attention.shared_prefix import PrefixLayer
from kvdrift.generator.codecs.affine import GROUP_BYTES, channels_back, entries_back, packed_bytes
from kvdrift.generator.codecs.codec import GroupedCodec, beside_exact


@dataclass(frozen=True)
class KIVI(GroupedCodec):
    """Keys per channel in groups of consecutive entries, values per entry in groups of channels.

    Keys have channels of large magnitude, so that the scale of a channel fits better than that of an entry; values have
    no such channels. The last ``residual`` entries are exact, and so are the keys before them that do not fill a group.
    """

    paper: ClassVar[str | None] = "Liu et al. 2024, arXiv:2402.02750"
    bits: ClassVar[int]

    def round_trip(self, layer: PrefixLayer) -> PrefixLayer:
        """Return the layer with the first keys and values as read back from codes, and the last ones unchanged."""
        keys, values = self._coded(layer)
        key = channels_back(layer.key[:, :keys], self.bits, self.group) if keys else layer.key[:, :0]
        value = entries_back(layer.value[:, :values], self.bits, self.group) if values else layer.value[:, :0]
        return PrefixLayer(beside_exact(key, layer.key), beside_exact(value, layer.value))

    def stored_bytes(self, layer: PrefixLayer) -> StoredBytes:
        """Return the bytes of packed integers and exact numbers, and those of scales and zero points."""
        heads, entries, size = layer.key.shape
        keys, values = self._coded(layer)
        payload = sum(
            packed_bytes(heads * coded * size, self.bits) + heads * (entries - coded) * size * layer.key.itemsize
            for coded in (keys, values)
        )
        groups = heads * (keys // self.group * size + values * -(-size // self.group))
        return StoredBytes(payload, groups * GROUP_BYTES)

    def _coded(self, layer: PrefixLayer) -> tuple[int, int]:
        """How many keys and how many values of a KV head are coded."""
        before = self.before_window(layer.key.shape[1])
        return before - before % self.group, before


@dataclass(frozen=True)
class Int8(KIVI):
    """KIVI in 8 bits."""

    summary: ClassVar[str] = "8-bit integers: keys in groups per channel, values per entry, recent entries exact"
    bits: ClassVar[int] = 8


@dataclass(frozen=True)
class Int4(KIVI):
    """KIVI in 4 bits."""

    summary: ClassVar[str] = "4-bit integers: keys in groups per channel, values per entry, recent entries exact"
    bits: ClassVar[int] = 4


@dataclass(frozen=True)
class Int2(KIVI):
    """KIVI in 2 bits, as in the paper."""

    summary: ClassVar[str] = "2-bit integers: keys in groups per channel, values per entry, recent entries exact"
    bits: ClassVar[int] = 2
