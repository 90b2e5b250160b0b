"""Coupled decoding with a copy of the prompt for every replicate, the peer of decoding with a shared prompt.

Every action has three streams of its own for each replicate (reference on X, compressed on Y, compressed on X), each
fed one token per position through transformers' own caches and sdpa attention. Prompt, eviction, uniforms and the
coupling itself are the generator's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from kvdrift.generator.actions import Action
from kvdrift.generator.attention.shared_prefix import PrefixLayer
from kvdrift.generator.coupling.laws import couple, draw, total_variation
from kvdrift.generator.coupling.rollout import uniform_table
from kvdrift.generator.transformer.loading import LoadedModel
from kvdrift.generator.transformer.prompts.eviction import evict
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.schema.document import Document


class PreallocatedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A cache layer whose buffer has room for the horizon, so that a token is written in place."""

    def __init__(self, prompt: PrefixLayer, copies: int, horizon: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lazy_initialization(prompt.key, prompt.value)
        self._length = prompt.key.shape[1]
        self._buffers = [self._filled(part, copies, horizon) for part in (prompt.key, prompt.value)]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append [K, KV heads, T, size] and return everything so far."""
        start, self._length = self._length, self._length + key_states.shape[-2]
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start : self._length] = states
        key, value = (buffer[:, :, : self._length] for buffer in self._buffers)
        return key, value

    def get_seq_length(self) -> int:
        """Return the number of entries so far."""
        return self._length

    @staticmethod
    def _filled(part: Tensor, copies: int, horizon: int) -> Tensor:
        heads, entries, size = part.shape
        buffer = part.new_empty((copies, heads, entries + horizon, size))
        buffer[:, :, :entries] = part
        return buffer


def expanded_cache(layers: Sequence[PrefixLayer], copies: int, horizon: int, *, preallocated: bool) -> Cache:
    """Make a cache with ``copies`` copies of the kept entries, one for each replicate."""
    if preallocated:
        return Cache(layers=[PreallocatedLayer(layer, copies, horizon) for layer in layers])
    cache = DynamicCache()
    for number, layer in enumerate(layers):
        cache.update(layer.key.expand(copies, -1, -1, -1), layer.value.expand(copies, -1, -1, -1), number)
    return cache


def copied_rollout(
    model: LoadedModel, prompt: Prompt, document: Document, action: Action, replicates: int, horizon: int, seed: int, *,
    preallocated: bool,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:  # fmt: skip
    """Run one action's coupled rollout; return the tokens of both sides, int64 [K, H] each.

    ``model.network`` attends with sdpa, and its vocabulary has no EOS.
    """
    whole = [PrefixLayer(layer.key, layer.value) for layer in prompt.layers]
    compact = evict(prompt.layers, action.selector, action.retention.kept(prompt.entries)).layers
    reference, on_y, on_x = (
        expanded_cache(layers, replicates, horizon, preallocated=preallocated) for layers in (whole, compact, compact)
    )
    tables = [
        uniform_table(seed, document.doc, name, range(replicates), horizon, purposes)
        for name, purposes in ((None, 1), (action.name, 2))
    ]
    u_x, u_y = (torch.from_numpy(table).to(model.device) for table in tables)

    law = prompt.first_law.expand(replicates, -1)
    x = y = draw(law, u_x[:, 0, 0])
    steps = [(x, y)]
    for column in range(1, horizon):
        position = prompt.entries + column - 1
        p = _law(model, reference, x, position)
        q = _law(model, on_y, y, position)
        total_variation(p, _law(model, on_x, x, position))  # f
        total_variation(p, q)  # delta
        x = draw(p, u_x[:, column, 0])
        y = couple(p, q, x, u_y[:, column, 0], u_y[:, column, 1])
        steps.append((x, y))
    x_tokens, y_tokens = (torch.stack(side, 1).cpu().numpy() for side in zip(*steps, strict=True))
    return x_tokens, y_tokens


def _law(model: LoadedModel, cache: Cache, tokens: Tensor, position: int) -> Tensor:
    with torch.inference_mode():
        output = model.network(
            input_ids=tokens[:, None],
            position_ids=torch.full((1, 1), position, device=model.device),
            past_key_values=cache,
            use_cache=True,
        )
        law: Tensor = output.logits[:, -1].softmax(-1, dtype=torch.float32)
    return law
