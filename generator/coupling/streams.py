"""The interface between coupled rollouts and a model: next-token distributions along streams, and shared streams.

A stream is one cache followed along one history. Cache 0 is the reference's, cache a >= 1 is that of the a-th action.
All open streams of a document are at the same position, so that one call advances them together. Transformers implement
this protocol, and so do systems whose distributions are tables.

Distributions are on the decoder's device; tokens and stream numbers are int64 on the CPU, where streams are assigned to
pairs.

Sharing changes no bit of the events, provided that a row's result does not depend on the rows computed with it. It can
be switched off, and tests and checks do so to show this. Fused operations round differently: tokens are equal, delta
and f differ by less than 1e-5 in float32, and exact zeros stay exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class StreamDecoder(ABC):
    """Next-token distributions over the full vocabulary, along streams; tokens are drawn from them.

    Distributions are float64, or float32 for a large V.

    Attributes:
        eos_tokens: Tokens that end a side, possibly none; an ended side continues to emit the first of them.
        device: The device of the distributions, as torch names it.
        sent: The integers of the last ``send``; they are on the distributions' device after the next ``open`` or
            ``advance`` of a stream.
    """

    def __init__(self, eos_tokens: tuple[int, ...], device: str) -> None:
        self.eos_tokens, self.device = eos_tokens, device
        self.sent = torch.empty(0, dtype=torch.int64)

    def send(self, indices: Tensor) -> None:
        """Send integers, int64 of any shape on the CPU, to the distributions' device together with the next step's."""
        self.sent = indices.to(self.device)

    @abstractmethod
    def open(self, caches: Sequence[int]) -> Tensor:
        """Start streams of ``caches``, ascending, at the prompt's end; return the first distributions, [streams, V].

        First distributions are equal for all caches if eviction follows prefill.
        """

    @abstractmethod
    def advance(self, tokens: Tensor) -> Tensor:
        """Append one token, int64 [streams] on the CPU, to each open stream; return next distributions, [streams, V].

        Distributions are valid until the next call. Without open streams only the position advances.
        """

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Replace the open streams: new stream i continues old stream ``rows[i]``.

        Rows are int64 [streams], on the CPU, grouped by cache in ascending order. A row may occur several times or not
        at all. With n streams open, row n + i is parked stream i, with its history up to the present position.
        """

    @property
    @abstractmethod
    def cuts_back(self) -> bool:
        """Whether a parked stream can be continued from positions before the position at which it was parked."""

    @abstractmethod
    def park(self, rows: Tensor, places: Tensor) -> None:
        """Keep the histories of open streams for a later ``select``, as the parked streams ``places``, numbered from 0.

        Both are int64 [parked], on the CPU. A stream that is already parked at one of these places is discarded.
        """

    @abstractmethod
    def rewind(self) -> None:
        """Close the open streams and go back to the end of the prompt; parked streams stay."""

    def say_once(self, line: str) -> None:  # noqa: B027 - only decoders that run on devices have something to say
        """Report a line about decoding, unless the line was reported before; by default nothing is reported."""

    @property
    def ahead(self) -> AheadDecoder | None:
        """The decoder itself, if it can append tokens that only the distributions' device knows; else None."""
        return None


class AheadDecoder(Protocol):
    """A decoder that appends tokens and computes distributions in separate calls; the host need not know the tokens."""

    @property
    def bucket(self) -> Hashable:
        """The shapes and addresses of what ``distributions`` reads; steps of equal buckets do the same operations."""

    def place(self, tokens: Tensor) -> None:
        """Append one token, int64 [streams] on the CPU, to each open stream, of which there is at least one."""

    def feed(self, tokens: Tensor) -> None:
        """Append one token to each open stream without sending anything; streams are those of the last ``place``.

        Tokens are int64, on the distributions' device: first one for each open stream; any further ones are ignored.
        """

    def distributions(self) -> Tensor:
        """Return the distributions after the last tokens, [rows, V], streams' rows first; valid until the next call."""

    def give_up(self) -> None:
        """Undo the last ``feed``; the next ``place`` appends the tokens to use instead."""

    def confirm(self) -> None:
        """Note that the tokens of the last ``place`` or ``feed`` stay: their distributions were used or will be."""


@dataclass(frozen=True)
class SharingOptions:
    """Which computations to share; an attribute says what holds if it is set.

    Attributes:
        share_streams: Replicates, and the two sides of a pair, that follow one cache along equal histories are one
            stream; otherwise a replicate's reference, and both sides of each pair, have streams of their own.
        share_prompt_reads: All streams of a cache read its prompt entries together.
        fused: Whether operations are fused into one launch on CUDA. None: on CUDA, if Triton can build them. True: on
            any device; devices other than CUDA compute the same operations without Triton.
    """

    share_streams: bool = True
    share_prompt_reads: bool = True
    fused: bool | None = None


SHARE_ALL = SharingOptions()


@dataclass(frozen=True)
class DistinctStreams:
    """The distinct streams among the streams that a caller wants, in ascending order of cache."""

    row: Tensor  # the open or parked stream that each distinct stream continues, int64 [streams]
    token: Tensor  # the token with which each continues, int64 [streams]
    cache: Tensor  # int64 [streams]
    place: Tensor  # the distinct stream of each wanted stream, int64 [wanted]
    share: Tensor  # 1 over the number of wanted streams with the same distinct stream, float64 [wanted]
    member: Tensor  # a wanted stream that each distinct stream serves, int64 [streams]


def distinct_streams(cache: Tensor, row: Tensor, token: Tensor, label: Tensor) -> DistinctStreams:
    """Find the distinct streams: two streams are the same if cache, row, token and label are equal.

    Arguments are int64, one element for each wanted stream, on the CPU, not negative: ``row`` is the open or parked
    stream to continue, ``token`` the token to continue with, and unequal labels keep apart streams that would otherwise
    be the same.
    """
    key = torch.zeros_like(cache)
    for part in (cache, row, token, label):
        key = key * (int(part.max()) + 1 if len(part) else 1) + part
    streams, place, wanted = torch.unique(key, return_inverse=True, return_counts=True)
    first = torch.empty_like(streams).scatter_(0, place, torch.arange(len(place)))  # any of the same ones
    return DistinctStreams(row[first], token[first], cache[first], place, 1 / wanted[place].double(), first)
