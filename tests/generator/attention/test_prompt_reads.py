"""Reads of prompt entries: who reads together, in tiles of how many rows, and that no bit of attention depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from fixtures.common_actions import CONTROL, HALF_SNAPKV
from torch import Tensor

from kvdrift.generator.attention import prompt_reads
from kvdrift.generator.attention.parts import PLAIN, LayerTerms
from kvdrift.generator.attention.prompt_reads import PrefixLayer, PromptReads, with_packed_keys
from kvdrift.generator.checks.random_models import random_document, random_model

KV_HEADS, GROUP, SIZE = 2, 3, 16


def layer(entries: int, seed: int) -> PrefixLayer:
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(KV_HEADS, entries, SIZE, generator=generator) for _ in range(2))
    return PrefixLayer(key, value)


def plain(cache: PrefixLayer, query: Tensor, softcap: float | None = None) -> tuple[Tensor, Tensor]:
    """Attention of one row, [KV heads, group, size], in float64; 0 and minus infinity without entries."""
    scores = query.double() @ cache.key.double().mT * 0.25
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    return scores.softmax(-1) @ cache.value.double(), scores.logsumexp(-1)


def attended(
    caches: Sequence[Sequence[PrefixLayer]], streams: Tensor, grouped: Tensor, few: int
) -> tuple[Tensor, Tensor]:
    reads = PromptReads(caches, [128] * len(caches), 8, few)
    indices = reads.pack(streams, torch.arange(len(streams)))
    return reads.attend(0, grouped, indices, 0.25, 1, lambda _: False)


@pytest.mark.parametrize("entries", [40, 300, 700])
def test_each_stream_attends_to_its_cache(entries: int) -> None:
    """Caches 0 and 2 have the same tensors; 40 entries take other kernels than 300."""
    first, other = layer(entries, 1), layer(entries + 20, 2)
    streams = torch.tensor([0, 0, 1, 1, 1, 2, 3])
    grouped = torch.randn(8, KV_HEADS, GROUP, SIZE, generator=torch.Generator().manual_seed(0))
    caches = [[first], [other], [first], [layer(entries, 3)]]
    found = attended(caches, streams, grouped, few=1)
    for few, own in ((8, caches), (2, [with_packed_keys(cache) for cache in caches])):
        again = attended(own, streams, grouped, few)
        assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    for stream, cache in enumerate(streams.tolist()):
        for one, wanted in zip(found, plain(caches[cache][0], grouped[stream]), strict=True):
            assert (one[stream] - wanted).abs().max() < 3e-6 * wanted.abs().max()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("lengths", [(40, 31), (17, 0), (300, 3), (260, 700)])
def test_heads_attend_to_their_own_entries(lengths: tuple[int, int], softcap: float | None) -> None:
    """A head attends as if it were alone, whatever padding holds, beside even caches, and for any number of rows."""
    most = max(lengths)
    whole, even = layer(most, 1), layer(most, 2)
    padded = [part.clone() for part in (whole.key, whole.value)]
    for part, head in product(padded, range(KV_HEADS)):
        part[head, lengths[head] :] = torch.nan
    terms = PLAIN if softcap is None else LayerTerms(softcap=softcap)
    ragged = PrefixLayer(*padded, terms, lengths=lengths)
    caches = [[ragged], [replace(even, terms=terms)], [replace(ragged, key=padded[0].clone())]]
    grouped = torch.randn(24, KV_HEADS, GROUP, SIZE, generator=torch.Generator().manual_seed(0))
    streams = torch.tensor([0, 0, 0, 1, 2, 2])
    found = attended(caches, streams, grouped, few=1)
    for own in (caches, [with_packed_keys(cache) for cache in caches]):
        again = attended(own, torch.tensor([0] * 3 + [1] * 12 + [2] * 2), grouped, few=2)
        for part, other in zip(found, again, strict=True):
            assert torch.equal(part[:4], other[:4])
    for stream, head in product((0, 1, 2, 4, 5), range(KV_HEADS)):
        alone = PrefixLayer(*(part[head : head + 1, : lengths[head]] for part in padded))
        wanted = plain(alone, grouped[stream, head : head + 1], softcap)
        for part, exact in zip(found, wanted, strict=True):
            assert torch.allclose(part[stream, head].double(), exact[0], atol=3e-6, rtol=3e-6)


def test_few_streams_are_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the first cache with one of its twin, and one of another; fewer than 256 entries are read by eight."""
    seen: list[tuple[int, int]] = []
    attend = prompt_reads.attend_prompt

    def counting(query: Tensor, key: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        seen.append((query.shape[1], key.shape[1]))
        return attend(query, key, *others)

    monkeypatch.setattr(prompt_reads, "attend_prompt", counting)
    first = layer(300, 1)
    caches = [[first], [layer(400, 2)], [first], [layer(40, 3)]]
    attended(caches, torch.tensor([0, 0, 1, 2, 3]), torch.randn(8, KV_HEADS, GROUP, SIZE), few=1)
    assert seen == [(3 * GROUP, 300), (GROUP, 400), (8 * GROUP, 40)]


def test_a_control_has_the_prompts_own_entries_and_a_cut_has_not() -> None:
    """Keys are packed once for the control and the reference."""
    prepared = random_model("llama").prepare(random_document("d300", 300), [CONTROL, HALF_SNAPKV], 8)
    whole, control, half = (cache.layers for cache in prepared.caches.caches)
    assert all(own is its for own, its in zip(whole, control, strict=True))
    assert not any(own.key is its.key for own, its in zip(whole, half, strict=True))
