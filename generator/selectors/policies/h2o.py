"""The heavy-hitter policy H2O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.selectors import Selector
from kvdrift.generator.selectors import h2o as selectors_h2o
from kvdrift.generator.selectors.policies.scores import ScoringPolicy


@dataclass(frozen=True)
class H2O(ScoringPolicy):
    """Drops the entry with the least accumulated attention, per KV head; the m // 2 latest entries are kept.

    Attention accumulates over all queries of the prompt and of the generated tokens; query heads of a KV head are
    averaged. Sums are not divided by the number of queries that could see an entry (section 4).
    """

    summary: ClassVar[str] = "drops the least accumulated attention per KV head, and keeps the recent half"
    paper: ClassVar[str | None] = "Zhang et al. 2023, arXiv:2306.14048"

    @property
    def accumulates(self) -> bool:
        """Whether scores depend on more queries than the latest: True, they are sums over all queries."""
        return True

    def recent(self, budget: int) -> int:
        """How many of the latest entries are not dropped: m // 2, but at least 1."""
        return max(budget // 2, 1)

    @property
    def first_cut(self) -> Selector:
        """The selector H2O: it keeps the m // 2 latest positions and, of the others, those with the most attention."""
        return selectors_h2o.H2O()

    def prompt_scores(self, layer: PromptLayer) -> Tensor:
        """Attention received from all queries of the prompt, float64 [KV heads, n]."""
        return layer.gathered(selectors_h2o.AccumulatedAttention())

    def scored(self, scores: Tensor, weights: Tensor) -> Tensor:
        """Return the sums after a step: ``scores`` plus ``weights`` averaged over query heads, [R, KV heads, E]."""
        return scores + weights.mean(2)
