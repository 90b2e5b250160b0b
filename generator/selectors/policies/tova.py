"""The policy TOVA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.selectors import Selector
from kvdrift.generator.selectors import tova as selectors_tova
from kvdrift.generator.selectors.policies.scores import ScoringPolicy


class _FirstCut(selectors_tova.TOVA):
    """Keeps the positions that the last query attends to most; the last position competes with the others."""

    @property
    def window(self) -> int:
        """How many last positions are always kept: 0."""
        return 0


@dataclass(frozen=True)
class TOVA(ScoringPolicy):
    """Drops the entry with the least attention of the latest query, mean over all query heads of the layer (section 3).

    All heads of a layer drop the same position. The paper's cache of k entries drops one after a step that has read
    k + 1: the same choices as here with m = k + 1.
    """

    summary: ClassVar[str] = "drops what the latest query attends to least, the same for all heads of a layer"
    paper: ClassVar[str | None] = "Oren et al. 2024, arXiv:2401.06104"

    @property
    def first_cut(self) -> Selector:
        """The selector of the positions that the prompt's last query attends to most."""
        return _FirstCut()

    def prompt_scores(self, layer: PromptLayer) -> Tensor:
        """Attention of the prompt's last query, float32 [KV heads, n], every row the same."""
        return _FirstCut().score(layer)

    def scored(self, scores: Tensor, weights: Tensor) -> Tensor:
        """Attention of the latest query, mean over all query heads of the layer, [R, KV heads, E]."""
        return weights.mean((1, 2))[:, None].expand_as(scores)
