"""The interface of decode-time policies (``docs/policies.md``).

The whole prompt is prefilled and the first token is the reference's. The prompt's cache is then cut to m entries.
Before the entry of a fed token joins m other entries, one of them is dropped for good. So no step reads more than m
entries, prompt and generated together.
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
    """Chooses the entries that a step reads; a frozen dataclass, whose fields a study can set."""

    summary: ClassVar[str]  # what is read, in one line for ``kvdrift list policies``
    paper: ClassVar[str | None] = None  # authors, year and arXiv number
    keeps_scores: ClassVar[bool] = False  # whether every stream has scores of its entries

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters by name, defaults included."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]  # a dataclass

    @property
    def least(self) -> int:
        """The smallest m with which the policy works."""
        return 1

    @property
    @abstractmethod
    def first_cut(self) -> Selector:
        """The selector that keeps m entries of a longer prompt, after prefill."""

    @abstractmethod
    def rule(self, prompt: Sequence[PromptLayer], kept: Sequence[Tensor], budget: int) -> CacheRule:
        """Return the rule by which a prompt's streams read entries if m is ``budget``.

        ``prompt`` has for each layer the record of the whole prompt, with the statistics of ``first_cut``. ``kept`` has
        for each layer the positions that the first cut has kept, [KV heads, min(m, n)], ascending.
        """
