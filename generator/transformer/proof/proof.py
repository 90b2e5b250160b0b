"""Check whether a loaded model gives the results of transformers' own forward pass on a probe."""

from __future__ import annotations

import torch
from torch import Tensor

from generator.attention.layer_traits import attention_modules
from generator.attention.shared_prefix import PrefixLayer
from generator.coupling.streams import ALL_SAVINGS
from generator.transformer.decoder import Decoder
from generator.transformer.prompts.kernels import PromptCaches, TransformerKernels
from generator.transformer.prompts.prompt import Prompt
from generator.transformer.proof.forward import (
    CHUNK,
    ENTRIES,
    STEPS,
    Found,
    Probe,
    kept_positions,
    outputs_of_layers,
    short_lengths,
)
from schema.errors import first_line

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}
"""The largest error of a row, relative to its norm, by dtype.

With 16 bits only half of the rows must be within it: a router of experts with two nearly equal best scores may choose
differently, whatever computes the scores.
"""


def refusal(model: Decoder, probe: Probe, own: Found) -> str | None:
    """Compare a loaded model with transformers' own forward pass, whose results on the probe are ``own``.

    Returns None if the results agree; else a line that says what differs, and by how much.
    """
    try:
        with model.computing():
            ours = _computed(model, probe)
    except Exception as error:  # noqa: BLE001 - whatever its code does with our attention
        return f"its attention does not go through transformers' attention interface ({first_line(error)})"
    tolerance = TOLERANCES[model.dtype]
    for number, (one, other) in enumerate(zip(ours.layers, own.layers, strict=True)):
        off = difference(one, other, model.dtype)
        if not off <= tolerance:
            return (
                f"layer {number} differs from transformers' own forward pass by {off:.2g} of its size on a probe, and "
                f"{tolerance:g} is allowed"
            )
    off = difference(ours.laws, own.laws, model.dtype)
    if not off <= tolerance:
        return f"its laws differ from transformers' own by {off:.2g} of their size on a probe, {tolerance:g} is allowed"
    return None


def difference(one: Tensor, other: Tensor, dtype: str) -> float:
    """Return the error of rows, [..., rows, width] both: the largest; with 16 bits the median."""
    if one.shape != other.shape:
        return float("inf")
    off = (one - other).norm(dim=-1) / other.norm(dim=-1)
    return float(off.max() if dtype == "float32" else off.median())


def _computed(model: Decoder, probe: Probe) -> Found:
    """Return the probe's results, computed as for documents: in chunks, with shared prompts and forks."""
    with short_lengths(model.network), outputs_of_layers(model.network) as layers:
        prompt = Prompt(model, probe.prompt.tolist(), window=0, at_once=CHUNK)
        expected = len(attention_modules(model.network))
        if len(prompt.layers) != expected:
            message = f"{len(prompt.layers)} of {expected} layers attend through it"
            raise ValueError(message)
        first = prompt.first_law
        whole = [PrefixLayer(layer.key, layer.value, layer.terms) for layer in prompt.layers]
        evicted = [
            own if layer.terms.window is not None else _kept(own, kept_positions(layer.number, own.key.shape[0]))
            for layer, own in zip(prompt.layers, whole, strict=True)
        ]
        caches = PromptCaches(ENTRIES, first, [whole, evicted], (0, 0), (None, None), (prompt.states,) * 2)
        kernels = TransformerKernels(model, [caches], 4, STEPS + 1, ALL_SAVINGS)
        kernels.open([0, 1])
        kernels.select(torch.tensor([0, 0, 1, 1]))
        laws = []
        for step in range(STEPS):
            laws.append(kernels.advance(probe.continuations[:, step].repeat(2)).double().cpu().clone())
            kernels.select(torch.arange(4))
    slots = kernels.slots
    hidden = []
    for own in layers:
        chunks = -(-ENTRIES // CHUNK)
        steps = torch.stack([rows[slots] for rows in own[chunks:]])  # [STEPS, streams, width]
        hidden.append(torch.cat([*own[:chunks], steps[:, :2].flatten(0, 1), steps[:, 2:].flatten(0, 1)]))
    drawn = torch.stack(laws)
    return Found(
        hidden, torch.cat([first[None].double().cpu(), drawn[:, :2].flatten(0, 1), drawn[:, 2:].flatten(0, 1)])
    )


def _kept(layer: PrefixLayer, positions: Tensor) -> PrefixLayer:
    """Return a layer with only the entries at positions [KV heads, m]."""
    places = positions.to(layer.key.device)[:, :, None]
    key, value = (part.gather(1, places.expand(-1, -1, part.shape[-1])) for part in (layer.key, layer.value))
    return PrefixLayer(key, value, layer.terms)
