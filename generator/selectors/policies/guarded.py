"""Rules of policies of one's own: what fails in them is one line, and what they return is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from generator.attention.cache_rules import CacheRule, StreamEntries
from generator.attention.recording import PromptLayer
from generator.selectors.own.names import source_texts
from generator.selectors.policies.policy import Policy
from generator.selectors.policies.scores import ScoringPolicy
from schema.errors import KvdriftError, OperationError, failure_of


def rule_of(policy: Policy, prompt: Sequence[PromptLayer], kept: Sequence[Tensor], budget: int) -> CacheRule:
    """Return what follows a prompt's streams, as ``Policy.rule`` makes it; that of one's own is guarded.

    Raises:
        OperationError: The policy fails, its first cut keeps unlike numbers of entries in the layers, or first scores
            are not what they should be.
    """
    if not source_texts(type(policy)):
        return policy.rule(prompt, kept, budget)
    name = type(policy).__name__
    if len({index.shape[1] for index in kept}) > 1:
        raise OperationError(f"policy {name}: its first cut keeps unlike numbers of entries in the layers")
    with _told(policy):
        rule = policy.rule(prompt, kept, budget)
    guarded = GuardedRule(policy, rule, budget)
    if rule.scores:
        for layer in prompt:
            guarded.first_scores(layer.number)
    return guarded


class GuardedRule(CacheRule):
    """Another rule, of a policy of one's own with m = ``budget``; None where it is not known what is left."""

    def __init__(self, policy: Policy, rule: CacheRule, budget: int | None) -> None:
        self._policy, self._rule, self._budget = policy, rule, budget
        self.scores, self.cuts_back = rule.scores, rule.cuts_back

    def over(self, entries: int, kv_heads: int) -> CacheRule:
        """The same of that rule; steps are tried from the middle, where nothing is dropped: scores are not counted."""
        with _told(self._policy):
            return GuardedRule(self._policy, self._rule.over(entries, kv_heads), None)

    def first_scores(self, layer: int) -> Tensor:
        """Those of the rule."""
        with _told(self._policy):
            scores = self._rule.first_scores(layer)
            self._check(scores, scores.shape, 0)
            return scores

    def before_step(
        self, prompt: Sequence[Sequence[Tensor]], suffixes: Sequence[Sequence[Tensor]], slots: Sequence[Tensor],
        length: int,
    ) -> None:  # fmt: skip
        """What the rule does."""
        with _told(self._policy):
            self._rule.before_step(prompt, suffixes, slots, length)

    def passes(self, length: int) -> bool:
        """What the rule says."""
        with _told(self._policy):
            return self._rule.passes(length)

    def replaces(self, length: int) -> bool:
        """What the rule says."""
        with _told(self._policy):
            return self._rule.replaces(length)

    def attend(self, entries: StreamEntries, scores: Tensor) -> tuple[Tensor | None, Tensor]:
        """What the rule returns, in the right shapes and finite."""
        length = entries.suffix_key.shape[2]
        with _told(self._policy):
            found, after = self._rule.attend(entries, scores)
            if self._rule.replaces(length):
                query = entries.query
                sound = found is not None and found.shape == query.shape and found.dtype == query.dtype
                if not sound or found is None or not bool(found.isfinite().all()):
                    raise OperationError(
                        f"policy {type(self._policy).__name__}: attention at step {length} should be finite, of the "
                        f"shape {list(query.shape)} and of {query.dtype}"
                    )
            self._check(after, scores.shape, length)
        return found, after

    def _check(self, scores: Tensor, shape: Sequence[int], length: int) -> None:
        """Check scores after a step: those of what is left, so many of each head, are finite and not negative."""
        if not self.scores:
            return
        sound = scores.shape == torch.Size(shape)
        if sound and isinstance(self._policy, ScoringPolicy) and self._budget is not None:
            left = min(self.scores + length, self._budget - 1)  # a place is free for the next token's entry
            sound = bool((((scores >= 0) & scores.isfinite()).sum(-1) == left).all())
        if not sound:
            raise OperationError(
                f"policy {type(self._policy).__name__}: scores at step {length} should be {list(shape)} finite numbers "
                "that are not negative"
            )


@contextmanager
def _told(policy: Policy) -> Iterator[None]:
    """Make one line of what fails inside; a shortage of memory stays what it is, or its line says so."""
    try:
        yield
    except (KvdriftError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise OperationError(f"policy {type(policy).__name__}: {failure_of(error, policy)}") from error
