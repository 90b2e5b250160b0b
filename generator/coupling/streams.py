"""Streams that need no computing of their own, and which of these savings are taken.

Every saving leaves events as they are, to the bit, where rows are computed independently of the rows beside them
(``generator.transformer.loading``); each can be switched off to see that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Savings:
    """What is not computed twice, or at all.

    ``share_equal_histories``: replicates that follow one cache along equal histories are one stream, until they part.
    ``share_until_parting``: a pair's compressed streams along X and along Y are one stream while X and Y agree.
    ``share_reference``: a replicate's reference is one stream for all actions.
    ``drop_ended``: a side that has ended needs no stream.
    ``share_prompt_reads``: all streams of a cache read its prompt entries together.
    """

    share_equal_histories: bool = True
    share_until_parting: bool = True
    share_reference: bool = True
    drop_ended: bool = True
    share_prompt_reads: bool = True


ALL_SAVINGS = Savings()


@dataclass(frozen=True)
class DistinctStreams:
    """The different streams among those wanted, in ascending order of cache."""

    row: Tensor  # int64 [streams]: the open or parked stream that each goes on from
    token: Tensor  # int64 [streams]: the token that each goes on with
    cache: Tensor  # int64 [streams]
    place: Tensor  # int64 [wanted]: which stream each wanted one is
    share: Tensor  # float64 [wanted]: one over the number of wanted streams that are this one


def distinct_streams(cache: Tensor, row: Tensor, token: Tensor, label: Tensor) -> DistinctStreams:
    """Find equal ones among the wanted streams: of one cache, going on from one stream with one token.

    All are int64 [wanted], on the CPU, not negative. Different ``label``s keep equal streams apart.
    """
    key = torch.zeros_like(cache)
    for part in (cache, row, token, label):
        key = key * (int(part.max()) + 1 if len(part) else 1) + part
    streams, place, wanted = torch.unique(key, return_inverse=True, return_counts=True)
    first = torch.empty_like(streams).scatter_(0, place, torch.arange(len(place)))  # any of those that are one
    return DistinctStreams(row[first], token[first], cache[first], place, 1 / wanted[place].double())
