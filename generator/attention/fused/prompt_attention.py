"""Attention of all open streams to their caches' prompt entries, in chunks: one operation, one launch on CUDA.

The queries of all streams of a cache are multiplied with its entries together, tile by tile. Tiles and chunks have
fixed sizes, so a stream's result does not depend on the streams beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvdrift.generator.attention.fused.tables import cache_table, tables, tile_queries
from kvdrift.generator.attention.parts import CHUNK, PartialAttention, attend_prompt
from kvdrift.schema.errors import tried_once


def plain_prompt_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], caches: Tensor, packed: Tensor, tiles: Tensor,
    partials: int, scaling: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend from one new token of each stream to every chunk of its cache.

    Args:
        query: Rotated queries of all slots, [rows, heads, size]; those of one KV head lie beside each other.
        keys: For each cache the keys, [KV heads, m, size]; m may differ.
        values: For each cache the values, of the same shapes.
        caches: ``cache_table`` of both.
        packed: The slot of each stream, grouped by cache, then zeros, int64 [rows].
        tiles: As ``tables`` makes them.
        partials: The number of partial results.
        scaling: The factor of products of queries and keys.

    Returns:
        For each stream and chunk the output, in the queries' dtype, [partials, heads, size], and the logarithm of the
        sum of exponentials, float32 [partials, heads]. Chunks that a cache does not have here are left as they are.
    """
    del caches  # which this form finds in the tensors themselves
    (_, heads, size), kv_heads = query.shape, keys[0].shape[0]
    group, queries = heads // kv_heads, tile_queries(query.dtype)
    output = query.new_zeros((partials, heads, size))
    mass = query.new_zeros((partials, heads), dtype=torch.float32)
    grouped_output, grouped_mass = output.view(-1, kv_heads, group, size), mass.view(-1, kv_heads, group)
    for number, chunk, first_row, streams, element, partial in tiles.tolist():
        entries = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        key, value = keys[number][:, entries], values[number][:, entries]
        if not key.shape[1]:  # another layer of this cache has more, or no cache has it
            continue
        stream, member = _elements(element, min(element + queries, streams * group), group)
        own = query.view(-1, kv_heads, group, size)[packed[first_row + stream], :, member]  # [elements, KV heads, size]
        tile = query.new_zeros((kv_heads, queries, size))
        tile[:, : len(own)] = own.transpose(0, 1)
        found, sums = attend_prompt(tile, key, value, scaling)
        grouped_output[partial + stream, :, member] = found[:, : len(own)].transpose(0, 1).to(query.dtype)
        grouped_mass[partial + stream, :, member] = sums[:, : len(own)].t()
    return output, mass


def _elements(first: int, last: int, group: int) -> tuple[Tensor, Tensor]:
    """Return the stream of a cache, and the query within its group, of elements ``first .. last - 1``."""
    element = torch.arange(first, last)
    return element // group, element % group


prompt_attention = torch.library.custom_op("kvdrift::prompt_attention", plain_prompt_attention, mutates_args=())


@prompt_attention.register_kernel("cuda")
def _on_cuda(*arguments: Any) -> PartialAttention:
    from kvdrift.generator.attention.fused.prompt_kernel import launch  # noqa: PLC0415 - Triton comes with CUDA only

    return launch(*arguments)


@tried_once
def fault(device: torch.device) -> str | None:
    """Return why the kernel cannot be used on a device; None if it can. It is tried once, on two small caches.

    Triton builds a kernel at its first use, which needs a C compiler on this machine.
    """
    query, *caches = (
        torch.linspace(-1, 1, streams * 2 * 16).sin().view(streams, 2, 16).to(device) for streams in (3, 70, 40)
    )
    caches = [part.transpose(0, 1).contiguous() for part in caches]
    packed, tiles, _, partials = tables(
        torch.tensor([0, 0, 1]), torch.tensor([2, 0, 1]), 3, torch.tensor([1, 1]), 1, tile_queries(query.dtype)
    )
    found, wanted = (
        attend(query, caches, caches, cache_table(caches, caches), packed.to(device), tiles.to(device), partials, 0.25)
        for attend in (_on_cuda, plain_prompt_attention)
    )
    # Of three streams, each with one chunk.
    near = all(torch.allclose(one[:3], other[:3], atol=1e-5) for one, other in zip(found, wanted, strict=True))
    return None if near else "the kernel's results are wrong"
