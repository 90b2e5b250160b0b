"""Compute a probe by transformers alone: with eager attention, and with entries that are really removed."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvdrift.generator.transformer.files.configuration import library, rope_switch
from kvdrift.generator.transformer.proof.points import Point, visited

_SWITCH = "original_max_position_embeddings"

ENTRIES, CHUNK, WINDOW, KEPT, STEPS = 48, 32, 24, 20, 8
"""Sizes of the probe: prompt tokens, tokens prefilled at once, entries of a window, kept entries, decoded tokens."""


@dataclass(frozen=True)
class Probe:
    """The tokens with which a model is tried: a prompt, and two continuations that part."""

    prompt: Tensor  # int64 [ENTRIES]
    continuations: Tensor  # int64 [2, STEPS]

    @classmethod
    def of(cls, vocabulary: int) -> Probe:
        """Draw the tokens; they are always the same."""
        drawn = torch.randint(vocabulary, (ENTRIES + 2 * STEPS,), generator=torch.Generator().manual_seed(0))
        return cls(drawn[:ENTRIES], drawn[ENTRIES:].view(2, STEPS))


def kept_positions(layer: int, kv_heads: int) -> Tensor:
    """Return the prompt entries that the evicted cache keeps, int64 [KV heads, KEPT], ascending."""
    generator = torch.Generator().manual_seed(1 + layer)
    ranked = torch.rand(kv_heads, ENTRIES, generator=generator).argsort(-1)
    return ranked[:, :KEPT].sort(-1).values


@contextlib.contextmanager
def short_lengths(network: Any) -> Iterator[None]:
    """Make windows, and the length at which RoPE switches, shorter than the probe inside the block.

    A model's code treats lengths of any size in the same way.
    """
    holders = [network.config, *network.modules()]
    named = [(one, vars(one)["sliding_window"]) for one in holders if type(vars(one).get("sliding_window")) is int]
    for one, _ in named:
        one.sliding_window = WINDOW
    switch = rope_switch(network.config)
    stated = [] if switch is None else [network.config.rope_parameters, vars(network.config)]  # the second wins
    before = [(one, one[_SWITCH]) for one in stated if _SWITCH in one]
    for one, _ in before:
        one[_SWITCH] = WINDOW
    try:
        yield
    finally:
        for one, length in before:
            one[_SWITCH] = length
        for one, window in named:
            one.sliding_window = window


@dataclass(frozen=True)
class Reference:
    """The probe as transformers computes it.

    Rows are the prompt's tokens, then for each step those of the two streams with the whole cache, then likewise of
    those with the evicted cache.

    Attributes:
        values: The values at each point of the network, [rows, ...], in the network's dtype, on the CPU.
        logits: The logits of these rows, except those of the prompt's tokens before the last, [rows, V], on the CPU.
        seconds: The time that the passes took.
    """

    values: Mapping[Point, Tensor]
    logits: Tensor
    seconds: float


def step_rows(step: int) -> Tensor:
    """Return the reference's rows of a step's four streams, int64 [4]."""
    whole = ENTRIES + 2 * step + torch.arange(2)
    return torch.cat([whole, whole + 2 * STEPS])


def reference_forward(network: Any, probe: Probe) -> Reference:
    """Compute the probe by transformers alone: two streams of the whole cache, then two of the evicted one."""
    began = time.perf_counter()
    device = network.get_input_embeddings().weight.device
    implementation = network.config._attn_implementation  # noqa: SLF001
    network.set_attn_implementation("eager")
    values: dict[Point, list[Tensor]] = {}
    logits: list[Tensor] = []

    def record(point: Point, rows: Tensor) -> Tensor:
        values.setdefault(point, []).append(rows.to("cpu", copy=True))
        return rows

    def forward(tokens: Tensor, cache: Any, first: int) -> None:
        positions = torch.arange(first, first + tokens.shape[1], device=device)[None]
        output = network(tokens.to(device), past_key_values=cache, position_ids=positions, use_cache=True)
        logits.append(output.logits[:, -1].to("cpu", copy=True))

    try:
        with torch.inference_mode(), short_lengths(network), visited(network, record):
            whole = library().DynamicCache(config=network.config)
            forward(probe.prompt[None], whole, 0)
            evicted = copy.deepcopy(whole)
            remove(evicted)
            for cache in (whole, evicted):
                cache.reorder_cache(torch.zeros(2, dtype=torch.int64, device=device))
                for step in range(STEPS):
                    forward(probe.continuations[:, step : step + 1], cache, ENTRIES + step)
    finally:
        network.set_attn_implementation(implementation)
    joined = {point: torch.cat(rows) for point, rows in values.items()}
    return Reference(joined, torch.cat(logits), time.perf_counter() - began)


def remove(cache: Any) -> None:
    """Remove all entries except the kept ones from the layers with full attention."""
    number = 0
    for layer in cache.layers:
        if getattr(layer, "is_sliding", False) or not hasattr(layer, "keys"):
            continue
        places = kept_positions(number, layer.keys.shape[1]).to(layer.keys.device)[None, :, :, None]
        layer.keys, layer.values = (
            part.gather(2, places.expand(-1, -1, -1, part.shape[-1])) for part in (layer.keys, layer.values)
        )
        number += 1
