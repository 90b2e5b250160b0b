"""The key-norm selector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.selectors.selector import ScoringSelector


@dataclass(frozen=True)
class Knorm(ScoringSelector):
    """Keeps the keys with the lowest L2 norm, which tend to receive the most attention (section 3 of the paper)."""

    summary: ClassVar[str] = "the keys with the lowest L2 norm"
    paper: ClassVar[str | None] = "Devoto et al. 2024, arXiv:2406.11430"

    def score(self, layer: PromptLayer) -> Tensor:
        """-||k||, float32 [KV heads, n]."""
        length: Tensor = torch.linalg.vector_norm(layer.key.float(), dim=-1)
        return -length
