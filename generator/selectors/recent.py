"""Recent-token retention with attention sinks (Xiao et al. 2024, StreamingLLM, arXiv:2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from generator.attention import PromptLayer


@dataclass(frozen=True)
class Recent:
    """The first ``sinks`` positions and the most recent others, the same for every head and layer."""

    summary: ClassVar[str] = "initial sink positions and the most recent others"
    window: ClassVar[int] = 0
    sinks: int = 4

    def keep(self, layer: PromptLayer, kept: int) -> Tensor:
        """Positions 0..sinks-1 and n-(kept-sinks)..n-1, int64 [KV heads, kept]."""
        heads, entries, _ = layer.key.shape
        device = layer.key.device
        first = torch.arange(self.sinks, device=device)
        last = torch.arange(entries - (kept - self.sinks), entries, device=device)
        return torch.cat([first, last]).expand(heads, kept)

    def identity(self) -> dict[str, str | int | None]:
        """No scores, so no kernel, pooling or head reduction."""
        return {"kernel": None, "pooling": None, "head_reduction": None}
