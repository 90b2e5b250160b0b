"""Attention of every open stream to its suffix, joined with its prompt's chunks: one operation, one launch on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvdrift.generator.attention.fused.tables import cache_table, chunks_of
from kvdrift.generator.attention.parts import attend_part, join_parts
from kvdrift.schema.errors import tried_once


def plain_suffix_attention(
    query: Tensor, key: Tensor, value: Tensor, suffix_key: Tensor, suffix_value: Tensor, length: Tensor,
    chunk_output: Tensor, chunk_mass: Tensor, places: Tensor, caches: Tensor, scaling: float,
) -> Tensor:  # fmt: skip
    """Write each stream's new entry into its suffix, attend to the suffix, and join the chunks in their order.

    Args:
        query: Rotated queries of all slots, [rows, heads, size].
        key: Rotated keys of the new tokens, [rows, KV heads, size].
        value: Values of the new tokens, [rows, KV heads, size].
        suffix_key: [slots, KV heads, H, size].
        suffix_value: [slots, KV heads, H, size].
        length: Entries of every suffix, the new one included, int64 [1].
        chunk_output: The first result of ``prompt_attention``, [partials, heads, size].
        chunk_mass: The second result of ``prompt_attention``, float32 [partials, heads].
        places: As ``tables`` makes them, [rows, PLACE_COLUMNS].
        caches: ``cache_table`` of this layer's prompt entries.
        scaling: The factor of products of queries and keys.

    Returns:
        The attention output of every slot, [rows, heads, size]; zeros in slots without a stream.
    """
    (rows, heads, size), kv_heads, entries = query.shape, key.shape[1], int(length)
    open_slots = (places[:, 0] >= 0).nonzero().squeeze(-1)
    suffix_key[open_slots, :, entries - 1] = key[open_slots]
    suffix_value[open_slots, :, entries - 1] = value[open_slots]
    grouped = query[open_slots].view(-1, kv_heads, heads // kv_heads, size)
    joint = attend_part(grouped, suffix_key[open_slots, :, :entries], suffix_value[open_slots, :, :entries], scaling)
    output, mass = joint[0].reshape(-1, heads, size), joint[1].reshape(-1, heads)
    cache, first, step = places[open_slots].unbind(1)
    chunks = chunks_of(caches[:, 2])[cache]
    for chunk in range(int(chunks.max())):
        present = chunk < chunks
        partial = torch.where(present, first + chunk * step, 0)
        absent = chunk_mass[partial].masked_fill(~present[:, None], -torch.inf)
        output, mass = join_parts((output, mass), (chunk_output[partial], absent))
    result = query.new_zeros((rows, heads, size))
    result[open_slots] = output.to(query.dtype)
    return result


suffix_attention = torch.library.custom_op(
    "kvdrift::suffix_attention", plain_suffix_attention, mutates_args=("suffix_key", "suffix_value")
)


@suffix_attention.register_kernel("cuda")
def _on_cuda(*arguments: Any) -> Tensor:
    from kvdrift.generator.attention.fused.suffix_kernel import launch  # noqa: PLC0415 - Triton comes with CUDA only

    return launch(*arguments)


@tried_once
def fault(device: torch.device) -> str | None:
    """Return why the kernel cannot be used on a device; None if it can. It is tried once, on two streams.

    Triton builds a kernel at its first use, which needs a C compiler on this machine.
    """
    query, key, value, suffix_key, suffix_value, output = (
        torch.linspace(-1, phase, 2 * 2 * entries * 16).sin().view(2, 2, entries, 16).to(device)
        for phase, entries in enumerate((1, 1, 1, 40, 40, 1))
    )
    query, key, value, output = (part[:, :, 0] for part in (query, key, value, output))
    length, mass = torch.tensor([37], device=device), output[:, :, 0].contiguous()
    places = torch.tensor([[0, 1, 2], [0, 0, 2]], device=device)
    caches = cache_table([suffix_key[0]], [suffix_value[0]])
    (found, *written), (wanted, *kept) = (
        (attend(query, key, value, *suffix, length, output, mass, places, caches, 0.25), *suffix)
        for attend in (_on_cuda, plain_suffix_attention)
        for suffix in [(suffix_key.clone(), suffix_value.clone())]
    )
    exact = all(torch.equal(one, other) for one, other in zip(written, kept, strict=True))
    near = exact and torch.allclose(found, wanted, atol=1e-5)
    return None if near else "the kernel's results are wrong"
