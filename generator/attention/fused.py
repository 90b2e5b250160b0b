"""Decoding attention by two operations, each of which is one launch on CUDA: the prompt's chunks, then suffixes.

The queries of all streams of a cache are multiplied with its entries together, tile by tile. Tiles and chunks have
fixed sizes, so a stream's result does not depend on the streams beside it. Every stream then attends to its suffix,
joined with its prompt's chunks. A layer may have a window, a soft cap and sinks (``parts``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvdrift.generator.attention.parts import (
    CHUNK,
    PLAIN,
    LayerTerms,
    PartialAttention,
    attend_part,
    attend_prompt,
    join_parts,
    with_sinks,
)
from kvdrift.generator.attention.prompt_reads import PrefixLayer
from kvdrift.generator.attention.tables import cache_table, chunks_of, tables, tile_queries
from kvdrift.schema.errors import tried_once


def plain_prompt_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], caches: Tensor, packed: Tensor, tiles: Tensor,
    partials: int, scaling: float, length: Tensor, window: int | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend from one new token of each stream to every chunk of its cache.

    Args:
        query: Rotated queries of all slots, [rows, heads, size]; those of one KV head lie beside each other.
        keys: For each cache the keys, [KV heads, m, size]; m may differ, and a KV head may have fewer entries.
        values: For each cache the values, of the same shapes.
        caches: The result of ``cache_table`` for keys and values.
        packed: The slot of each stream, grouped by cache, then zeros, int64 [rows].
        tiles: The tiles that ``tables`` returns, int64 [tiles, TILE_COLUMNS].
        partials: The number of partial results that ``tables`` returns.
        scaling: The factor of products of queries and keys.
        length: Entries of every suffix, the new one included, int64 [1]. Only windows need the length.
        window: How many of the latest entries a query sees, those of the suffix included; None for all.
        softcap: The soft cap of scores, if the layer has one.

    Returns:
        For each stream and chunk the output, in the queries' dtype, [partials, heads, size], and the logarithm of the
        sum of exponentials, float32 [partials, heads], which is minus infinity if the window has moved past the chunk.
        Results of chunks that a cache's KV head lacks in this layer do not count.
    """
    (_, heads, size), kv_heads = query.shape, keys[0].shape[0]
    held = caches[:, :, 2].tolist()
    group, queries, terms = heads // kv_heads, tile_queries(query.dtype, size), LayerTerms(window)
    suffix = 0 if window is None else int(length)
    output = query.new_zeros((partials, heads, size))
    mass = query.new_zeros((partials, heads), dtype=torch.float32)
    grouped_output, grouped_mass = output.view(-1, kv_heads, group, size), mass.view(-1, kv_heads, group)
    for number, chunk, first_row, streams, element, partial in tiles.tolist():
        entries = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        key, value = keys[number][:, entries], values[number][:, entries]
        if not key.shape[1]:  # only other layers of this cache have this chunk, or no cache has it
            continue
        if seen := max(terms.first_seen(keys[number].shape[1] + suffix) - entries.start, 0):
            key, value = key[:, seen:], value[:, seen:]
        stream, member = _elements(element, min(element + queries, streams * group), group)
        if not key.shape[1]:  # the window has moved past the chunk
            grouped_mass[partial + stream, :, member] = -torch.inf
            continue
        inside = [min(max(count - entries.start - seen, 0), CHUNK) for count in held[number]]
        lengths = None if min(inside) == key.shape[1] else inside
        rows = query.view(-1, kv_heads, group, size)[
            packed[first_row + stream], :, member
        ]  # [elements, KV heads, size]
        tile = query.new_zeros((kv_heads, queries, size))
        tile[:, : len(rows)] = rows.transpose(0, 1)
        part_output, sums = attend_prompt(tile, key, value, scaling, softcap, lengths=lengths)
        grouped_output[partial + stream, :, member] = part_output[:, : len(rows)].transpose(0, 1).to(query.dtype)
        grouped_mass[partial + stream, :, member] = sums[:, : len(rows)].t()
    return output, mass


def _elements(first: int, last: int, group: int) -> tuple[Tensor, Tensor]:
    """Return for each of the elements ``first .. last - 1`` the number of its stream and its number in that stream.

    Elements are the queries of all streams; the ``group`` queries of a stream lie one after the other.
    """
    element = torch.arange(first, last)
    return element // group, element % group


prompt_attention = torch.library.custom_op("kvdrift::prompt_attention", plain_prompt_attention, mutates_args=())


