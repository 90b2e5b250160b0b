"""A Triton kernel for CUDA: attention of decoding streams to chunks of their caches' prompt entries.

``kvdrift.generator.attention.fused.prompt_attention`` specifies the result, and computes it without the kernel, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvdrift.generator.attention.fused.softmax_kernel import attend_entries
from kvdrift.generator.attention.fused.tables import CACHE_COLUMNS, TILE_COLUMNS, tile_queries
from kvdrift.generator.attention.parts import CHUNK, PartialAttention

_LOG2_E, _LN_2 = 1.4426950408889634, 0.6931471805599453
OPTIONS = {"enable_fp_fusion": True}  # of the compiler


def shape(dtype: torch.dtype, size: int) -> dict[str, int]:
    """Return the sizes of one program, whatever the number of streams: queries, keys, warps and stages."""
    width = max(triton.next_power_of_2(size), 16)
    if dtype == torch.float32:  # products without tensor cores, from registers
        return {"QUERIES": tile_queries(dtype), "KEYS": 32, "WIDTH": width, "num_warps": 8, "num_stages": 2}
    keys = 64 if width <= 128 else 32
    return {"QUERIES": tile_queries(dtype), "KEYS": keys, "WIDTH": width, "num_warps": 8, "num_stages": 3}


def constants(heads: int, kv_heads: int, size: int) -> dict[str, int | float]:
    """Return the constants for which the kernel is compiled."""
    return {
        "GROUP": heads // kv_heads, "HEADS": heads, "SIZE": size, "CHUNK": CHUNK, "CACHE_COLUMNS": CACHE_COLUMNS,
        "TILE_COLUMNS": TILE_COLUMNS, "LN_2": _LN_2,
    }  # fmt: skip


def launch(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], caches: Tensor, packed: Tensor, tiles: Tensor,
    partials: int, scaling: float,
) -> PartialAttention:  # fmt: skip
    """Launch the kernel; arguments and results are those of ``prompt_attention``."""
    del values  # whose addresses are in the table, as those of the keys are
    (_, heads, size), kv_heads = query.shape, keys[0].shape[0]
    output = torch.empty((partials, heads, size), dtype=query.dtype, device=query.device)
    mass = torch.empty((partials, heads), dtype=torch.float32, device=query.device)
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call] # Triton launches on the current device
        _attend_chunk[len(tiles), kv_heads](
            query, caches, packed, tiles, output, mass, query.stride(0), query.stride(1), scaling * _LOG2_E,
            **constants(heads, kv_heads, size), **shape(query.dtype, size), **OPTIONS,
        )  # fmt: skip
    return output, mass


# Triton's front end evaluates annotations, and knows no others than its own.
@triton.jit  # type: ignore[untyped-decorator]
def _attend_chunk(  # type: ignore[no-untyped-def]
    query, caches, packed, tiles, output, mass, query_row, query_head, scale, GROUP: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, CACHE_COLUMNS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, LN_2: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute one tile of queries of one cache, one KV head and one chunk of entries; scores are to base 2."""
    kv_head = tl.program_id(1)
    tiles += tl.program_id(0) * TILE_COLUMNS
    caches += tl.load(tiles) * CACHE_COLUMNS
    first = tl.load(tiles + 1) * CHUNK
    entries = tl.load(caches + 2)
    if first >= entries:  # another layer of this cache has more, or no cache has it
        return
    count = tl.minimum(entries - first, CHUNK).to(tl.int32)
    number = query.dtype.element_ty
    key = tl.load(caches).to(tl.pointer_type(number)) + kv_head * tl.load(caches + 3) + first * SIZE
    value = tl.load(caches + 1).to(tl.pointer_type(number)) + kv_head * tl.load(caches + 4) + first * SIZE

    # Queries of a KV head's group lie beside each other, stream by stream.
    element = tl.load(tiles + 4).to(tl.int32) + tl.arange(0, QUERIES)
    stream, head = element // GROUP, kv_head * GROUP + element % GROUP
    real = stream < tl.load(tiles + 3).to(tl.int32)
    slot = tl.load(packed + tl.load(tiles + 2) + stream, mask=real, other=0)
    place = tl.arange(0, WIDTH)
    inside = place < SIZE
    q = tl.load(
        query + (slot * query_row + head * query_head)[:, None] + place[None, :],
        mask=real[:, None] & inside[None, :],
        other=0.0,
    )

    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(0, count, KEYS):
        entry = start + tl.arange(0, KEYS)
        present = entry < count
        top, total, sums = attend_entries(q, key, value, entry, present, place, inside, top, total, sums, scale, SIZE)

    partial = (tl.load(tiles + 5) + stream) * HEADS + head
    tl.store(
        output + partial[:, None] * SIZE + place[None, :],
        (sums / total[:, None]).to(number),
        mask=real[:, None] & inside[None, :],
    )
    tl.store(mass + partial, (top + tl.log2(total)) * LN_2, mask=real)
