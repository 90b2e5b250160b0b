"""The SnapKV selector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from kvdrift.generator.attention.parts import capped
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.selectors.parameters import at_least
from kvdrift.generator.selectors.selector import ScoringSelector
from kvdrift.schema.errors import InputError


@dataclass(frozen=True)
class SnapKV(ScoringSelector):
    """Keeps the observation window and the earlier positions that it attends to most, per KV head and layer.

    Scores are the softmax attention (scaled, causal) of the last ``window`` queries over the prompt, averaged over the
    window's queries and over the query heads of a KV head. Scores before the window are average-pooled with ``kernel``
    (zero padding at both ends, divided by the kernel size).
    """

    summary: ClassVar[str] = "the observation window and the positions it attends to most"
    paper: ClassVar[str | None] = "Li et al. 2024, arXiv:2404.14469"
    head_reduction: ClassVar[str | None] = "mean over window queries and query heads, before pooling"
    applies_softcap: ClassVar[bool] = True
    window: int = 64
    kernel: int = 5

    def __post_init__(self) -> None:
        at_least(1, window=self.window, kernel=self.kernel)
        if self.kernel % 2 == 0:
            raise InputError(f"kernel = {self.kernel}: must be odd, since a pooling kernel has a middle")

    def score(self, layer: PromptLayer) -> Tensor:
        """Pooled mean attention of the window's queries, float32 [KV heads, n]; 0 within the window."""
        received = window_attention(layer, self.window)[..., : -self.window].mean(dim=(1, 2))
        return pad(avg_pool1d(received, self.kernel, stride=1, padding=self.kernel // 2), (0, self.window))

    def identity(self) -> dict[str, Any]:
        """Columns of the ``actions`` table; ``pooling`` says that only scores before the window are pooled."""
        return super().identity() | {"pooling": "average, before the window"}


def window_attention(layer: PromptLayer, window: int) -> Tensor:
    """Return the softmax attention (scaled, causal) of the last ``window`` queries.

    It is float32 [KV heads, query heads of each, window, n].
    """
    kv_heads, entries, size = layer.key.shape
    query = layer.window_query[:, -window:].float()
    grouped = query.reshape(kv_heads, -1, size)  # [KV heads, query heads of each x window, size]
    logits = capped(grouped @ layer.key.float().transpose(-1, -2) * layer.scaling, layer.terms.softcap)
    last = torch.arange(entries - window, entries, device=logits.device)
    hidden = torch.arange(entries, device=logits.device) > last[:, None]  # [window, n], causal
    return logits.view(kv_heads, -1, window, entries).masked_fill(hidden, float("-inf")).softmax(-1)
