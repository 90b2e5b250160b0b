"""Policies of one's own and their rules: what fails in them is one line, and what they return is looked at."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import NoReturn

import torch
from torch import Tensor

from kvdrift.generator.attention.cache_rules import CacheRule, StreamEntries
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.selectors import Selector
from kvdrift.generator.selectors.own.names import source_texts
from kvdrift.generator.selectors.policies.policy import Policy
from kvdrift.generator.selectors.policies.scores import ScoringPolicy
from kvdrift.schema.errors import KvdriftError, OperationError, failure_of


def rule_of(policy: Policy, prompt: Sequence[PromptLayer], kept: Sequence[Tensor], budget: int) -> CacheRule:
    """Return what follows a prompt's streams, as ``Policy.rule`` makes it; that of one's own is guarded.

    Raises:
        OperationError: The policy fails, its first cut keeps unlike numbers of entries in the layers, or something
            that it returns is not what it should be.
    """
    if not source_texts(type(policy)):
        return policy.rule(prompt, kept, budget)
    name = type(policy).__name__
    if len({index.shape[1] for index in kept}) > 1:
        raise OperationError(f"policy {name}: its first cut keeps unlike numbers of entries in the layers")
    bounded = policy
    if isinstance(policy, ScoringPolicy) and type(policy).rule is ScoringPolicy.rule:
        bounded = _Bounded(policy)
    with _told(policy):
        rule = bounded.rule(prompt, kept, budget)
    guarded = GuardedRule(policy, rule, budget)
    if rule.scores:
        for layer in prompt:
            guarded.first_scores(layer.number)
    return guarded


class _Bounded(ScoringPolicy):
    """A policy of one's own, held to the shapes and the range that the rule of ``ScoringPolicy`` takes for granted."""

    def __init__(self, policy: ScoringPolicy) -> None:
        self._policy = policy

    @property
    def first_cut(self) -> Selector:
        """That of the policy."""
        return self._policy.first_cut

    @property
    def accumulates(self) -> bool:
        """What the policy says."""
        return self._policy.accumulates

    def recent(self, budget: int) -> int:
        """What the policy says, from 1 to ``budget``."""
        found = self._policy.recent(budget)
        if not (isinstance(found, Integral) and 1 <= found <= budget):
            self._refuse(f"recent({budget}) is {found}; it should be a whole number from 1 to {budget}")
        return found

    def prompt_scores(self, layer: PromptLayer) -> Tensor:
        """Those of the policy, one for each KV head and position."""
        return self._shaped("prompt_scores", self._policy.prompt_scores(layer), layer.key.shape[:2])

    def scored(self, scores: Tensor, weights: Tensor) -> Tensor:
        """Those of the policy, as many as there were."""
        return self._shaped("scored", self._policy.scored(scores, weights), scores.shape)

    def _shaped(self, name: str, found: Tensor, shape: torch.Size) -> Tensor:
        if not isinstance(found, Tensor):
            self._refuse(f"{name} is of type {type(found).__name__}; it should be a tensor of the shape {list(shape)}")
        if found.shape != shape:
            self._refuse(f"{name} has the shape {list(found.shape)}; it should be {list(shape)}")
        return found

    def _refuse(self, what: str) -> NoReturn:
        own = type(self._policy)
        file = getattr(sys.modules.get(own.__module__), "__file__", None)
        raise OperationError(f"policy {own.__name__}: {what} ({file})")


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

    def left(self, entries: StreamEntries, scores: Tensor) -> Tensor | None:
        """What the rule says, if its shape is right."""
        with _told(self._policy):
            found = self._rule.left(entries, scores)
        expected = (*entries.query.shape[:2], entries.prompt_key.shape[1])
        return found if isinstance(found, Tensor) and found.shape == expected else None

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
