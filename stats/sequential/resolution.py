"""The rule that settles a primary endpoint of a sequential study: an interval that is narrow enough, or decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HALF_WIDTH: Final = "half_width"
SIGN: Final = "sign"
EQUIVALENCE: Final = "equivalence"


@dataclass(frozen=True)
class Resolution:
    """The rule that resolves an endpoint (definitions, "Sequential studies")."""

    # ``half_width``: half the interval's width is at most the bound; ``sign``: the interval excludes 0;
    # ``equivalence``: the interval lies inside +-bound, or wholly outside
    rule: str
    bound: float = 0.0  # the target half width or the margin, in the endpoint's unit; 0 for the sign

    def __str__(self) -> str:
        if self.rule == HALF_WIDTH:
            return f"the interval's half width is at most {self.bound:g}"
        if self.rule == EQUIVALENCE:
            return f"the interval lies inside ±{self.bound:g}, or wholly outside"
        return "the interval excludes 0"

    def holds(self, low: float, high: float) -> bool:
        """Tell whether an interval resolves its endpoint; NaN ends do not."""
        if self.rule == HALF_WIDTH:
            return (high - low) / 2 <= self.bound
        outside = low > self.bound or high < -self.bound
        return outside or (self.rule == EQUIVALENCE and -self.bound < low and high < self.bound)
