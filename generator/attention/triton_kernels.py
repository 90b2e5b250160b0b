"""Triton kernels for CUDA: attention of decoding streams to chunks of their caches, and to their suffixes.

``kvdrift.generator.attention.fused`` specifies the results, and computes them without the kernels, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvdrift.generator.attention.parts import CHUNK, PartialAttention
from kvdrift.generator.attention.tables import CACHE_COLUMNS, PLACE_COLUMNS, TILE_COLUMNS, tile_queries


# Triton's front end evaluates annotations, and knows no others than its own.
@triton.jit  # type: ignore[untyped-decorator]
def capped(scores, cap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Apply a layer's soft cap to scores; ``score_terms`` describes the numbers."""
    if CAPPED:
        scores = cap - 2.0 * cap / (1.0 + tl.exp2(scores))
    return scores


@triton.jit  # type: ignore[untyped-decorator]
def attend_entries(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    entry,
    present,
    place,
    inside,
    top,
    total,
    sums,
    scale,
    cap,
    SIZE: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Attend to more entries, and return ``top``, ``total`` and ``sums`` with these entries added.

    ``top`` is the largest score so far. An entry's weight is 2 to the power of its score less ``top``; ``total`` is the
    sum of weights, ``sums`` the sum of weighted values. Entries that are not ``present``, and places of a head vector
    that are not ``inside``, do not count. At least one entry is present, unless ``top`` is finite.
    """
    where = entry[:, None] * SIZE + place[None, :]
    read = present[:, None] & inside[None, :]
    # Heads and entries begin at multiples of 16 bytes, which Triton cannot see.
    k = tl.load(tl.multiple_of(key + where, [1, 16]), mask=read, other=0.0)
    scores = capped(tl.dot(query, tl.trans(k), input_precision="ieee") * scale, cap, CAPPED)
    scores = tl.where(present[None, :], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(top - higher)
    v = tl.load(tl.multiple_of(value + where, [1, 16]), mask=read, other=0.0)
    sums = tl.dot(weights.to(query.dtype), v, sums * shrink[:, None], input_precision="ieee")
    return higher, total * shrink + tl.sum(weights, 1), sums


_LOG2_E, _LN_2 = 1.4426950408889634, 0.6931471805599453
OPTIONS = {"enable_fp_fusion": True}  # of the compiler


def score_terms(scaling: float, softcap: float | None) -> tuple[float, float]:
    """Return the factor of products of queries and keys, and the cap, with which kernels compute scores.

    Scores are in units of log 2, since weights are powers of 2. A soft cap c makes a product s into c tanh(s / c); that
    is c - 2 c / (1 + exp(2 s / c)). The factor is then that of the exponent, and the cap is c in units of log 2.
    """
    if softcap is None:
        return scaling * _LOG2_E, 0.0
    return 2.0 * scaling / softcap * _LOG2_E, softcap * _LOG2_E


def prompt_shape(dtype: torch.dtype, size: int, shared_bytes: int) -> dict[str, int]:
    """Return the sizes with which ``_attend_chunk`` is launched, for any number of streams, keyed by argument name.

    A program holds its queries, and in each stage some keys and values, in ``shared_bytes`` of memory.
    """
    width, queries = max(triton.next_power_of_2(size), 16), tile_queries(dtype, size)
    if dtype == torch.float32:  # products without tensor cores
        choices = [(32, 2), (32, 1), (16, 1)] if width <= 256 else [(16, 2), (16, 1)]
    else:
        choices = [(64 if width <= 128 else 32, 3 if width <= 256 else 2), (32, 2), (32, 1), (16, 1)]
    entry = width * dtype.itemsize
    fitting = (choice for choice in choices if (queries + 2 * choice[0] * choice[1]) * entry <= shared_bytes)
    keys, stages = next(fitting, choices[-1])
    return {"QUERIES": queries, "KEYS": keys, "WIDTH": width, "num_warps": 8, "num_stages": stages}


@cache
def _shared_bytes(device: torch.device) -> int:
    """Return the shared memory that a program can have on a GPU; for other devices, as in tests, that of an H100."""
    if device.type != "cuda":
        return 227 * 1024
    properties: dict[str, int] = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return properties["max_shared_mem"]


def prompt_constants(
    heads: int, kv_heads: int, size: int, window: int | None = None, softcap: float | None = None
) -> dict[str, int | float]:
    """Return the constants for which ``_attend_chunk`` is compiled; ``WINDOW`` is 0 without a window."""
    return {
        "GROUP": heads // kv_heads, "HEADS": heads, "SIZE": size, "CHUNK": CHUNK, "CACHE_COLUMNS": CACHE_COLUMNS,
        "TILE_COLUMNS": TILE_COLUMNS, "LN_2": _LN_2, "WINDOW": window or 0, "CAPPED": softcap is not None,
    }  # fmt: skip


def launch_prompt_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], caches: Tensor, packed: Tensor, tiles: Tensor,
    partials: int, scaling: float, length: Tensor, window: int | None = None, softcap: float | None = None,
) -> PartialAttention:  # fmt: skip
    """Launch the kernel; arguments and results are those of ``prompt_attention``."""
    del values  # the table has their addresses and those of the keys
    (_, heads, size), kv_heads = query.shape, keys[0].shape[0]
    output = torch.empty((partials, heads, size), dtype=query.dtype, device=query.device)
    mass = torch.empty((partials, heads), dtype=torch.float32, device=query.device)
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call] # Triton launches on the current device
        _attend_chunk[len(tiles), kv_heads](
            query, caches, packed, tiles, length, output, mass, query.stride(0), query.stride(1),
            *score_terms(scaling, softcap), **prompt_constants(heads, kv_heads, size, window, softcap),
            **prompt_shape(query.dtype, size, _shared_bytes(query.device)), **OPTIONS,
        )  # fmt: skip
    return output, mass


# Triton's front end evaluates annotations, and knows no others than its own.
@triton.jit  # type: ignore[untyped-decorator]
def _attend_chunk(  # type: ignore[no-untyped-def]
    query, caches, packed, tiles, length, output, mass, query_row, query_head, scale, cap, GROUP: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, CACHE_COLUMNS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, LN_2: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Attend from one tile of a cache's queries, in one KV head, to one chunk of entries; weights are powers of 2."""
    kv_head = tl.program_id(1)
    tiles += tl.program_id(0) * TILE_COLUMNS
    caches += (tl.load(tiles) * (HEADS // GROUP) + kv_head) * CACHE_COLUMNS
    first = tl.load(tiles + 1) * CHUNK
    entries = tl.load(caches + 2)
    if first >= entries:  # only other heads or layers of this cache have this chunk, or no cache has it
        return
    count = tl.minimum(entries - first, CHUNK).to(tl.int32)
    number = query.dtype.element_ty
    key = tl.load(caches).to(tl.pointer_type(number)) + first * SIZE
    value = tl.load(caches + 1).to(tl.pointer_type(number)) + first * SIZE

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

    partial = (tl.load(tiles + 5) + stream) * HEADS + head
    seen = 0  # the first entry of the chunk that a query sees
    if WINDOW:
        seen = tl.maximum(entries + tl.load(length) - WINDOW - first, 0).to(tl.int32)
        if seen >= count:  # the window has moved past the chunk
            tl.store(
                output + partial[:, None] * SIZE + place[None, :],
                tl.zeros([QUERIES, WIDTH], number),
                mask=real[:, None] & inside[None, :],
            )
            tl.store(mass + partial, tl.full([QUERIES], float("-inf"), tl.float32), mask=real)
            return
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(seen // KEYS * KEYS, count, KEYS):
        entry = start + tl.arange(0, KEYS)
        present = (entry >= seen) & (entry < count)
        top, total, sums = attend_entries(
            q, key, value, entry, present, place, inside, top, total, sums, scale, cap, SIZE, CAPPED
        )

    tl.store(
        output + partial[:, None] * SIZE + place[None, :],
        (sums / total[:, None]).to(number),
        mask=real[:, None] & inside[None, :],
    )
    tl.store(mass + partial, (top + tl.log2(total)) * LN_2, mask=real)


def suffix_shape(dtype: torch.dtype, group: int, size: int) -> dict[str, int]:
    """Return the sizes with which ``_attend_suffix`` is launched, for any number of streams, keyed by argument name."""
    width = max(triton.next_power_of_2(size), 16)
    keys = 64 if dtype != torch.float32 and width <= 128 else 32 if width <= 256 else 16
    queries = max(triton.next_power_of_2(group), 16)
    return {
        "QUERIES": queries,
        "KEYS": keys,
        "WIDTH": width,
        "num_warps": 8 if dtype == torch.float32 else 4,
        "num_stages": 2,
    }


def suffix_constants(
    heads: int,
    kv_heads: int,
    size: int,
    window: int | None = None,
    softcap: float | None = None,
    *,
    sinks: bool = False,
) -> dict[str, int | float]:
    """Return the constants for which ``_attend_suffix`` is compiled; ``WINDOW`` is 0 without a window."""
    return {
        "GROUP": heads // kv_heads, "HEADS": heads, "SIZE": size, "CHUNK": CHUNK, "CACHE_COLUMNS": CACHE_COLUMNS,
        "PLACE_COLUMNS": PLACE_COLUMNS, "LOG2_E": _LOG2_E, "WINDOW": window or 0, "CAPPED": softcap is not None,
        "SINKS": sinks,
    }  # fmt: skip


def launch_suffix_attention(
    query: Tensor, key: Tensor, value: Tensor, suffix_key: Tensor, suffix_value: Tensor, length: Tensor,
    chunk_output: Tensor, chunk_mass: Tensor, places: Tensor, caches: Tensor, scaling: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Launch the kernel; arguments and result are those of ``suffix_attention``."""
    rows, heads, size = query.shape
    kv_heads = key.shape[1]
    result = torch.empty((rows, heads, size), dtype=query.dtype, device=query.device)
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call] # Triton launches on the current device
        _attend_suffix[rows, kv_heads](
            query, key, value, suffix_key, suffix_value, length, chunk_output, chunk_mass, places, caches,
            chunk_mass if sinks is None else sinks, result,
            *(stride for part in (query, key, value, suffix_key) for stride in part.stride()[:2]),
            *score_terms(scaling, softcap),
            **suffix_constants(heads, kv_heads, size, window, softcap, sinks=sinks is not None),
            **suffix_shape(query.dtype, heads // kv_heads, size), **OPTIONS,
        )  # fmt: skip
    return result


# Triton's front end evaluates annotations, and knows no others than its own.
@triton.jit  # type: ignore[untyped-decorator]
def _attend_suffix(  # type: ignore[no-untyped-def]
    query, key, value, suffix_key, suffix_value, length, chunk_output, chunk_mass, places, caches, sinks, result,
    query_row, query_head, key_row, key_head, value_row, value_head, suffix_row, suffix_head, scale, cap,
    GROUP: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, CACHE_COLUMNS: tl.constexpr,
    PLACE_COLUMNS: tl.constexpr, LOG2_E: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Attend in one slot and KV head to the suffix, and join the result with the chunks'; weights are powers of 2."""
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
    top = capped(tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale, cap, CAPPED)
    total = tl.full([QUERIES], 1.0, tl.float32)
    sums = tl.zeros([QUERIES, WIDTH], tl.float32) + new_value.to(tl.float32)[None, :]
    seen = tl.maximum(before + 1 - WINDOW, 0) if WINDOW else 0
    for start in range(seen // KEYS * KEYS, before, KEYS):
        entry = start + tl.arange(0, KEYS)
        present = (entry >= seen) & (entry < before)
        top, total, sums = attend_entries(
            q, suffix_key, suffix_value, entry, present, place, inside, top, total, sums, scale, cap, SIZE, CAPPED
        )

    entries = tl.load(caches + (cache * (HEADS // GROUP) + kv_head) * CACHE_COLUMNS + 2)
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
    if SINKS:  # one more key, whose value is 0
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2_E
        higher = tl.maximum(top, sink)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.exp2(sink - higher)
        sums = sums * shrink[:, None]
    tl.store(target, (sums / total[:, None]).to(number), mask=some)
