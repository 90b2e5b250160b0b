"""A custom selector. An action of a study file beside this file names it: selector = "long_keys:LongKeys"

``kvdrift check long_keys:LongKeys``, run in this folder, checks it on small models.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvdrift import PromptLayer, ScoringSelector, at_least


@dataclass(frozen=True)
class LongKeys(ScoringSelector):
    """Keeps the last ``window`` positions, and of the earlier positions those with the longest keys."""

    summary: ClassVar[str] = "last positions and those with the longest keys"
    window: int = 32

    def __post_init__(self) -> None:
        at_least(1, window=self.window)

    def score(self, layer: PromptLayer) -> Tensor:
        """Return the lengths of the keys, float32 [KV heads, n]; positions with the highest scores are kept."""
        return layer.key.float().square().sum(dim=-1).sqrt()
