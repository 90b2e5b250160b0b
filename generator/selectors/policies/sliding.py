"""The policy of a sliding window with attention sinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvdrift.generator.attention.cache_rules import CacheRule, StreamEntries, attend_with_weights
from kvdrift.generator.attention.parts import PartialAttention, attend_part, attend_prompt, join_parts, with_sinks
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.selectors import Recent, Selector
from kvdrift.generator.selectors.parameters import at_least
from kvdrift.generator.selectors.policies.policy import Policy


@dataclass(frozen=True)
class Sliding(Policy):
    """Reads the first ``sinks`` positions of the prompt and the most recent others, including the token being fed."""

    summary: ClassVar[str] = "initial sink positions and a window of the most recent entries, which moves"
    paper: ClassVar[str | None] = "Xiao et al. 2024, StreamingLLM, arXiv:2309.17453"
    sinks: int = 4

    def __post_init__(self) -> None:
        at_least(0, sinks=self.sinks)

    @property
    def least(self) -> int:
        """The smallest m: the sinks and the token being fed."""
        return self.sinks + 1

    @property
    def first_cut(self) -> Selector:
        """The selector of the sinks and of the most recent other positions of the prompt."""
        return Recent(self.sinks)

    def rule(self, prompt: Sequence[PromptLayer], kept: Sequence[Tensor], budget: int) -> CacheRule:  # noqa: ARG002
        """Return the rule that reads slices of prompt entries and suffixes; it keeps no scores of entries."""
        entries = kept[0].shape[1]
        return _Slices(budget, entries, min(self.sinks, entries))


@dataclass(frozen=True)
class _Slices(CacheRule):
    """Reads the first ``sinks`` of ``entries`` prompt entries, and the latest entries: ``budget`` entries in all."""

    unsteady = None
    budget: int
    entries: int
    sinks: int

    def over(self, entries: int, kv_heads: int) -> CacheRule:  # noqa: ARG002
        """Return the same rule over ``entries`` other prompt entries, with m equal to that number."""
        return _Slices(entries, entries, min(self.sinks, entries))

    def passes(self, length: int) -> bool:
        """Whether no entry has been dropped by the time that suffixes have ``length`` entries."""
        return self.entries + length <= self.budget

    def replaces(self, length: int) -> bool:
        """Whether an entry has been dropped by the time that suffixes have ``length`` entries."""
        return not self.passes(length)

    def left(self, entries: StreamEntries, scores: Tensor) -> Tensor:  # noqa: ARG002
        """Mark the sinks and the prompt entries in the window, bool [R, KV heads, entries]."""
        rows, kv_heads = entries.query.shape[:2]
        places = torch.arange(self.entries, device=entries.query.device)
        first = self._first(entries.suffix_key.shape[2])
        return ((places < self.sinks) | (places >= first)).expand(rows, kv_heads, -1)

    def _first(self, length: int) -> int:
        """The index of the window's first entry, with the prompt's first as 0, if the suffix has ``length`` entries."""
        return self.sinks + self.entries + length - self.budget

    def attend(self, entries: StreamEntries, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to the sinks, and to the window's prompt entries and suffix entries."""
        query, softcap = entries.query, entries.terms.softcap
        rows, kv_heads, group, size = query.shape
        length = entries.suffix_key.shape[2]
        first = self._first(length)
        own = slice(max(first - self.entries, 0), length)
        key, value = entries.suffix_key[:, :, own], entries.suffix_value[:, :, own]
        joint = attend_part(query, key, value, entries.scaling, softcap=softcap)
        packed = query.transpose(0, 1).reshape(kv_heads, rows * group, size)
        for part in (slice(first, self.entries), slice(self.sinks)):
            if part.stop > (part.start or 0):
                key, value = entries.prompt_key[:, part], entries.prompt_value[:, part]
                output, mass = attend_prompt(packed, key, value, entries.scaling, softcap)
                shared = output.view(kv_heads, rows, group, size), mass.view(kv_heads, rows, group)
                joint = join_parts(joint, _by_rows(shared))
        return with_sinks(*joint, entries.terms.sinks).to(query.dtype), scores

    def attend_steadily(
        self, entries: StreamEntries, scores: Tensor, length: Tensor, usual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attend as ``attend`` does, by one softmax in which the entries between sinks and window are hidden."""
        rows, kv_heads = entries.query.shape[:2]
        place = torch.arange(self.entries + entries.suffix_key.shape[2], device=entries.query.device)
        joined = self.entries + length
        between = (place >= self.sinks) & (place < self.sinks + joined - self.budget)
        hidden = torch.zeros_like(place, dtype=torch.float32).masked_fill_(between | (place >= joined), -torch.inf)
        output, _ = attend_with_weights(entries, hidden.expand(rows, kv_heads, -1))
        return torch.where(joined > self.budget, output, usual), scores


def _by_rows(part: PartialAttention) -> PartialAttention:
    output, mass = part
    return torch.transpose(output, 0, 1), torch.transpose(mass, 0, 1)
