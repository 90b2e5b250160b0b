"""The law that tokens are drawn by: what a study makes of a model's logits (definitions, "Decoding law")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, Field


def _truncating(top_p: float) -> float | None:
    return None if top_p == 1.0 else top_p  # all tokens together: nothing is left out


Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1), AfterValidator(_truncating)]
TopK = Annotated[int, Field(ge=1, lt=2**31)]


@dataclass(frozen=True)
class SamplingLaw:
    """A next-token law made of logits: first temperature, then ``top_k``, then ``top_p``.

    Attributes:
        temperature: T, which logits are divided by. At 0 the law is greedy: the token of the largest logit, and the
            first of several, has probability 1.
        top_p: Leaves the fewest of the most probable tokens whose probabilities reach it together; None leaves all.
        top_k: Leaves so many of the most probable tokens, and those as probable as the last of them; None leaves all.
    """

    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None

    @classmethod
    def of(cls, row: Any) -> Self:
        """Return the law of a row of table ``studies``."""
        return cls(row["temperature"], row["top_p"], row["top_k"])

    @property
    def greedy(self) -> bool:
        """Whether one token has probability 1, so that every replicate is the same."""
        return self.temperature == 0.0

    @property
    def words(self) -> str:
        """The law in words, as pages have it."""
        if self.greedy:
            return "greedy"
        kept = [f"{name} {value:.12g}" for name, value in (("top-k", self.top_k), ("top-p", self.top_p)) if value]
        return ", ".join([f"temperature {self.temperature:.12g}", *(kept or ["full softmax"])])

    @property
    def other_words(self) -> str:
        """The law in words where it is not the default, which need not be told; else empty."""
        return "" if self == FULL_SOFTMAX else self.words


FULL_SOFTMAX: Final = SamplingLaw()
"""Temperature 1, no token left out: the paper's, and the default."""
