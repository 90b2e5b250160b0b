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
    """Keeps the entries with SnapKV's highest scores, more of them in lower layers (section 4.2).

    Let W be the window, which all layers keep. The number of other entries falls linearly from layer to layer: the last
    layer keeps (m - W) / ``beta``, and the first layer 2 (m - W) minus that number. If the prompt has fewer entries
    before its window than the first layer's number, the first layer keeps them all, and the last layer 2 (m - W) minus
    their number. Fractions are rounded by largest remainder, of equal remainders the lower layers' first, so that the
    mean over layers is exactly m. For prompts shorter than 2 (m - W), the paper's code gives all layers the same number
    of entries; here the number falls linearly for these prompts, too.
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
    """Round ``shares``, whose sum is a whole number, to whole numbers with the same sum.

    The shares with the largest remainders are rounded up, of equal remainders the first, and all others down.
    """
    floors = [int(share) for share in shares]  # shares are not negative
    left = int(sum(shares)) - sum(floors)
    order = sorted(range(len(shares)), key=lambda place: floors[place] - shares[place])
    return [floor + (place in order[:left]) for place, floor in enumerate(floors)]
