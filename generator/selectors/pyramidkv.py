"""The PyramidKV selector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from kvdrift.generator.selectors.parameters import at_least
from kvdrift.generator.selectors.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV's scores with more entries in lower layers: besides the window, m falls linearly (section 4.2).

    Let W be the window. Besides it, the last layer keeps (m - W) / ``beta`` entries, and the first layer 2 (m - W)
    minus that number. If the prompt has fewer, the first layer keeps all, and the last layer 2 (m - W) minus their
    number. Fractions are rounded by largest remainder, of equal ones the lower layers' first, so that the mean over
    layers is exactly m. For prompts shorter than 2 (m - W), the paper's code gives all layers the same number of
    entries; here the number falls linearly for these prompts, too.
    """

    summary: ClassVar[str] = "snapkv with budgets that fall from the first layer to the last"
    paper: ClassVar[str | None] = "Cai et al. 2024, arXiv:2406.02069"
    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, beta=self.beta)

    def budgets(self, kept: int, entries: int, layers: int) -> Sequence[int]:
        """m of each layer, layer 0 first, never increasing; the mean is exactly ``kept``."""
        mean, most = Fraction(kept - self.window), entries - self.window
        first = min(2 * mean - mean / self.beta, Fraction(most))
        step = 2 * (first - mean) / max(layers - 1, 1)
        return whole_shares([self.window + first - step * layer for layer in range(layers)] if layers > 1 else [kept])


def whole_shares(shares: Sequence[Fraction | int]) -> list[int]:
    """Round ``shares``, of a whole sum, to whole numbers of that sum: by largest remainder, of equal ones the first."""
    floors = [int(share) for share in shares]  # shares are not negative
    left = int(sum(shares)) - sum(floors)
    order = sorted(range(len(shares)), key=lambda place: floors[place] - shares[place])
    return [floor + (place in order[:left]) for place, floor in enumerate(floors)]