@prompt_attention.register_kernel("cuda")
def _prompt_on_cuda(*arguments: Any) -> PartialAttention:
    from kvdrift.generator.attention.triton_kernels import launch_prompt_attention  # noqa: PLC0415 - Triton comes with CUDA only

    return launch_prompt_attention(*arguments)


def plain_suffix_attention(
    query: Tensor, key: Tensor, value: Tensor, suffix_key: Tensor, suffix_value: Tensor, length: Tensor,
    chunk_output: Tensor, chunk_mass: Tensor, places: Tensor, caches: Tensor, scaling: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write each stream's new entry into its suffix, attend to the suffix, and join the result with the chunks'.

    Args:
        query: Rotated queries of all slots, [rows, heads, size].
        key: Rotated keys of the new tokens, [rows, KV heads, size].
        value: Values of the new tokens, [rows, KV heads, size].
        suffix_key: Keys of all suffixes, [slots, KV heads, H, size].
        suffix_value: Values of all suffixes, [slots, KV heads, H, size].
        length: Entries of every suffix, the new one included, int64 [1].
        chunk_output: The first result of ``prompt_attention``, [partials, heads, size].
        chunk_mass: The second result of ``prompt_attention``, float32 [partials, heads].
        places: The places that ``tables`` returns, int64 [rows, PLACE_COLUMNS].
        caches: The result of ``cache_table`` for this layer's prompt entries.
        scaling: The factor of products of queries and keys.
        window: As for ``prompt_attention``.
        softcap: As for ``prompt_attention``.
        sinks: The layer's sinks, [heads], if the layer has sinks.

    Returns:
        The attention output of every slot, [rows, heads, size]; zeros in slots without a stream.
    """
    (rows, heads, size), kv_heads, entries = query.shape, key.shape[1], int(length)
    open_slots = (places[:, 0] >= 0).nonzero().squeeze(-1)
    suffix_key[open_slots, :, entries - 1] = key[open_slots]
    suffix_value[open_slots, :, entries - 1] = value[open_slots]
    grouped = query[open_slots].view(-1, kv_heads, heads // kv_heads, size)
    seen = slice(LayerTerms(window).first_seen(entries), entries)
    joint = attend_part(
        grouped, suffix_key[open_slots, :, seen], suffix_value[open_slots, :, seen], scaling, softcap=softcap
    )
    output, mass = joint[0].reshape(-1, heads, size), joint[1].reshape(-1, heads)
    cache, first, step = places[open_slots].unbind(1)
    chunks = chunks_of(caches[:, :, 2])[cache]  # [streams, KV heads]
    for chunk in range(int(chunks.max())):
        present = chunk < chunks
        partial = torch.where(present.any(1), first + chunk * step, 0)
        absent = chunk_mass[partial].masked_fill(~present.repeat_interleave(heads // kv_heads, 1), -torch.inf)
        output, mass = join_parts((output, mass), (chunk_output[partial], absent))
    grouped_parts = output.view(-1, kv_heads, heads // kv_heads, size), mass.view(-1, kv_heads, heads // kv_heads)
    result = query.new_zeros((rows, heads, size))
    result[open_slots] = with_sinks(*grouped_parts, sinks).reshape(-1, heads, size).to(query.dtype)
    return result


suffix_attention = torch.library.custom_op(
    "kvdrift::suffix_attention", plain_suffix_attention, mutates_args=("suffix_key", "suffix_value")
)


@suffix_attention.register_kernel("cuda")
def _suffix_on_cuda(*arguments: Any) -> Tensor:
    from kvdrift.generator.attention.triton_kernels import launch_suffix_attention  # noqa: PLC0415 - Triton comes with CUDA only

    return launch_suffix_attention(*arguments)


@tried_once
def attention_fault(device: torch.device) -> str | None:
    """Return why the Triton kernels cannot be used on a CUDA device; None if they can.

    The kernels are tried once, on three streams of two small caches, without terms of a layer and with all. Triton
    builds a kernel at its first use, which needs a C compiler on this machine.
    """

    def numbers(*shape: int, last: float = 1.0) -> Tensor:
        return torch.linspace(-1, last, math.prod(shape)).sin().view(shape).to(device)

    query, key, value = (numbers(3, 2, 16, last=last) for last in (0.0, 1.0, 2.0))
    caches = [numbers(2, 70, 16), numbers(2, 40, 16)]
    length, table = torch.tensor([37], device=device), cache_table(caches, caches)
    chunks = chunks_of(torch.tensor([70, 40]))
    *indices, partials = tables(
        torch.tensor([0, 0, 1]), torch.tensor([2, 0, 1]), 3, chunks, 1, tile_queries(query.dtype, 16)
    )
    packed, tiles, places = (part.to(device) for part in indices)

    def computed(
        prompt: Callable[..., PartialAttention], suffix: Callable[..., Tensor], terms: LayerTerms
    ) -> list[Tensor]:
        suffixes = [numbers(3, 2, 40, 16), numbers(3, 2, 40, 16, last=2.0)]
        own = terms.window, terms.softcap
        results = prompt(query, caches, caches, table, packed, tiles, partials, 0.25, length, *own)
        after = suffix(query, key, value, *suffixes, length, *results, places, table, 0.25, *own, terms.sinks)
        return [after, *suffixes]

    for terms in (PLAIN, LayerTerms(60, 0.5, numbers(2))):
        output, *written = computed(_prompt_on_cuda, _suffix_on_cuda, terms)
        wanted, *kept = computed(plain_prompt_attention, plain_suffix_attention, terms)
        if not (torch.allclose(output, wanted, atol=1e-5) and all(map(torch.equal, written, kept))):
            return "a trial of the Triton kernels of attention gave wrong results"
    return None


def are_fused(devices: Iterable[torch.device], wanted: bool | None) -> bool:  # noqa: FBT001 - as ``SharingOptions.fused`` is
    """Return whether fused operations are used on all ``devices``; ``wanted`` is ``SharingOptions.fused``."""
    if wanted is False:
        return False
    return all(attention_fault(device) is None if device.type == "cuda" else wanted is True for device in devices)


class FusedAttention:
    """Attention of open streams by the two fused operations, with tables of caches and streams.

    ``layers`` has for each layer the prompt entries of all caches; ``heads`` is the number of query heads of a layer.
    """

    def __init__(self, layers: Sequence[Sequence[PrefixLayer]], heads: int) -> None:
        self._layers = [([cache.key for cache in layer], [cache.value for cache in layer]) for layer in layers]
        self._terms = [layer[0].terms for layer in layers]
        self._caches = [
            cache_table(*parts, [cache.lengths for cache in layer])
            for parts, layer in zip(self._layers, layers, strict=True)
        ]
        most = torch.tensor([[cache.key.shape[1] for cache in layer] for layer in layers])  # [layers, caches]
        self._chunks = chunks_of(most.amax(0))
        keys = [layer[0].key for layer in layers]
        # Layers with other heads have other tiles: the number of queries of a KV head, and the queries of a tile.
        self._kinds = [(heads // key.shape[0], tile_queries(key.dtype, key.shape[2])) for key in keys]
        self.partials = 0  # partial results of the open streams

    def pack(self, stream_cache: Tensor, slots: Tensor, rows: int) -> dict[str, Tensor]:
        """Make the tables of the open streams; return them by name for ``attend``, to be sent to the layers' devices.

        The cache of each stream, ascending, and its slot among the model's ``rows`` are int64 [streams] on the CPU.
        """
        named: dict[str, Tensor] = {}
        for kind in dict.fromkeys(self._kinds):
            packed, tiles, places, self.partials = tables(stream_cache, slots, rows, self._chunks, *kind)
            named |= {"packed": packed, _tiles_of(kind): tiles, "places": places}
        return named

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, suffix: Sequence[Tensor],
        indices: Mapping[str, Tensor], scaling: float,
    ) -> Tensor:  # fmt: skip
        """Attend from one new token per row and write its key and value.

        Queries are [rows, heads, 1, size], keys and values [rows, KV heads, 1, size]. ``suffix`` has the keys and
        values of this layer's suffixes, [slots, KV heads, H, size] each. ``indices`` are the vectors that ``pack``
        returned, on the layer's device; and "length", the entries of every suffix including the new one, int64 [1]. The
        result is [rows, heads, 1, size]; zeros in rows without a stream.
        """
        caches, new, terms, length = self._caches[layer], query[:, :, 0], self._terms[layer], indices["length"]
        chunks: PartialAttention = prompt_attention(
            new, *self._layers[layer], caches, indices["packed"], indices[_tiles_of(self._kinds[layer])],
            self.partials, scaling, length, terms.window, terms.softcap,
        )  # fmt: skip
        output: Tensor = suffix_attention(
            new, key[:, :, 0], value[:, :, 0], *suffix, length, *chunks, indices["places"], caches, scaling,
            terms.window, terms.softcap, terms.sinks,
        )  # fmt: skip
        return output[:, :, None]


def _tiles_of(kind: tuple[int, int]) -> str:
    return f"tiles of {kind[1]} queries, {kind[0]} a head"
