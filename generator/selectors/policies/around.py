"""Wrappers of policies' rules: one counts which prompt entries streams still have, one guards custom policies.

An exception in a custom policy or its rule becomes one error line, and the results of both are checked.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from numbers import Integral
from typing import NoReturn

import torch
from torch import Tensor

from kvdrift.generator.attention.cache_rules import CacheRule, StreamEntries
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.selectors import Selector
from kvdrift.generator.selectors.custom.parts import is_custom
from kvdrift.generator.selectors.policies.policy import Policy
from kvdrift.generator.selectors.policies.scores import ScoringPolicy
from kvdrift.schema.errors import KvdriftError, OperationError, failure_of

MOST_STEPS = 8


@dataclass
class Left:
    """How many of ``streams`` streams still have each prompt entry after a step."""

    streams: int = 0
    of_layer: dict[int, Tensor] = field(default_factory=dict)  # by layer: how many streams have each, [KV heads, m]


def watched_steps(horizon: int) -> list[int]:
    """Return the steps after which a policy's entries are counted: at most 8 steps, evenly spaced."""
    last = horizon - 1  # the last token is drawn and not fed
    return sorted({-(-last * part // MOST_STEPS) for part in range(1, MOST_STEPS + 1)} - {0})


class RuleAround(CacheRule):
    """A wrapper that calls the methods of a rule inside the context of ``calling``."""

    def __init__(self, rule: CacheRule) -> None:
        self.rule = rule
        self.scores, self.cuts_back, self.unsteady = rule.scores, rule.cuts_back, rule.unsteady

    def calling(self) -> AbstractContextManager[None]:
        """Return the context for a call of the wrapped rule; by default one that does nothing."""
        return nullcontext()

    def over(self, entries: int, kv_heads: int) -> CacheRule:
        """Return the rule that the wrapped rule makes over ``entries`` other prompt entries."""
        with self.calling():
            return self.rule.over(entries, kv_heads)

    def first_scores(self, layer: int) -> Tensor:
        """Return the wrapped rule's scores of a layer's prompt entries at the end of the prompt."""
        with self.calling():
            return self.rule.first_scores(layer)

    def before_step(
        self, prompt: Sequence[Sequence[Tensor]], suffixes: Sequence[Sequence[Tensor]], slots: Sequence[Tensor],
        length: int,
    ) -> None:  # fmt: skip
        """Let the wrapped rule change entries."""
        with self.calling():
            self.rule.before_step(prompt, suffixes, slots, length)

    def passes(self, length: int) -> bool:
        """Return whether the wrapped rule has nothing to do when suffixes have ``length`` entries."""
        with self.calling():
            return self.rule.passes(length)

    def replaces(self, length: int) -> bool:
        """Return whether the wrapped rule returns attention of its own when suffixes have ``length`` entries."""
        with self.calling():
            return self.rule.replaces(length)

    def left(self, entries: StreamEntries, scores: Tensor) -> Tensor | None:
        """Return which prompt entries streams still have, by the wrapped rule."""
        with self.calling():
            return self.rule.left(entries, scores)

    def attend_steadily(
        self, entries: StreamEntries, scores: Tensor, length: Tensor, usual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attend steadily by the wrapped rule."""
        with self.calling():
            return self.rule.attend_steadily(entries, scores, length, usual)


class WatchedRule(RuleAround):
    """A wrapper of a rule that counts the remaining prompt entries of its streams after some steps.

    ``left_after`` has the counts by step. A step is missing if no stream was open or the rule had nothing to do. All
    steps are missing if the rule does not report which entries remain.
    """

    def __init__(self, rule: CacheRule, steps: Collection[int]) -> None:
        super().__init__(rule)
        self._steps = frozenset(steps)
        self.left_after: dict[int, Left] = {}

    def attend(self, entries: StreamEntries, scores: Tensor) -> tuple[Tensor | None, Tensor]:
        """Attend by the rule, and count the remaining entries if the step is one of ``steps``."""
        found, after = self.rule.attend(entries, scores)
        length = entries.suffix_key.shape[2]
        if length in self._steps:
            self._count(length, entries, after)
        return found, after

    def watches(self, length: int) -> bool:
        """Return whether the step is one of ``steps`` and the rule has something to do."""
        return length in self._steps and not self.rule.passes(length)

    def after_step(self, entries: StreamEntries, scores: Tensor) -> None:
        """Count the remaining entries of a layer."""
        self._count(entries.suffix_key.shape[2], entries, scores)

    def _count(self, length: int, entries: StreamEntries, after: Tensor) -> None:
        mask = self.rule.left(entries, after)
        if mask is None:
            return
        left = self.left_after.setdefault(length, Left())
        counts = mask[: entries.streams].sum(0)
        if entries.layer in left.of_layer:
            counts += left.of_layer[entries.layer]
        left.of_layer[entries.layer] = counts
        if entries.layer == 0:
            left.streams += entries.streams


def rule_of(policy: Policy, prompt: Sequence[PromptLayer], kept: Sequence[Tensor], budget: int) -> CacheRule:
    """Return a policy's rule for a prompt's streams.

    The rule of a custom policy is guarded: a policy that fails, or returns something of a wrong shape or range, is
    refused, now or when the rule is used. So is a policy whose first cut keeps more entries in one layer than in
    another.
    """
    if not is_custom(policy):
        return policy.rule(prompt, kept, budget)
    name = type(policy).__name__
    if len({index.shape[1] for index in kept}) > 1:
        raise OperationError(
            f"policy {name}: its first cut keeps more entries in one layer than in another; it must keep equally many"
        )
    bounded = policy
    if isinstance(policy, ScoringPolicy) and type(policy).rule is ScoringPolicy.rule:
        bounded = _Bounded(policy)
    with _failing_as_policy(policy):
        rule = bounded.rule(prompt, kept, budget)
    guarded = GuardedRule(policy, rule, budget)
    if rule.scores:
        for layer in prompt:
            guarded.first_scores(layer.number)
    return guarded


class _Bounded(ScoringPolicy):
    """A custom policy whose results are checked for the shapes and the range that ``ScoringPolicy.rule`` relies on."""

    def __init__(self, policy: ScoringPolicy) -> None:
        self._policy = policy

    @property
    def first_cut(self) -> Selector:
        """The selector that chooses a prompt's entries before decoding."""
        return self._policy.first_cut

    @property
    def accumulates(self) -> bool:
        """Whether the policy's scores depend on more queries than the latest."""
        return self._policy.accumulates

    def recent(self, budget: int) -> int:
        """How many of the latest entries the policy never drops; from 1 to ``budget``, or the policy is refused."""
        recent = self._policy.recent(budget)
        if not (isinstance(recent, Integral) and 1 <= recent <= budget):
            self._refuse(f"recent({budget}) is {recent}; it should be a whole number from 1 to {budget}")
        return recent

    def prompt_scores(self, layer: PromptLayer) -> Tensor:
        """The policy's scores, one for each KV head and position."""
        return self._shaped("prompt_scores", self._policy.prompt_scores(layer), layer.key.shape[:2])

    def scored(self, scores: Tensor, weights: Tensor) -> Tensor:
        """The policy's scores after a step, in the shape of ``scores``."""
        return self._shaped("scored", self._policy.scored(scores, weights), scores.shape)

    def _shaped(self, name: str, scores: Tensor, shape: torch.Size) -> Tensor:
        if not isinstance(scores, Tensor):
            self._refuse(f"{name} is of type {type(scores).__name__}; it should be a tensor of the shape {list(shape)}")
        if scores.shape != shape:
            self._refuse(f"{name} has the shape {list(scores.shape)}; it should be {list(shape)}")
        return scores

    def _refuse(self, what: str) -> NoReturn:
        own = type(self._policy)
        file = getattr(sys.modules.get(own.__module__), "__file__", None)
        raise OperationError(f"policy {own.__name__}: {what} ({file})")


class GuardedRule(RuleAround):
    """The rule of a custom policy with m = ``budget``, whose results are checked.

    If ``budget`` is None, the number of remaining entries is not checked.
    """

    def __init__(self, policy: Policy, rule: CacheRule, budget: int | None) -> None:
        super().__init__(rule)
        self._policy, self._budget = policy, budget
        self.unsteady = f"policy {type(policy).__name__} is custom, and its results are checked in every step"

    def calling(self) -> AbstractContextManager[None]:
        """Return a context that turns an exception into an error of one line, which names the policy."""
        return _failing_as_policy(self._policy)

    def over(self, entries: int, kv_heads: int) -> CacheRule:
        """Return a guarded rule over ``entries`` other prompt entries, for the trial of steps (``try_steps``).

        It does not check the number of remaining entries, since the trial runs no earlier steps that drop entries.
        """
        return GuardedRule(self._policy, super().over(entries, kv_heads), None)

    def first_scores(self, layer: int) -> Tensor:
        """Check and return the rule's scores of a layer's prompt entries at the end of the prompt."""
        scores = super().first_scores(layer)
        with self.calling():
            self._check(scores, scores.shape, 0)
        return scores

    def left(self, entries: StreamEntries, scores: Tensor) -> Tensor | None:
        """Return which prompt entries the rule's streams still have; None if it returns another shape or no tensor."""
        found = super().left(entries, scores)
        expected = (*entries.query.shape[:2], entries.prompt_key.shape[1])
        return found if isinstance(found, Tensor) and found.shape == expected else None

    def attend(self, entries: StreamEntries, scores: Tensor) -> tuple[Tensor | None, Tensor]:
        """Attend by the rule, and check that shapes are right and numbers finite."""
        length = entries.suffix_key.shape[2]
        with self.calling():
            found, after = self.rule.attend(entries, scores)
            if self.rule.replaces(length):
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
        """Check the shape of scores, and that the number of finite scores >= 0 is the number of entries left."""
        if not self.scores:
            return
        sound = scores.shape == torch.Size(shape)
        if sound and isinstance(self._policy, ScoringPolicy) and self._budget is not None:
            left = min(self.scores + length, self._budget - 1)  # a place is free for the next token's entry
            sound = bool((((scores >= 0) & scores.isfinite()).sum(-1) == left).all())
        if not sound:
            raise OperationError(
                f"policy {type(self._policy).__name__}: scores at step {length} should be finite, not negative and of "
                f"the shape {list(shape)}"
            )


@contextmanager
def _failing_as_policy(policy: Policy) -> Iterator[None]:
    """Turn an exception inside the block into an error of one line, unless it is kvdrift's own or a lack of memory."""
    try:
        yield
    except (KvdriftError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise OperationError(f"policy {type(policy).__name__}: {failure_of(error, policy)}") from error
