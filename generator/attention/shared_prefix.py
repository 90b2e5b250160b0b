"""Decoding attention: prompt entries stored once per cache, one suffix per stream.

Every layer attends in two parts: a stream's own suffix, and its cache's prompt entries, which all streams of the cache
meet in one matrix product; ``generator.attention.parts`` joins them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from generator.attention.attention import PrefixLayer
from generator.attention.parts import attend_part, attend_prompt, join_parts

TILE = 64  # streams that meet a prompt at once, at most

_Suffixes = tuple[Tensor, ...]  # keys and values of one layer


@dataclass(frozen=True)
class _Tile:
    """Streams of one cache: packed rows ``first .. last - 1``, the last ones repeating the first to fill them up."""

    cache: int
    first: int
    last: int


class SharedPrefix:
    """``LayerAttention`` of one new token per open stream.

    At most ``streams`` are open at once. Stream i lies in slot ``slots[i]``, an open stream keeps its slot as long as
    there is one with that number, and only streams that must move or fork are copied. The slots are 0 .. n - 1 of n
    open streams; the model computes ``rows`` rows, the slots and then as many more as make a multiple of
    ``row_multiple``.
    """

    def __init__(
        self,
        caches: Sequence[Sequence[PrefixLayer]],
        streams: int,
        horizon: int,
        row_multiple: int,
        *,
        share_reads: bool = True,
    ) -> None:
        self._caches = caches
        self._row_multiple = row_multiple
        self._share_reads = share_reads
        self._devices = {layer.key.device for layer in caches[0]}  # a device map spreads layers over several
        self._length = 0
        none = torch.empty(0, dtype=torch.int64)
        self.slots = none  # int64 [streams], on the CPU as all bookkeeping is
        self._stream_cache = none  # [streams]
        # Of each layer keys and values [streams, KV heads, H, size].
        self._suffix: list[_Suffixes] = [
            tuple(part.new_empty((streams, part.shape[0], horizon, part.shape[2])) for part in (layer.key, layer.value))
            for layer in caches[0]
        ]
        self._parked: list[list[_Suffixes]] = []  # per call and layer, [streams, KV heads, length, size]
        self._parked_cache = none
        self._tiles: list[_Tile] = []
        self._packed = self._unpacked = self._everywhere(none)  # slot of each packed row; one packed row of each slot

    @property
    def rows(self) -> int:
        """Rows that the model computes."""
        return _rounded(len(self.slots), self._row_multiple)

    def open(self, caches: Sequence[int]) -> None:
        """Start one stream per entry, ascending, at the end of the prompt."""
        self.rewind()
        self._stream_cache = torch.tensor(caches)
        self.slots = torch.arange(len(caches))
        self._pack()

    def select(self, rows: Tensor) -> None:
        """See ``StreamKernels.select``."""
        streams, count = len(self.slots), len(rows)
        if torch.equal(rows, torch.arange(streams)):
            return
        self._stream_cache = torch.cat([self._stream_cache, self._parked_cache])[rows]
        # Parked streams count as lying behind the slots.
        source = torch.cat([self.slots, torch.arange(streams, streams + len(self._parked_cache))])[rows]
        entry = torch.arange(count)
        first_entry = torch.full((streams + len(self._parked_cache),), count).scatter_reduce_(0, source, entry, "amin")
        stays = (first_entry[source] == entry) & (source < min(streams, count))
        free = torch.ones(count, dtype=torch.bool)
        free[source[stays]] = False
        self.slots = torch.where(stays, source, 0).masked_scatter_(~stays, free.nonzero())
        self._copy(source[~stays], self.slots[~stays], streams)
        self._pack()

    def park(self, rows: Tensor) -> None:
        """See ``StreamKernels.park``: the suffixes are kept to their present length."""
        length, slots = self._length, self._everywhere(self.slots[rows])
        self._parked.append([
            tuple(part[slots[part.device], :, :length] for part in layer) for layer in self._suffix
        ])  # fmt: skip
        self._parked_cache = torch.cat([self._parked_cache, self._stream_cache[rows]])

    def rewind(self) -> None:
        """Close all streams and go back to the end of the prompt."""
        self._length = 0
        self._stream_cache, self.slots = self._stream_cache[:0], self.slots[:0]

    def next_position(self) -> None:
        """Make room for the token about to be fed."""
        self._length += 1

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attention of one new token per row, T = 1; keys and values of the slots join their suffixes."""
        suffix_key, suffix_value = self._suffix[layer]
        streams, length = len(self.slots), self._length
        suffix_key[:streams, :, length - 1] = key[:streams, :, 0]
        suffix_value[:streams, :, length - 1] = value[:streams, :, 0]
        rows, heads, _, size = query.shape
        kv_heads = key.shape[1]
        group = heads // kv_heads
        grouped = query.reshape(rows, kv_heads, group, size)
        own = attend_part(
            grouped[:streams], suffix_key[:streams, :, :length], suffix_value[:streams, :, :length], scaling
        )

        # [KV heads, packed rows x group, size]
        packed = grouped[self._packed[query.device]].transpose(0, 1).reshape(kv_heads, -1, size)
        outputs, masses = [], []
        for tile in self._tiles:
            prefix = self._caches[tile.cache][layer]
            part = packed[:, tile.first * group : tile.last * group]
            output, mass = attend_prompt(part, prefix.key, prefix.value, scaling)
            outputs.append(output)
            masses.append(mass)
        output, mass, unpacked = torch.cat(outputs, 1), torch.cat(masses, 1), self._unpacked[query.device]
        shared = (
            output.view(kv_heads, -1, group, size).transpose(0, 1)[unpacked],
            mass.view(kv_heads, -1, group).transpose(0, 1)[unpacked],
        )
        result = query.new_zeros((rows, heads, 1, size))
        output, _ = join_parts(own, shared)
        result[:streams] = output.reshape(streams, heads, 1, size)
        return result

    def _pack(self) -> None:
        """Gather the streams of each cache in tiles, filled up to a multiple of rows."""
        self._tiles = []
        packed, unpacked = [], torch.empty_like(self.slots)
        caches, counts = torch.unique_consecutive(self._stream_cache, return_counts=True)
        at_once = TILE if self._share_reads else 1
        first = 0
        for cache, slots in zip(caches.tolist(), torch.split(self.slots, counts.tolist()), strict=True):
            for part in torch.split(slots, at_once):
                last = first + _rounded(len(part), self._row_multiple)
                self._tiles.append(_Tile(cache, first, last))
                packed += [part, part[:1].expand(last - first - len(part))]
                unpacked[part] = torch.arange(first, first + len(part))
                first = last
        self._packed = self._everywhere(torch.cat(packed) if packed else self.slots[:0])
        self._unpacked = self._everywhere(unpacked)

    def _copy(self, source: Tensor, target: Tensor, streams: int) -> None:
        """Copy suffixes into slots ``target``: of open streams in place, of parked ones cut to the present length."""
        first = 0
        for origin in (self._suffix, *self._parked):
            count = streams if origin is self._suffix else len(origin[0][0])
            here = ((source >= first) & (source < first + count)).nonzero().squeeze(-1)
            if len(here):
                rows, slots = self._everywhere(source[here] - first), self._everywhere(target[here])
                for layer, origin_layer in zip(self._suffix, origin, strict=True):
                    for part, origin_part in zip(layer, origin_layer, strict=True):
                        copied = origin_part[rows[part.device], :, : self._length]
                        part[:, :, : self._length].index_copy_(0, slots[part.device], copied)
            first += count

    def _everywhere(self, index: Tensor) -> dict[torch.device, Tensor]:
        """An index on every device that layers lie on."""
        return {device: index.to(device) for device in self._devices}


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
