"""Uniformly random entries: the floor that every score must beat."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from generator.attention.attention import PromptLayer
from generator.selectors.parameters import at_least
from generator.selectors.selector import ScoringSelector


@dataclass(frozen=True)
class RandomEntries(ScoringSelector):
    """A uniformly random set for each KV head and layer, a function of ``seed``, prompt, layer and head alone.

    A larger m keeps what a smaller one keeps, and more.
    """

    summary: ClassVar[str] = "uniformly random positions: the floor"
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(0, seed=self.seed)

    def score(self, layer: PromptLayer) -> Tensor:
        """Uniforms in [0, 1), float64 [KV heads, n], keyed as in ``generator.coupling.uniforms``."""
        heads, entries, _ = layer.key.shape
        scores = np.empty((heads, entries))
        for head in range(heads):
            named = json.dumps([self.seed, layer.prompt.hex(), layer.number, head])
            key = np.frombuffer(hashlib.blake2b(named.encode(), digest_size=16).digest(), dtype="<u8")
            scores[head] = np.random.Generator(np.random.Philox(key=key)).random(entries)
        return torch.from_numpy(scores).to(layer.key.device)
