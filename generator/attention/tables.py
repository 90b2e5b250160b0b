"""Tables of integers for the two operations of a decoding step: addresses of caches, tiles, and places of slots.

All tables are int64. The table of caches is made once. Tiles and places change with the open streams, and are equal in
all layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvdrift.generator.attention.parts import CHUNK

CACHE_COLUMNS = 3  # addresses of a KV head's keys and of its values, and how many entries it has
TILE_COLUMNS = 6  # cache, chunk, first packed row and streams of the cache, first element, first partial result
PLACE_COLUMNS = 3  # cache or -1, first partial result, and how far the next chunk's is
# The fewest rows of a step. An H200 multiplies 32 rows with bfloat16 weights [4096, 14336] in 42 us, and 16 in 325 us.
FEWEST_ROWS = 32
_STEPS = 8  # numbers of rows between a power of two and the next
_WIDE = 256  # the largest heads of which 128 queries fit the registers
_BUCKET = 8  # numbers of tiles and of partial results are multiples of this


def tile_queries(dtype: torch.dtype, size: int) -> int:
    """Return the number of queries of a tile for heads of a size; it does not depend on the number of streams."""
    if dtype == torch.float32:
        return 32
    return 128 if size <= _WIDE else 64


def cache_table(
    keys: Sequence[Tensor], values: Sequence[Tensor], lengths: Sequence[Sequence[int] | None] = ()
) -> Tensor:
    """Return the table of one layer's caches, [caches, KV heads, CACHE_COLUMNS], on their device.

    Keys and values are [KV heads, m, size] for each cache; a KV head's entries lie one after the other. ``lengths`` has
    for each cache the entries of its KV heads; None, the default for all caches, if they are m.
    """
    rows = [
        [
            [_address(head_key), _address(head_value), entries]
            for head_key, head_value, entries in zip(key, value, counts or [key.shape[1]] * len(key), strict=True)
        ]
        for key, value, counts in zip(keys, values, lengths or [None] * len(keys), strict=True)
    ]
    return torch.tensor(rows).to(keys[0].device)


def tables(
    stream_cache: Tensor, slots: Tensor, rows: int, chunks: Tensor, group: int, queries: int
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Divide the queries of all streams into tiles.

    Every table has one of few lengths, so that most changes of streams change no shape. Tiles that only fill up a
    table name a chunk that no cache has. Partial results beyond the needed number are not written.

    Args:
        stream_cache: The cache of each stream, ascending, int64 [streams].
        slots: The slot of each stream, int64 [streams].
        rows: The number of rows that the model computes.
        chunks: The number of chunks of each cache in its longest layer, int64 [caches].
        group: The number of queries that a stream has for each KV head.
        queries: The number of queries of a tile.

    Returns:
        The slot of each packed row, then zeros, [rows]; tiles [tiles, TILE_COLUMNS]; places [rows, PLACE_COLUMNS]; and
            the number of partial results.
    """
    caches, counts = torch.unique_consecutive(stream_cache, return_counts=True)
    first_row = counts.cumsum(0) - counts
    cache_chunks = chunks[caches]
    results = counts * cache_chunks
    first_result = results.cumsum(0) - results

    parts = -(-counts * group // queries)  # of each chunk
    of_cache = torch.arange(len(caches)).repeat_interleave(cache_chunks * parts)
    number = torch.arange(len(of_cache)) - (cache_chunks * parts).cumsum(0).sub_(cache_chunks * parts)[of_cache]
    chunk, part = number // parts[of_cache], number % parts[of_cache]
    count = counts[of_cache]
    tiles = torch.stack(
        [caches[of_cache], chunk, first_row[of_cache], count, part * queries, first_result[of_cache] + chunk * count], 1
    )  # fmt: skip

    places = torch.full((rows, PLACE_COLUMNS), -1)
    cache = torch.arange(len(caches)).repeat_interleave(counts)
    place = torch.arange(len(slots)) - first_row[cache]
    places[slots] = torch.stack([stream_cache, first_result[cache] + place, counts[cache]], 1)
    packed = torch.zeros(rows, dtype=torch.int64)
    packed[: len(slots)] = slots
    beyond = torch.zeros(few_rows(len(tiles), _BUCKET) - len(tiles), TILE_COLUMNS, dtype=torch.int64)
    beyond[:, 1] = chunks.max()
    return packed, torch.cat([tiles, beyond]), places, few_rows(int(results.sum()), _BUCKET)


def few_rows(streams: int, multiple: int) -> int:
    """Return a number of rows, a multiple of ``multiple``, that suffices for ``streams`` streams.

    A GPU's libraries choose their kernels by the number of rows, so the result is one of few numbers. For few
    streams it is the next multiple, for many at most an eighth above ``streams``; between a number and its double there
    are only eight.
    """
    step = multiple
    while streams > 2 * _STEPS * step:
        step *= 2
    return -(-streams // step) * step


def chunks_of(entries: Tensor) -> Tensor:
    """Return the number of chunks for each number of entries, int64 of any shape."""
    return -(-entries // CHUNK)


def _address(tensor: Tensor) -> int:
    return 0 if tensor.is_meta else tensor.data_ptr()
