"""Attention over parts of the keys, compared with a float64 softmax over all keys; and prompt chunks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from fixtures.pretend_device import SECOND, TwoDevices
from torch import Tensor

from kvdrift.generator.attention import parts as partial_attention
from kvdrift.generator.attention.parts import attend_causally, attend_part, attend_prompt, join_parts, packed_chunks
from kvdrift.generator.attention.recording import QueryChunk
from kvdrift.generator.attention.threads import torch_threads
from kvdrift.generator.checks.random_models import random_document, random_model
from kvdrift.generator.transformer.prompts import prompt as transformer
from kvdrift.generator.transformer.prompts.prompt import Prompt

# float32 kernels round sums of up to 700 terms; bfloat16 has 8 bits.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}


def parts(keys: int, queries: int, dtype: torch.dtype, batch: int = 1, size: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(keys + queries)
    lengths = (queries, keys, keys)
    query, key, value = (torch.randn(batch, 2, length, size, generator=generator).to(dtype) for length in lengths)
    return query, key, value


def exact(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp written out; a causal query sees keys up to its own place from the end."""
    scores = (query.double() @ key.double().transpose(-1, -2)) * 0.25
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + scores.shape[-1] - scores.shape[-2])
        scores = scores.masked_fill(ahead, -torch.inf)
    return scores.softmax(-1) @ value.double(), scores.logsumexp(-1)


DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE))


@DTYPES
@pytest.mark.parametrize(("keys", "queries"), [(1, 3), (40, 8), (255, 8), (256, 8), (700, 300), (300, 1)])
def test_a_part(keys: int, queries: int, dtype: torch.dtype) -> None:
    """Prompts: few keys take the fused kernel, many the products of oneDNN, 300 queries in more than one go."""
    query, key, value = parts(keys, queries, dtype, batch=2)
    whole = exact(query, key, value)
    for found, wanted in zip(attend_part(query, key, value, 0.25), whole, strict=True):
        assert found.shape == wanted.shape
        assert (found - wanted).abs().max() < TOLERANCE[dtype] * wanted.abs().max()
    for found, wanted in zip(attend_prompt(query[1], key[1], value[1], 0.25), whole, strict=True):
        assert found.shape == wanted[1].shape
        assert (found - wanted[1]).abs().max() < TOLERANCE[dtype] * wanted.abs().max()


@DTYPES
@pytest.mark.parametrize("size", [64, 256, 264, 512])
@pytest.mark.parametrize(("keys", "queries", "causal"), [(40, 40, True), (300, 33, False)])
def test_heads_of_any_size_on_a_device_whose_flash_attention_takes_256(
    size: int, keys: int, queries: int, causal: bool, dtype: torch.dtype  # noqa: FBT001
) -> None:  # fmt: skip
    """Larger heads take the other of CUDA's kernels, whose sums are padded to multiples of 32 queries."""
    given = parts(keys, queries, dtype, size=size)
    with TwoDevices():
        there = attend_part(*(part.to(SECOND) for part in given), 0.25, causal=causal)
        found = [part.cpu() for part in there]
    for result, wanted in zip(found, exact(*given, causal=causal), strict=True):
        assert result.shape == wanted.shape
        assert (result - wanted).abs().max() < TOLERANCE[dtype] * wanted.abs().max()


@DTYPES
@pytest.mark.parametrize(("positions", "length"), [(1, 1), (50, 50), (60, 50), (300, 300), (300, 1), (700, 300)])
def test_the_last_positions_attend_causally(positions: int, length: int, dtype: torch.dtype) -> None:
    """Six query heads on two KV heads; as a whole prompt, and as its last chunk."""
    _, key, value = parts(positions, 1, dtype)
    query = torch.randn(1, 6, length, 16, generator=torch.Generator().manual_seed(length)).to(dtype)
    found = attend_causally(query, key[0], value[0], 0.25)
    wanted, _ = exact(query, *(part.repeat_interleave(3, 1) for part in (key, value)), causal=True)
    assert found.shape == query.shape
    assert found.dtype == dtype
    assert (found - wanted).abs().max() < TOLERANCE[dtype] * wanted.abs().max()


def test_many_keys_are_attended_to_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """700 keys in parts of 96, scores of which may be far apart; causal ones with 128 positions at a time."""
    monkeypatch.setattr(partial_attention, "CHUNK", 96)
    query, key, value = parts(700, 300, torch.float32)
    apart = torch.cat([8 * key[:, :, :96], key[:, :, 96:]], 2)
    for found, wanted in zip(
        attend_prompt(query[0], apart[0], value[0], 0.25), exact(query, apart, value), strict=True
    ):
        assert (found - wanted[0]).abs().max() < 1e-5 * wanted.abs().max()
    found, wanted = attend_causally(query, key[0], value[0], 0.25), exact(query, key, value, causal=True)[0]
    assert (found - wanted).abs().max() < 3e-6 * wanted.abs().max()


