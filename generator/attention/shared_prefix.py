"""Decoding attention: prompt entries are stored once per cache, and every stream has a suffix of its own.

A stream attends to its suffix and, apart from it, to its cache's prompt entries: the queries of all streams of a cache
are multiplied with these at once. The two results are then joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from generator.attention.fused import FusedAttention, are_fused
from generator.attention.parts import attend_part, attend_prompt, join_parts

TILE = 64  # streams whose queries are multiplied with a prompt's keys at once, at most

_Suffixes = tuple[Tensor, ...]  # keys and values of one layer


@dataclass(frozen=True)
class PrefixLayer:
    """One layer of one cache: its prompt keys and values, [KV heads, m, size] each."""

    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class _Tile:
    """Streams of one cache: packed rows ``first .. last - 1``; copies of the first one fill up the last ones."""

    cache: int
    first: int
    last: int


class SharedPrefix:
    """``LayerAttention`` of one new token per open stream.

    Of n open streams, stream i lies in slot ``slots[i]``, a number below n. A stream stays in its slot unless that is n
    or above; only streams that move or fork are copied. The model computes ``rows`` rows: the n slots, and as many more
    as make a multiple of ``row_multiple``.

    Args:
        caches: Per cache, its layers.
        streams: How many streams can be open at once.
        horizon: How many tokens a stream can have.
        row_multiple: What the number of rows is a multiple of.
        group: Query heads of a KV head.
        share_reads: Whether streams of one cache read its prompt entries together.
        fused: As ``Savings.fused``.
    """

    def __init__(
        self, caches: Sequence[Sequence[PrefixLayer]], streams: int, horizon: int, row_multiple: int, group: int, *,
        share_reads: bool = True, fused: bool | None = None,
    ) -> None:  # fmt: skip
        self._caches, self._row_multiple, self._share_reads = caches, row_multiple, share_reads
        self._devices = {layer.key.device for layer in caches[0]}  # a device map spreads layers over several
        self._length = 0
        none = torch.empty(0, dtype=torch.int64)
        self.slots = none  # int64 [streams], on the CPU as all bookkeeping is
        self.stream_cache = none  # the cache of each stream, [streams]
        # Of each layer keys and values [streams, KV heads, H, size].
        self._suffix: list[_Suffixes] = [
            tuple(part.new_empty((streams, part.shape[0], horizon, part.shape[2])) for part in (layer.key, layer.value))
            for layer in caches[0]
        ]
        self._fused: FusedAttention | None = None
        if are_fused(self._devices, fused):
            layers = [
                ([layer.key for layer in part], [layer.value for layer in part]) for part in zip(*caches, strict=True)
            ]
            self._fused = FusedAttention(layers, group)
        self._parked: list[list[_Suffixes]] = []  # per call and layer, [streams, KV heads, length, size]
        self._parked_cache = none
        self._tiles: list[_Tile] = []
        self._packed = self._unpacked = self._everywhere(none)  # slot of each packed row; one packed row of each slot

    @property
    def rows(self) -> int:
        """Rows that the model computes."""
        return _rounded(len(self.slots), self._row_multiple)

    def open(self, caches: Sequence[int]) -> None:
        """Start one stream at the end of the prompt for each of ``caches``, which ascend."""
        self.rewind()
        self.stream_cache = torch.tensor(caches)
        self.slots = torch.arange(len(caches))
        self._pack()

    def select(self, rows: Tensor) -> None:
        """Replace the open streams: new stream i continues open stream ``rows[i]``; parked ones are counted after them.

        Args:
            rows: int64 [streams], on the CPU, grouped by cache in ascending order.
        """
        streams, count = len(self.slots), len(rows)
        if torch.equal(rows, torch.arange(streams)):
            return
        self.stream_cache = torch.cat([self.stream_cache, self._parked_cache])[rows]
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
        """Keep a copy of the suffixes of open streams ``rows``, at their present length."""
        length, slots = self._length, self._everywhere(self.slots[rows])
        self._parked.append([
            tuple(part[slots[part.device], :, :length] for part in layer) for layer in self._suffix
        ])  # fmt: skip
        self._parked_cache = torch.cat([self._parked_cache, self.stream_cache[rows]])

    def rewind(self) -> None:
        """Close all streams and go back to the end of the prompt."""
        self._length = 0
        if self._fused is not None:
            self._fused.rewind()
        self.stream_cache, self.slots = self.stream_cache[:0], self.slots[:0]

    def next_position(self) -> None:
        """Make room for the token about to be fed."""
        self._length += 1
        if self._fused is not None:
            self._fused.next_position()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend from one new token per row, T = 1, whose keys and values join the suffixes of the slots."""
        if self._fused is not None:
            return self._fused.attend(layer, query, key, value, self._suffix[layer], scaling)
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
        """Gather the streams of each cache in tiles, and fill these up to a multiple of rows."""
        if self._fused is not None:
            self._fused.pack(self.stream_cache, self.slots, self.rows)
            return
        self._tiles = []
        packed, unpacked = [], torch.empty_like(self.slots)
        caches, counts = torch.unique_consecutive(self.stream_cache, return_counts=True)
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
        """Copy suffixes of open or parked streams, up to the present length, into slots ``target``."""
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
        """Copy an index to every device that layers lie on."""
        return {device: index.to(device) for device in self._devices}


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
