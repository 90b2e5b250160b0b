"""The TOVA selector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.selectors.selector import ScoringSelector
from kvdrift.generator.selectors.snapkv import window_attention


@dataclass(frozen=True)
class TOVA(ScoringSelector):
    """Keeps the positions that the last query attends to most, averaged over all heads of the layer (section 3).

    All KV heads of a layer keep the same positions. The last position is always kept; in the paper its score decides.
    """

    summary: ClassVar[str] = "what the last query attends to most, one set for all heads of a layer"
    paper: ClassVar[str | None] = "Oren et al. 2024, arXiv:2401.06104"
    head_reduction: ClassVar[str | None] = "mean over all query heads of the layer"
    applies_softcap: ClassVar[bool] = True

    @property
    def window(self) -> int:
        """How many last positions are always kept: 1, the position whose query scores the others."""
        return 1

    def score(self, layer: PromptLayer) -> Tensor:
        """Mean attention of the last query, float32 [KV heads, n], every row the same."""
        received = window_attention(layer, 1).mean(dim=(0, 1, 2))
        return received.expand(layer.key.shape[0], -1)
