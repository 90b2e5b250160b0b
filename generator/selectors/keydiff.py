"""The KeyDiff selector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.selectors.selector import ScoringSelector


@dataclass(frozen=True)
class KeyDiff(ScoringSelector):
    """Keeps the keys with the lowest cosine similarity to the mean of all normalized keys.

    The paper applies the rule to one block of the prompt after another; here it is applied once, to the whole prompt.
    """

    summary: ClassVar[str] = "the keys least similar to the mean key"
    paper: ClassVar[str | None] = "Park et al. 2025, arXiv:2504.15364"

    def score(self, layer: PromptLayer) -> Tensor:
        """-cos(k, mean of k / ||k||), float32 [KV heads, n]."""
        key = layer.key.float()
        anchor = normalize(key, dim=-1).mean(dim=1, keepdim=True)
        return -cosine_similarity(key, anchor, dim=-1)
