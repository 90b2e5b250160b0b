"""What a decode-time policy is (definitions, "Interventions").

The whole prompt is prefilled and the first token is the reference's. The prompt's cache is then cut to m entries.
Before the entry of a fed token joins m others, one of these is dropped, by what is known then; it never returns. So no
step reads more than m entries, prompt and generated together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar

from torch import Tensor

from kvdrift.generator.attention.cache_rules import CacheRule
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.selectors import Selector


class Policy(ABC):
    """How the entries that a step reads are chosen; a frozen dataclass, whose fields a study can set.

    Attributes:
        summary: What is read, in a few words.
        paper: Where it is defined, if anywhere.
        keeps_scores: Whether every stream has scores of its entries.
    """

    summary: ClassVar[str]
    paper: ClassVar[str | None] = None
    keeps_scores: ClassVar[bool] = False

    @property
    def parameters(self) -> dict[str, Any]:
        """Its parameters, by name: those that the study sets, and the others' defaults."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]  # a dataclass

    @property
    def least(self) -> int:
        """The smallest m."""
        return 1

    @property
    @abstractmethod
    def first_cut(self) -> Selector:
        """What keeps m entries of a longer prompt, after it was prefilled."""

    @abstractmethod
    def rule(self, prompt: Sequence[PromptLayer], kept: Sequence[Tensor], budget: int) -> CacheRule:
        """What follows a prompt's streams.

        Args:
            prompt: What is known of each layer of the whole prompt, with what ``first_cut`` asked for.
            kept: Of each layer, the positions that the first cut has kept, [KV heads, min(m, n)], ascending.
            budget: m.
        """
