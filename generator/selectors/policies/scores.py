"""Policies that drop the entry with the least score; scores follow from the attention that entries have received."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from kvdrift.generator.attention.cache_rules import CacheRule, StreamEntries, attend_with_weights
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.selectors.policies.policy import Policy

_DROPPED = -torch.inf


class ScoringPolicy(Policy):
    """Drops the entry with the least score, of equal scores the latest entry; scores are never negative."""

    keeps_scores: ClassVar[bool] = True

    @property
    def accumulates(self) -> bool:
        """Whether scores depend on more queries than the latest."""
        return False

    def recent(self, budget: int) -> int:  # noqa: ARG002 - others need it
        """How many of the latest entries are not dropped, including the entry of the token being fed."""
        return 1

    @abstractmethod
    def prompt_scores(self, layer: PromptLayer) -> Tensor:
        """Scores of all positions at the end of the prompt, [KV heads, n]."""

    @abstractmethod
    def scored(self, scores: Tensor, weights: Tensor) -> Tensor:
        """Return the scores after a step, [R, KV heads, E], of R streams with E entries each.

        ``scores`` are those before the step, float32 of that shape; the new entry has 0. ``weights`` are the attention
        of the step's queries, float32 [R, KV heads, query heads of a KV head, E]; dropped entries get 0, and their
        scores are ignored.
        """

    def rule(self, prompt: Sequence[PromptLayer], kept: Sequence[Tensor], budget: int) -> CacheRule:
        """Return the rule that keeps scores of every stream's entries, and drops the entry with the least score."""
        first = [
            self.prompt_scores(layer).gather(1, index.long()).float() for layer, index in zip(prompt, kept, strict=True)
        ]
        return _LeastScore(self, first, budget)


class _LeastScore(CacheRule):
    """Holds ``budget`` entries; a dropped entry has the score minus infinity.

    The entry that is dropped before a token joins is chosen in the step before, as soon as the scores are known.
    """

    cuts_back = False
    unsteady = None

    def __init__(self, policy: ScoringPolicy, first: Sequence[Tensor], budget: int) -> None:
        self._policy, self._budget = policy, budget
        self.scores = first[0].shape[1]
        self._first = [self._after_drop(scores, 0) for scores in first]

    def over(self, entries: int, kv_heads: int) -> CacheRule:
        """Return the same rule over ``entries`` other prompt entries, with m equal to that number and scores of 0."""
        first = [torch.zeros((kv_heads, entries), device=scores.device) for scores in self._first]
        return _LeastScore(self._policy, first, entries)

    def first_scores(self, layer: int) -> Tensor:
        """Return the scores of a layer's prompt entries after the first drop, float32 [KV heads, prompt entries]."""
        return self._first[layer]

    def passes(self, length: int) -> bool:
        """Whether nothing is dropped before the next token is fed, and no scores are needed."""
        return not self._policy.accumulates and self.scores + length < self._budget

    def replaces(self, length: int) -> bool:
        """Whether an entry has been dropped by the time that suffixes have ``length`` entries."""
        return self.scores + length > self._budget

    def attend(self, entries: StreamEntries, scores: Tensor) -> tuple[Tensor | None, Tensor]:
        """Attend to the entries that are left, and drop the entry whose place the next token takes."""
        length = entries.suffix_key.shape[2]
        dropped = scores == _DROPPED
        output, weights = attend_with_weights(entries, scores.clamp(max=0.0))
        after = self._policy.scored(scores, weights).masked_fill(dropped, _DROPPED)
        return (output if self.replaces(length) else None), self._after_drop(after, length)

    def attend_steadily(
        self, entries: StreamEntries, scores: Tensor, length: Tensor, usual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attend as ``attend`` does, with room for all entries and an L on the device."""
        place = torch.arange(scores.shape[-1], device=scores.device)
        joined, dropped = self.scores + length, scores == _DROPPED  # entries so far, dropped ones included
        hidden = torch.zeros_like(scores).masked_fill_(dropped | (place >= joined), -torch.inf)
        output, weights = attend_with_weights(entries, hidden)
        after = self._policy.scored(scores, weights).masked_fill(dropped, _DROPPED)
        spared = dropped | (place >= joined + 1 - self._policy.recent(self._budget))
        # Of equal scores the first in reverse order is the latest.
        least = place[-1] - after.masked_fill(spared, torch.inf).flip(-1).argmin(-1, keepdim=True)
        after = after.masked_fill((place == least) & (joined + 1 > self._budget), _DROPPED)
        return torch.where(joined > self._budget, output, usual), after

    def _after_drop(self, scores: Tensor, length: int) -> Tensor:
        """Return the scores, with -inf for the entry with the least score if the next entry would exceed the budget.

        ``scores`` are [..., prompt entries + ``length``].
        """
        joined = self.scores + length + 1
        if joined <= self._budget:
            return scores
        oldest = joined - self._policy.recent(self._budget)
        candidates = scores[..., :oldest]
        least = candidates.masked_fill(candidates == _DROPPED, torch.inf).flip(-1).argmin(-1, keepdim=True)
        return scores.scatter(-1, oldest - 1 - least, _DROPPED)
