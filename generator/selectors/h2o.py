"""The heavy-hitter selector H2O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvdrift.generator.attention.parts import capped
from kvdrift.generator.attention.recording import PromptLayer, QueryChunk, Statistic
from kvdrift.generator.selectors.selector import ScoringSelector

_LOGITS = 2**24  # attention logits held at once, over all heads: 64 MiB; on a GPU it may be more
_GPU_SHARE = 256  # on a GPU, logits held at once take at most 1/256 of its memory, or 64 MiB if that is more


@dataclass(frozen=True)
class AccumulatedAttention:
    """Statistic: the softmax attention that each position receives, summed over queries, float64 [KV heads, positions].

    Attention is scaled and causal; query heads of a KV head are averaged. It is computed for blocks of queries, so that
    the n x n attention is never in memory. A block is summed in float32, so the last bits of sums depend on the block's
    size. The size is the same on all CPUs, and on all GPUs of one type, whatever else is in their memory.
    """

    def update(self, gathered: Tensor | None, chunk: QueryChunk) -> Tensor:
        """Add the attention of a chunk's queries."""
        kv_heads, entries, size = chunk.key.shape
        heads, queries, _ = chunk.query.shape
        total = chunk.key.new_zeros((kv_heads, entries), dtype=torch.float64)
        if gathered is not None:
            total[:, : gathered.shape[1]] = gathered
        key = chunk.key.float().transpose(-1, -2)
        positions = torch.arange(entries, device=key.device)
        rows = max(1, logits_at_once(key.device) // (heads * entries))
        for first in range(0, queries, rows):
            query = chunk.query[:, first : first + rows].float()
            own = positions[chunk.first + first :][: query.shape[1]]
            seen = chunk.first + first + query.shape[1]  # no query of the block sees further
            logits = capped(query.reshape(kv_heads, -1, size) @ key[..., :seen] * chunk.scaling, chunk.softcap)
            logits = logits.view(kv_heads, -1, len(own), seen)
            logits.masked_fill_(positions[:seen] > own[:, None], float("-inf"))
            total[:, :seen] += logits.softmax(-1).sum(dim=2).mean(dim=1)
        return total


def logits_at_once(device: torch.device) -> int:
    """Return how many attention logits are held at once: more on a GPU, which then launches fewer kernels."""
    if device.type != "cuda":
        return _LOGITS
    most: int = torch.cuda.get_device_properties(device).total_memory // (_GPU_SHARE * torch.float32.itemsize)
    return max(_LOGITS, 1 << (most.bit_length() - 1))


@dataclass(frozen=True)
class H2O(ScoringSelector):
    """Keeps the m/2 most recent positions, and of the earlier ones those with the highest accumulated attention.

    The paper evicts one entry at a time while decoding. After a prefill, its code keeps the m/2 most recent positions
    and, of the others, the m/2 with the highest sum of attention over all queries of the prompt, per head; so does this
    selector. If m is odd, the kept positions with the highest sums are one more than the recent ones. Sums are not
    divided by the number of queries that can see a position.
    """

    summary: ClassVar[str] = "heavy hitters of accumulated attention, and as many recent positions"
    paper: ClassVar[str | None] = "Zhang et al. 2023, arXiv:2306.14048"
    head_reduction: ClassVar[str | None] = "sum over all queries, mean over query heads"
    applies_softcap: ClassVar[bool] = True

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The attention received by each position."""
        return (AccumulatedAttention(),)

    def always_kept(self, kept: int) -> tuple[int, int]:
        """Return that no first position, and the last m/2 positions, are kept whatever their scores are."""
        return 0, kept // 2

    def score(self, layer: PromptLayer) -> Tensor:
        """Accumulated attention, float64 [KV heads, n]."""
        return layer.gathered(AccumulatedAttention())
