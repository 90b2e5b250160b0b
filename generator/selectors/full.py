"""Keeping everything: the control that must not move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from generator.attention import PromptLayer


@dataclass(frozen=True)
class Full:
    """All n prompt entries, through the same gather and decoding as any eviction."""

    summary: ClassVar[str] = "every prompt entry (the control)"
    window: ClassVar[int] = 0
    sinks: ClassVar[int] = 0

    def keep(self, layer: PromptLayer, kept: int) -> Tensor:
        """All positions in order, int64 [KV heads, n]."""
        return torch.arange(kept, device=layer.key.device).expand(layer.key.shape[0], kept)

    def identity(self) -> dict[str, str | int | None]:
        """No scores, so no kernel, pooling or head reduction."""
        return {"kernel": None, "pooling": None, "head_reduction": None}
