"""Estimate the memory of a study's sides, before any weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvdrift.generator.engines.model import EngineModel, streams_at_once
from kvdrift.generator.transformer.memory import available_bytes


@dataclass(frozen=True)
class EngineFootprint:
    """The bytes of all weight files, of the caches of a prompt, all open at once, and of this machine's free memory.

    ``replicates_at_once`` are decoded together; the others follow in rounds.
    """

    weights: int
    caches: int
    replicates_at_once: int
    available: int

    @property
    def fits(self) -> bool:
        """Whether the bytes are available."""
        return self.weights + self.caches <= self.available

    @property
    def words(self) -> str:
        """The bytes in words."""
        sizes = (self.weights, self.caches, self.available)
        weights, caches, available = (f"{size / 2**20:,.1f} MiB" for size in sizes)
        return (
            f"{weights} of weights and {caches} of caches for the longest prompt, up to {self.replicates_at_once} "
            f"replicates at once; {available} available{'' if self.fits else ', which is too little'}"
        )


def engine_footprint(model: EngineModel, lengths: Sequence[int], horizon: int) -> EngineFootprint:
    """Return the bytes that generation takes for the longest of some prompts."""
    longest, sides = max(lengths), [model.reference, *model.sides.values()]
    weights = {side.weights_sha256: side.weight_bytes() for side in sides}
    caches = sum(side.cache_bytes(longest + streams_at_once(side, longest, horizon) * horizon) for side in sides)
    return EngineFootprint(
        sum(weights.values()),
        caches,
        min(streams_at_once(side, longest, horizon) for side in sides) // 2,
        available_bytes("cpu"),
    )
