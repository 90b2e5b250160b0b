"""Decide which computations streams share.

Sharing changes no bit of the events, provided that a row's result does not depend on the rows computed with it. Every
kind of sharing can be switched off, and tests do so to show this. Fused operations round differently: tokens are equal,
delta and f differ by less than 1e-5 in float32, and exact zeros stay exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Savings:
    """The computations to share or to leave out.

    Attributes:
        share_equal_histories: Replicates that follow one cache along equal histories are one stream.
        share_until_parting: A pair's compressed streams along X and Y are one stream while X and Y agree.
        share_reference: A replicate's reference is one stream for all actions.
        drop_ended: A side that has ended has no stream.
        share_prompt_reads: All streams of a cache read its prompt entries together.
        fused: Whether operations are fused into one launch on CUDA. None: on CUDA, if Triton can build them. True: on
            any device, by their plain forms on other devices.
    """

    share_equal_histories: bool = True
    share_until_parting: bool = True
    share_reference: bool = True
    drop_ended: bool = True
    share_prompt_reads: bool = True
    fused: bool | None = None


ALL_SAVINGS = Savings()


@dataclass(frozen=True)
class DistinctStreams:
    """The distinct streams among the wanted streams, in ascending order of cache."""

    row: Tensor  # the open or parked stream that each distinct stream continues, int64 [streams]
    token: Tensor  # the token with which each continues, int64 [streams]
    cache: Tensor  # int64 [streams]
    place: Tensor  # the distinct stream of each wanted stream, int64 [wanted]
    share: Tensor  # 1 over the number of wanted streams with the same distinct stream, float64 [wanted]
    member: Tensor  # a wanted stream that each distinct stream serves, int64 [streams]


def distinct_streams(cache: Tensor, row: Tensor, token: Tensor, label: Tensor) -> DistinctStreams:
    """Find the distinct streams: two streams are the same if cache, row, token and label are equal.

    All are int64 [wanted], on the CPU, not negative: ``row`` is the open or parked stream to continue, and ``token``
    the token to continue with.
    """
    key = torch.zeros_like(cache)
    for part in (cache, row, token, label):
        key = key * (int(part.max()) + 1 if len(part) else 1) + part
    streams, place, wanted = torch.unique(key, return_inverse=True, return_counts=True)
    first = torch.empty_like(streams).scatter_(0, place, torch.arange(len(place)))  # any of the same ones
    return DistinctStreams(row[first], token[first], cache[first], place, 1 / wanted[place].double(), first)
