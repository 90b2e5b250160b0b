"""The selector of random entries: the floor for every other selector."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.selectors.parameters import at_least
from kvdrift.generator.selectors.selector import ScoringSelector
from kvdrift.schema.keyed_random import keyed_generator


@dataclass(frozen=True)
class RandomEntries(ScoringSelector):
    """Keeps a uniformly random set of entries in each KV head and layer; ``seed``, prompt, layer and head determine it.

    A larger m keeps everything that a smaller m keeps.
    """

    summary: ClassVar[str] = "uniformly random positions: the floor"
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(0, seed=self.seed)

    def score(self, layer: PromptLayer) -> Tensor:
        """Uniform random numbers in [0, 1), float64 [KV heads, n], from one random generator for each KV head."""
        heads, entries, _ = layer.key.shape
        scores = np.empty((heads, entries))
        for head in range(heads):
            named = json.dumps([self.seed, layer.prompt.hex(), layer.number, head])
            scores[head] = keyed_generator(named).random(entries)
        return torch.from_numpy(scores).to(layer.key.device)
