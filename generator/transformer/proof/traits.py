"""Find by trying the properties of a model's layers that selectors need: a soft cap, and how queries are rotated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvdrift.generator.attention.layer_traits import LayerTraits
from kvdrift.generator.attention.statistics import QueryChunk
from kvdrift.generator.transformer.decoder import Decoder
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.generator.transformer.proof.forward import Probe, Reference
from kvdrift.generator.transformer.proof.points import Point, visited
from kvdrift.generator.transformer.proof.proof import TOLERANCES, difference

_FIRST = (0, 7)  # positions of the first token; a layer without RoPE, or with another, is not the same at both
_TOKENS = 4  # of the probe; a token's queries depend on nothing but its own input, which is the reference's


@dataclass(frozen=True)
class _PlainQueries:
    """A statistic: queries before rotation, if the layer rotates whole heads by halves, [heads, positions, size].

    ``first`` is the position of the prompt's first token.
    """

    first: int

    def update(self, gathered: Tensor | None, chunk: QueryChunk) -> Tensor:
        """Rotate a chunk's queries back by the embedding's angles for their positions."""
        start = self.first + chunk.first
        positions = torch.arange(start, start + chunk.query.shape[1], device=chunk.query.device)
        cos, sin = (part[0].double() for part in chunk.rotary(chunk.hidden[None], positions[None]))
        query = chunk.query.double()
        first, second = query.chunk(2, dim=-1)
        plain = (query * cos - torch.cat([-second, first], -1) * sin) / (cos**2 + sin**2)
        return plain if gathered is None else torch.cat([gathered, plain], 1)


def traits_of(model: Decoder, probe: Probe, reference: Reference) -> LayerTraits:
    """Return the properties of a proven model's layers that selectors need."""

    def as_reference(point: Point, values: Tensor) -> Tensor:
        return reference.values[point][: len(values)].to(values.device)

    tokens = probe.prompt[:_TOKENS].tolist()
    with model.computing(), visited(model.network, as_reference):
        prompt = Prompt(model, tokens, window=0)
        halves = _are_turned_by_halves(model, tokens)
    caps = [layer.terms.softcap for layer in prompt.evictable if layer.terms.softcap is not None]
    return LayerTraits(model.network.config.model_type, max(caps, default=None), halves)


def _are_turned_by_halves(model: Decoder, tokens: list[int]) -> bool:
    """Tell whether the queries of a prompt, rotated back by halves, are equal for two positions of its first token.

    Attention with RoPE depends only on distances, so queries before rotation are equal. Rotating the rotated queries
    back by halves gives these queries only if they were rotated by halves.
    """
    found = []
    try:
        for first in _FIRST:
            statistic = _PlainQueries(first)
            prompt = Prompt(model, tokens, window=0, statistics=[statistic], first=first)
            found.append([layer.gathered(statistic) for layer in prompt.evictable])
    except Exception:  # noqa: BLE001 - the embedding gives no angles for whole heads, or none in the usual way
        return False
    off = max(float(difference(one, other).max()) for one, other in zip(*found, strict=True))
    return off <= TOLERANCES[model.dtype]
