"""The selector that keeps every entry: the control."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.selectors.selector import Selector


@dataclass(frozen=True)
class Full(Selector):
    """Keeps all n prompt entries, which are gathered and decoded in the same way as if some were evicted."""

    summary: ClassVar[str] = "every prompt entry (the control)"

    def keep(self, layer: PromptLayer, kept: int) -> Tensor:
        """All positions in order, int64 [KV heads, n]."""
        return torch.arange(kept, device=layer.key.device).expand(layer.key.shape[0], kept)
