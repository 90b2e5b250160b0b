"""Keeping everything: the control that must not move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from generator.attention.recording import PromptLayer
from generator.selectors.selector import Selector


@dataclass(frozen=True)
class Full(Selector):
    """All n prompt entries, through the same gather and decoding as any eviction."""

    summary: ClassVar[str] = "every prompt entry (the control)"

    def keep(self, layer: PromptLayer, kept: int) -> Tensor:
        """All positions in order, int64 [KV heads, n]."""
        return torch.arange(kept, device=layer.key.device).expand(layer.key.shape[0], kept)
