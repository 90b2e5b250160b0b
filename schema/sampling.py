"""How a study draws tokens from a model's logits: temperature and truncation (``docs/quantities.md``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, Field


def _truncating(top_p: float) -> float | None:
    return None if top_p == 1.0 else top_p  # no truncation: all tokens together have probability 1


Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1), AfterValidator(_truncating)]
TopK = Annotated[int, Field(ge=1, lt=2**31)]  # stored as int32


@dataclass(frozen=True)
class Sampling:
    """How logits become a next-token distribution: first temperature, then ``top_k``, then ``top_p``.

    Attributes:
        temperature: T, the divisor of the logits. At 0 sampling is greedy: the token with the largest logit has
            probability 1. On a tie, here and below, the lowest token ids are taken.
        top_p: Keeps the smallest set of most probable tokens whose total probability reaches this; None keeps all.
        top_k: Keeps exactly this many most probable tokens; None keeps all.
    """

    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None

    @classmethod
    def of(cls, row: Any) -> Self:
        """Return the sampling of a study from its row of table ``studies``."""
        return cls(row["temperature"], row["top_p"], row["top_k"])

    @property
    def greedy(self) -> bool:
        """Whether sampling is greedy: one token has probability 1, so that all replicates are equal."""
        return self.temperature == 0.0

    @property
    def words(self) -> str:
        """The sampling in words, as pages show it."""
        if self.greedy:
            return "greedy"
        kept = [f"{name} {value:.12g}" for name, value in (("top-k", self.top_k), ("top-p", self.top_p)) if value]
        return ", ".join([f"temperature {self.temperature:.12g}", *(kept or ["full softmax"])])

    @property
    def other_words(self) -> str:
        """The sampling in words; empty for the default."""
        return "" if self == FULL_SOFTMAX else self.words


FULL_SOFTMAX: Final = Sampling()
"""Temperature 1 without truncation: the paper's sampling, and the default."""
