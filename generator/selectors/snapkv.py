"""SnapKV (Li et al. 2024, arXiv:2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from generator.attention import PromptLayer
from schema.errors import InputError


@dataclass(frozen=True)
class SnapKV:
    """The observation window and the earlier positions that it attends to most, per KV head and layer.

    Scores are the softmax attention (scaled, causal) of the last ``window`` queries over the prompt, averaged over the
    window's queries and over the query heads of a KV head; those of positions before the window are average-pooled
    with ``kernel`` (zero padding at both ends, divided by the kernel size).
    """

    summary: ClassVar[str] = "the observation window and the positions it attends to most"
    sinks: ClassVar[int] = 0
    window: int = 64
    kernel: int = 5

    def __post_init__(self) -> None:
        if self.window < 1:
            raise InputError(f"window = {self.window}: SnapKV scores by at least 1 query")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise InputError(f"kernel = {self.kernel}: a pooling kernel has a middle, so it must be odd")

    def keep(self, layer: PromptLayer, kept: int) -> Tensor:
        """Top ``kept - window`` pooled scores and the window, int64 [KV heads, kept]; earlier positions win ties."""
        before = layer.key.shape[1] - self.window
        pooled = avg_pool1d(self.scores(layer), self.kernel, stride=1, padding=self.kernel // 2)
        ranked = torch.argsort(pooled, dim=-1, descending=True, stable=True)
        chosen = ranked[:, : kept - self.window].sort(-1).values
        window = torch.arange(before, before + self.window, device=chosen.device).expand(len(chosen), self.window)
        return torch.cat([chosen, window], dim=-1)

    def scores(self, layer: PromptLayer) -> Tensor:
        """Mean attention that each position before the window receives from it, float32 [KV heads, n - window]."""
        kv_heads, entries, size = layer.key.shape
        query = layer.window_query[:, -self.window :].float()
        grouped = query.reshape(kv_heads, -1, size)  # [KV heads, query heads of it x window, size]
        logits = grouped @ layer.key.float().transpose(-1, -2) * layer.scaling
        window = torch.arange(entries - self.window, entries, device=logits.device)
        hidden = torch.arange(entries, device=logits.device) > window[:, None]  # [window, n], causal
        logits = logits.view(kv_heads, -1, self.window, entries).masked_fill(hidden, float("-inf"))
        return logits.softmax(-1)[..., : entries - self.window].mean(dim=(1, 2))

    def identity(self) -> dict[str, str | int | None]:
        """Mean over the window's queries, then over the query heads of a KV head, then pooling."""
        return {
            "kernel": self.kernel,
            "pooling": "average, before the window",
            "head_reduction": "mean over window queries and query heads, before pooling",
        }
