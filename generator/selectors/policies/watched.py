"""Rules around other rules; one counts which prompt entries streams still have after some steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor

from kvdrift.generator.attention.cache_rules import CacheRule, StreamEntries

MOST_STEPS = 8


@dataclass
class Left:
    """The prompt entries that streams still have after a step.

    Attributes:
        streams: The number of streams.
        of_layer: How many streams have each entry, int64 [KV heads, entries of the cache], by the layer's number.
    """

    streams: int = 0
    of_layer: dict[int, Tensor] = field(default_factory=dict)


def watched_steps(horizon: int) -> list[int]:
    """Return the steps after which a policy's entries are counted: up to 8, evenly spaced."""
    last = horizon - 1  # the last token is drawn and not fed
    return sorted({-(-last * part // MOST_STEPS) for part in range(1, MOST_STEPS + 1)} - {0})


class RuleAround(CacheRule):
    """Another rule, whose methods are called inside the context of ``calling``."""

    def __init__(self, rule: CacheRule) -> None:
        self.rule = rule
        self.scores, self.cuts_back = rule.scores, rule.cuts_back

    def calling(self) -> AbstractContextManager[None]:
        """Return the context of every call; by default an empty one."""
        return nullcontext()

    def over(self, entries: int, kv_heads: int) -> CacheRule:
        """Return the other rule over other entries."""
        with self.calling():
            return self.rule.over(entries, kv_heads)

    def first_scores(self, layer: int) -> Tensor:
        """Return the rule's first scores."""
        with self.calling():
            return self.rule.first_scores(layer)

    def before_step(
        self, prompt: Sequence[Sequence[Tensor]], suffixes: Sequence[Sequence[Tensor]], slots: Sequence[Tensor],
        length: int,
    ) -> None:  # fmt: skip
        """Call the rule."""
        with self.calling():
            self.rule.before_step(prompt, suffixes, slots, length)

    def passes(self, length: int) -> bool:
        """Ask the rule."""
        with self.calling():
            return self.rule.passes(length)

    def replaces(self, length: int) -> bool:
        """Ask the rule."""
        with self.calling():
            return self.rule.replaces(length)

    def left(self, entries: StreamEntries, scores: Tensor) -> Tensor | None:
        """Ask the rule."""
        with self.calling():
            return self.rule.left(entries, scores)


class WatchedRule(RuleAround):
    """Another rule, whose streams' remaining entries are counted after some steps.

    Attributes:
        left_after: The counts so far, by step; steps are missing if no stream was open, if the rule had nothing to do,
            or if the rule does not say which entries are left.
    """

    def __init__(self, rule: CacheRule, steps: Collection[int]) -> None:
        super().__init__(rule)
        self._steps = frozenset(steps)
        self.left_after: dict[int, Left] = {}

    def attend(self, entries: StreamEntries, scores: Tensor) -> tuple[Tensor | None, Tensor]:
        """Attend by the rule, and count after some steps."""
        found, after = self.rule.attend(entries, scores)
        length = entries.suffix_key.shape[2]
        if length in self._steps:
            self._count(length, entries, after)
        return found, after

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
