"""The selector of recent tokens and attention sinks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.selectors.parameters import at_least
from kvdrift.generator.selectors.selector import Selector


@dataclass(frozen=True)
class Recent(Selector):
    """Keeps the first ``sinks`` positions and the most recent others, the same for every head and layer."""

    summary: ClassVar[str] = "initial sink positions and the most recent others"
    paper: ClassVar[str | None] = "Xiao et al. 2024, StreamingLLM, arXiv:2309.17453"
    sinks: int = 4

    def __post_init__(self) -> None:
        at_least(0, sinks=self.sinks)

    def keep(self, layer: PromptLayer, kept: int) -> Tensor:
        """Positions 0..sinks-1 and n-(kept-sinks)..n-1, int64 [KV heads, kept]."""
        heads, entries, _ = layer.key.shape
        device = layer.key.device
        first = torch.arange(self.sinks, device=device)
        last = torch.arange(entries - (kept - self.sinks), entries, device=device)
        return torch.cat([first, last]).expand(heads, kept)
