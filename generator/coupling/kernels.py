"""The interface between coupled rollouts and a model: next-token laws along streams.

A stream is one cache followed along one history. Cache 0 is the reference's, cache a >= 1 is that of the a-th action.
All open streams of a document are at the same position, so that one call advances them together. Transformers implement
this protocol, and so do systems whose laws are tables.

Laws are on the kernels' device; tokens and stream numbers are int64 on the CPU, where streams are assigned to pairs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from torch import Tensor


class StreamKernels(Protocol):
    """Next-token laws of one document's streams over the full vocabulary, by which tokens are drawn.

    Laws are float64, or float32 for a large V.
    """

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        """Tokens that end a side, possibly none; an ended side continues to emit the first of them."""

    @property
    def device(self) -> str:
        """The device of the laws, as torch names it."""

    @property
    def sent(self) -> Tensor:
        """The integers sent last; they are on the laws' device after the next ``open`` or ``advance`` of a stream."""

    def send(self, indices: Tensor) -> None:
        """Send integers, int64 of any shape on the CPU, to the laws' device, with what the next step needs there."""

    def open(self, caches: Sequence[int]) -> Tensor:
        """Start streams of ``caches``, ascending, at the end of the prompt; return laws of position 1, [streams, V].

        They are equal for all caches if eviction follows prefill.
        """

    def advance(self, tokens: Tensor) -> Tensor:
        """Append one token, int64 [streams] on the CPU, to each open stream; return the next laws, [streams, V].

        Laws are valid until the next call. Without open streams only the position advances.
        """

    def select(self, rows: Tensor) -> None:
        """Replace the open streams: new stream i continues old stream ``rows[i]``.

        Rows are int64 [streams], on the CPU, grouped by cache in ascending order. A row may occur several times or not
        at all. With n streams open, row n + i is parked stream i, with its history up to the present position.
        """

    @property
    def cuts_back(self) -> bool:
        """Whether a parked stream can be continued from positions before the position at which it was parked."""

    def park(self, rows: Tensor, places: Tensor) -> None:
        """Keep the histories of open streams for a later ``select``, as the parked streams ``places``, numbered from 0.

        Both are int64 [parked], on the CPU. A stream already parked at such a place is given up.
        """

    def rewind(self) -> None:
        """Close the open streams and go back to the end of the prompt; parked streams stay."""

    @property
    def ahead(self) -> AheadKernels | None:
        """These kernels, if they can append tokens that only the laws' device knows; else None."""


class AheadKernels(Protocol):
    """Kernels that append tokens and compute laws in separate calls; only the device need know the tokens."""

    @property
    def bucket(self) -> Hashable:
        """The shapes and addresses of what ``laws`` reads; steps with equal ones do the same operations."""

    def place(self, tokens: Tensor) -> None:
        """Append one token, int64 [streams] on the CPU, to each open stream, of which there is at least one."""

    def feed(self, tokens: Tensor) -> None:
        """Append one token to each open stream without sending anything; streams are those of the last ``place``.

        Tokens are int64, on the laws' device: the token of each open stream, then any others.
        """

    def laws(self) -> Tensor:
        """Return the laws after the last tokens, [rows, V], those of streams first; valid until the next call."""

    def give_up(self) -> None:
        """Take the last ``feed`` back, whose tokens the next ``place`` replaces."""
