"""Integer bookkeeping: how many rows are computed at once, and how the streams of each cache are packed into tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvdrift.generator.attention.cpu_products import fits_onednn

TILE = 64  # streams whose queries are multiplied with a prompt's keys at once, at most; by oneDNN, twice as many


@dataclass(frozen=True)
class Tile:
    """Streams of one cache: packed rows ``first .. last - 1``; rows after the first ``streams`` of them are copies."""

    cache: int
    first: int
    last: int
    streams: int

    def rows(self, multiple: int) -> slice:
        """Return the rows of the streams, padded to this multiple; at most all rows of the tile."""
        return slice(self.first, min(self.first + rounded(self.streams, multiple), self.last))


def pack_tiles(
    stream_cache: Tensor, slots: Tensor, at_once: Sequence[int], multiple: int
) -> tuple[list[Tile], dict[str, Tensor]]:
    """Pack the streams of each cache into tiles of at most ``at_once[cache]``, and pad the tiles to a multiple of rows.

    The cache of each stream, ascending, and its slot are int64 [streams]. Returns the tiles, the slot of each packed
    row ("packed"), and a packed row of each slot ("unpacked").
    """
    tiles, rows, unpacked = [], [], torch.empty_like(slots)
    caches, counts = torch.unique_consecutive(stream_cache, return_counts=True)
    first = 0
    for cache, own in zip(caches.tolist(), torch.split(slots, counts.tolist()), strict=True):
        for part in torch.split(own, at_once[cache]):
            last = first + rounded(len(part), multiple)
            tiles.append(Tile(cache, first, last, len(part)))
            rows += [part, part[:1].expand(last - first - len(part))]
            unpacked[part] = torch.arange(first, first + len(part))
            first = last
    return tiles, {"packed": torch.cat(rows) if rows else slots[:0], "unpacked": unpacked}


def tile_of(key: Tensor, multiple: int) -> int:
    """Return how many streams' queries are multiplied with a prompt's keys at once, given a multiple of rows.

    If the multiple is ``TILE``, the number is always the same.
    """
    return 2 * TILE if multiple < TILE and fits_onednn(key) else TILE


def rounded(count: int, multiple: int) -> int:
    """Return ``count`` rounded up to a multiple."""
    return -(-count // multiple) * multiple
