"""A Triton kernel for CUDA: attention of decoding streams to their suffixes, joined with attention to their prompts.

``kvdrift.generator.attention.fused.suffix_attention`` specifies the result, and computes it without the kernel, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvdrift.generator.attention.fused.softmax_kernel import attend_entries
from kvdrift.generator.attention.fused.tables import CACHE_COLUMNS, PLACE_COLUMNS
from kvdrift.generator.attention.parts import CHUNK

_LOG2_E = 1.4426950408889634
OPTIONS = {"enable_fp_fusion": True}  # of the compiler


def shape(dtype: torch.dtype, group: int, size: int) -> dict[str, int]:
    """Return the sizes of one program, whatever the number of streams: queries, keys, warps and stages."""
    width = max(triton.next_power_of_2(size), 16)
    keys = 32 if dtype == torch.float32 or width > 128 else 64
    queries = max(triton.next_power_of_2(group), 16)
    return {
        "QUERIES": queries,
        "KEYS": keys,
        "WIDTH": width,
        "num_warps": 8 if dtype == torch.float32 else 4,
        "num_stages": 2,
    }


def constants(heads: int, kv_heads: int, size: int) -> dict[str, int | float]:
    """Return the constants for which the kernel is compiled."""
    return {
        "GROUP": heads // kv_heads, "HEADS": heads, "SIZE": size, "CHUNK": CHUNK, "CACHE_COLUMNS": CACHE_COLUMNS,
        "PLACE_COLUMNS": PLACE_COLUMNS, "LOG2_E": _LOG2_E,
    }  # fmt: skip


def launch(
    query: Tensor, key: Tensor, value: Tensor, suffix_key: Tensor, suffix_value: Tensor, length: Tensor,
    chunk_output: Tensor, chunk_mass: Tensor, places: Tensor, caches: Tensor, scaling: float,
) -> Tensor:  # fmt: skip
    """Launch the kernel; arguments and result are those of ``suffix_attention``."""
    rows, heads, size = query.shape
    kv_heads = key.shape[1]
    result = torch.empty((rows, heads, size), dtype=query.dtype, device=query.device)
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call] # Triton launches on the current device
        _attend_suffix[rows, kv_heads](
            query, key, value, suffix_key, suffix_value, length, chunk_output, chunk_mass, places, caches, result,
            *(stride for part in (query, key, value, suffix_key) for stride in part.stride()[:2]), scaling * _LOG2_E,
            **constants(heads, kv_heads, size), **shape(query.dtype, heads // kv_heads, size), **OPTIONS,
        )  # fmt: skip
    return result


# Triton's front end evaluates annotations, and knows no others than its own.
@triton.jit  # type: ignore[untyped-decorator]
def _attend_suffix(  # type: ignore[no-untyped-def]
    query, key, value, suffix_key, suffix_value, length, chunk_output, chunk_mass, places, caches, result,
    query_row, query_head, key_row, key_head, value_row, value_head, suffix_row, suffix_head, scale,
    GROUP: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, CACHE_COLUMNS: tl.constexpr,
    PLACE_COLUMNS: tl.constexpr, LOG2_E: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute one slot and KV head: the new entry, earlier entries, then the chunks; scores are to base 2."""
    slot, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number = query.dtype.element_ty
    member, place = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    head, real, inside = kv_head * GROUP + member, member < GROUP, place < SIZE
    some = real[:, None] & inside[None, :]
    target = result + (slot * HEADS + head)[:, None] * SIZE + place[None, :]
    places += slot * PLACE_COLUMNS
    cache = tl.load(places)
    if cache < 0:  # no stream lies here
        tl.store(target, tl.zeros([QUERIES, WIDTH], number), mask=some)
        return

    before = (tl.load(length) - 1).to(tl.int32)
    suffix_key += slot * suffix_row + kv_head * suffix_head
    suffix_value += slot * suffix_row + kv_head * suffix_head
    new_key = tl.load(key + slot * key_row + kv_head * key_head + place, mask=inside, other=0.0)
    new_value = tl.load(value + slot * value_row + kv_head * value_head + place, mask=inside, other=0.0)
    tl.store(suffix_key + before * SIZE + place, new_key, mask=inside)
    tl.store(suffix_value + before * SIZE + place, new_value, mask=inside)

    q = tl.load(query + slot * query_row + head[:, None] * query_head + place[None, :], mask=some, other=0.0)
    top = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
    total = tl.full([QUERIES], 1.0, tl.float32)
    sums = tl.zeros([QUERIES, WIDTH], tl.float32) + new_value.to(tl.float32)[None, :]
    for start in range(0, before, KEYS):
        entry = start + tl.arange(0, KEYS)
        present = entry < before
        top, total, sums = attend_entries(
            q, suffix_key, suffix_value, entry, present, place, inside, top, total, sums, scale, SIZE
        )

    entries = tl.load(caches + cache * CACHE_COLUMNS + 2)
    partial, next_chunk = tl.load(places + 1), tl.load(places + 2)
    for _ in range(tl.cdiv(entries, CHUNK).to(tl.int32)):
        at = partial * HEADS + head
        mass = tl.load(chunk_mass + at, mask=real, other=0.0) * LOG2_E
        output = tl.load(chunk_output + at[:, None] * SIZE + place[None, :], mask=some, other=0.0)
        higher = tl.maximum(top, mass)
        shrink, weight = tl.exp2(top - higher), tl.exp2(mass - higher)
        total = total * shrink + weight
        sums = sums * shrink[:, None] + weight[:, None] * output.to(tl.float32)
        top = higher
        partial += next_chunk
    tl.store(target, (sums / total[:, None]).to(number), mask=some)
