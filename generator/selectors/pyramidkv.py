"""PyramidKV (Cai et al. 2024, arXiv:2406.02069)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from generator.selectors.parameters import at_least
from generator.selectors.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV's scores with more entries in lower layers: besides the window, m falls linearly (section 4.2).

    The last layer has (m - W) / ``beta`` entries besides its window, the first as many more than m - W as the last has
    fewer, but none more than there are; then the last one has what is left. Fractions go to whole entries by largest
    remainder, lower layers first, so that the layers together keep exactly m each on average. The paper's code falls
    back to equal layers for prompts shorter than 2 (m - W); this keeps the pyramid.
    """

    summary: ClassVar[str] = "snapkv with budgets that fall from the first layer to the last"
    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, beta=self.beta)

    def budgets(self, kept: int, entries: int, layers: int) -> Sequence[int]:
        """See ``Selector.budgets``; m does not increase from layer to layer."""
        mean, most = Fraction(kept - self.window), entries - self.window
        first = min(2 * mean - mean / self.beta, Fraction(most))
        step = 2 * (first - mean) / max(layers - 1, 1)
        return whole_shares([self.window + first - step * layer for layer in range(layers)] if layers > 1 else [kept])


def whole_shares(shares: Sequence[Fraction | int]) -> list[int]:
    """``shares`` rounded to whole numbers of the same (whole) sum by largest remainder, the first ones first."""
    floors = [int(share) for share in shares]  # shares are not negative
    left = int(sum(shares)) - sum(floors)
    order = sorted(range(len(shares)), key=lambda place: floors[place] - shares[place])
    return [floor + (place in order[:left]) for place, floor in enumerate(floors)]