def test_joined_rows_do_not_depend_on_those_beside_them() -> None:
    """torch's logaddexp rounds the last rows of contiguous sums differently from the rows before them."""
    generator = torch.Generator().manual_seed(0)
    halves = [(torch.randn(1000, 16, generator=generator), torch.randn(1000, generator=generator)) for _ in range(2)]
    whole = join_parts(*halves)
    for row in range(1000):
        part = slice(row, row + 1)
        for found, wanted in zip(
            join_parts(*((output[part], mass[part]) for output, mass in halves)), whole, strict=True
        ):
            assert torch.equal(found, wanted[part])


def test_scores_far_from_zero_do_not_overflow() -> None:
    query, key, value = parts(300, 8, torch.float32)
    key = key + 1000 * query[:, :, :1] / query[:, :, :1].norm(dim=-1, keepdim=True)
    output, mass = attend_prompt(query[0], key[0], value[0], 1.0)
    wanted = (query[0].double() @ key[0].double().transpose(-1, -2)).logsumexp(-1)
    assert bool(output.isfinite().all())
    assert ((mass - wanted) / wanted).abs().max() < 1e-5


@pytest.mark.parametrize("threads", [1, 2])
def test_queries_do_not_depend_on_those_beside_them(threads: int) -> None:
    query, key, value = (part[0] for part in parts(200, 256, torch.float32))
    with torch_threads(threads):
        whole = attend_prompt(query, key, value, 0.25)
        for count in range(8, 256, 24):
            for part in (slice(count), slice(-count, None)):
                for some, everything in zip(attend_prompt(query[:, part], key, value, 0.25), whole, strict=True):
                    assert torch.equal(some, everything[:, part])


def test_packed_keys_and_few_queries_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """From two queries on, with keys in one part and in several."""
    query, key, value = (part[0] for part in parts(600, 256, torch.float32))
    for chunk in (4096, 250):
        monkeypatch.setattr(partial_attention, "CHUNK", chunk)
        chunks, whole = packed_chunks(key, value), attend_prompt(query, key, value, 0.25)
        for count in (2, 3, 5, 8, 40, 255, 256):
            for given in (None, chunks):
                found = attend_prompt(query[:, :count], key, value, 0.25, chunks=given)
                assert all(torch.equal(one, other[:, :count]) for one, other in zip(found, whole, strict=True))


# --- Chunks of a prompt -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SeenQueries:
    """A statistic that remembers the queries it was shown."""

    def update(self, gathered: list[QueryChunk] | None, chunk: QueryChunk) -> list[QueryChunk]:
        return [*(gathered or []), chunk]


@pytest.mark.parametrize("chunk", [1, 64, 100, 299])
def test_a_prompt_in_chunks_is_the_prompt(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, values, the window (which chunks cut) and the first distribution differ by rounding; statistics see all queries."""
    model, tokens = random_model("qwen3"), random_document("d300", 300).tokens
    tokens = tokens[:40] if chunk == 1 else tokens
    whole = Prompt(model, tokens, window=32, statistics=[SeenQueries()])
    monkeypatch.setattr(transformer, "PREFILL_CHUNK", chunk)
    chunked = Prompt(model, tokens, window=32, statistics=[SeenQueries()])
    assert (chunked.first_distribution - whole.first_distribution).abs().max() < 1e-5
    for one, other in zip(chunked.layers, whole.layers, strict=True):
        for name in ("key", "value", "window_query"):
            assert getattr(one, name).shape == getattr(other, name).shape
            assert (getattr(one, name) - getattr(other, name)).abs().max() < 1e-4, name
        seen, everything = one.gathered(SeenQueries()), other.gathered(SeenQueries())
        assert [part.first for part in seen] == list(range(0, len(tokens), chunk))
        assert all(part.key.shape[1] == part.first + part.query.shape[1] for part in seen)
        assert (torch.cat([part.query for part in seen], 1) - everything[0].query).abs().max() < 1e-4


def test_a_window_longer_than_the_prompt_is_the_prompt() -> None:
    model, tokens = random_model("llama"), random_document("d20", 20).tokens
    layer = Prompt(model, tokens, window=64, statistics=[SeenQueries()]).layers[0]
    assert torch.equal(layer.window_query, layer.gathered(SeenQueries())[0].query)
