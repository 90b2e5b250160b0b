"""KIVI: keys in groups of entries for each channel, values in groups of channels for each entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvdrift.generator.attention.holding import StoredBytes
from kvdrift.generator.codecs.affine import GROUP_BYTES, channels_back, entries_back, packed_bytes
from kvdrift.generator.codecs.codec import GroupedCodec, Part, beside_exact


@dataclass(frozen=True)
class KIVI(GroupedCodec):
    """Keys per channel in groups of consecutive entries, values per entry in groups of channels.

    Keys have channels of large magnitude, so that the scale of a channel fits better than that of an entry; values have
    no such channels. The last ``residual`` entries are exact, and so are the keys before them that do not fill a group.
    """

    paper: ClassVar[str | None] = "Liu et al. 2024, arXiv:2402.02750"
    bits: ClassVar[int]

    @property
    def keys_together(self) -> int:
        """How many consecutive keys are coded together: a group."""
        return self.group

    def round_trip(self, numbers: Tensor, part: Part) -> Tensor:
        """Return the first keys or values as read back from codes, and the last ones unchanged."""
        coded, back = numbers[:, : self._coded(numbers, part)], channels_back if part == "keys" else entries_back
        return beside_exact(back(coded, self.bits, self.group), numbers) if coded.shape[1] else numbers

    def stored_bytes(self, numbers: Tensor, part: Part) -> StoredBytes:
        """Return the bytes of packed integers and exact numbers, and those of scales and zero points."""
        heads, entries, size = numbers.shape
        coded = self._coded(numbers, part)
        exact = heads * (entries - coded) * size * numbers.itemsize
        groups = coded // self.group * size if part == "keys" else coded * -(-size // self.group)
        return StoredBytes(packed_bytes(heads * coded * size, self.bits) + exact, heads * groups * GROUP_BYTES)

    def _coded(self, numbers: Tensor, part: Part) -> int:
        """How many keys or values of a KV head are coded."""
        before = self.before_window(numbers.shape[1])
        return before - before % self.group if part == "keys" else before


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
