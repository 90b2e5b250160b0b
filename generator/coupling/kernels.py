"""What coupled rollouts and residual branching need of a model: next-token laws along streams.

A stream is one cache followed along one history. Cache 0 is the reference's, cache a >= 1 that of the a-th action. All
open streams of a document stand at the same position, so one call advances them together. Transformers implement this
protocol, and so do systems whose laws are tables.

Laws lie on the kernels' device; tokens and stream numbers are int64 on the CPU, where it is decided who needs which
stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class StreamKernels(Protocol):
    """Next-token laws of one document's streams over the full vocabulary, at temperature 1.

    They are float64, or float32 where V is large.
    """

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        """Tokens that end a side; the first one is what an absorbed side goes on emitting. May be empty."""

    @property
    def device(self) -> str:
        """Where laws live, as torch names it."""

    def open(self, caches: Sequence[int]) -> Tensor:
        """Start one stream per entry at the end of the prompt, and return the laws of position 1, [streams, V].

        Entry i follows cache ``caches[i]``; entries ascend. Where eviction follows prefill, all these laws are one.
        """

    def advance(self, tokens: Tensor) -> Tensor:
        """Append one token to each open stream, [streams], and return the next laws, [streams, V].

        They are there until the next call. Without open streams the position alone moves on.
        """

    def select(self, rows: Tensor) -> None:
        """Replace the open streams: new stream i goes on from old stream ``rows[i]``, which may recur or not.

        With n streams open, row n + i is the i-th parked stream, which enters with its history up to the present
        position. Rows must come grouped by cache in ascending order.
        """

    def park(self, rows: Tensor) -> None:
        """Keep the histories of open streams ``rows`` for a later ``select``, in order after those parked."""

    def rewind(self) -> None:
        """Close the open streams and go back to the end of the prompt; parked streams stay."""
