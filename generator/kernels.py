"""What the coupled rollout needs of a model: next-token laws along streams.

A stream is one cache followed along one history. Cache 0 is the reference's, cache a >= 1 that of the a-th action. All
streams of a document stand at the same position, so one call advances them together. Transformers implement this
protocol; so can any system whose laws can be written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class StreamKernels(Protocol):
    """Next-token laws of one document's streams, in float64, full vocabulary, temperature 1."""

    @property
    def vocabulary_size(self) -> int:
        """V, the number of tokens a law ranges over."""

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        """Tokens that end a side; the first one is what an absorbed side goes on emitting. May be empty."""

    @property
    def device(self) -> str:
        """Where laws live, as torch names it."""

    def first_law(self) -> Tensor:
        """The law [V] of position 1, computed before any eviction and therefore common to all caches."""

    def open(self, caches: Sequence[int]) -> None:
        """Start one stream per entry, in order; entry i follows cache ``caches[i]`` from the end of the prompt."""

    def advance(self, tokens: Tensor) -> Tensor:
        """Append one token to each open stream (int64 [rows]) and return the next laws, float64 [rows, V]."""

    def select(self, rows: Tensor) -> None:
        """Replace the open streams: new stream i goes on from old stream ``rows[i]`` (int64), which may recur or not.

        Rows must come grouped by cache in ascending order.
        """
