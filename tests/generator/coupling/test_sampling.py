"""Laws as they are deployed: transformers' own warpers, plain definitions, ties, and rows that do not meet."""

from __future__ import annotations

from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles.plain_distributions import plain_distribution
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kvdrift.generator.coupling import sampling
from kvdrift.generator.coupling.sampling import deployed, deployed_table
from kvdrift.schema.sampling import FULL_SOFTMAX, Sampling

GREEDY = Sampling(0.0)
LAWS = [
    Sampling(temperature, top_p, top_k)
    for temperature, top_p, top_k in product((0.3, 1.0, 2.5), (None, 0.23, 0.91, 0.999), (None, 1, 5, 5000))
]


def made(logits: Tensor, sampling: Sampling, dtype: torch.dtype = torch.float64) -> Tensor:
    out = torch.full(logits.shape, torch.nan, dtype=dtype)
    deployed(logits, sampling, out)
    return out


def by_transformers(logits: Tensor, sampling: Sampling) -> Tensor:
    """Its warpers in the order of its ``generate``."""
    ids, scores = torch.empty(0), TemperatureLogitsWarper(sampling.temperature)(torch.empty(0), logits)
    if sampling.top_k is not None:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p is not None:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize("size", [7, 1500])
def test_laws_are_those_of_transformers(size: int) -> None:
    """Logits without ties: the same tokens are left, and probabilities round at the 15th digit."""
    logits = 4 * torch.randn(8, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    for law in LAWS:
        ours, theirs = made(logits, law), by_transformers(logits, law)
        assert torch.equal(ours > 0, theirs > 0), law
        assert (ours - theirs).abs().max() < 1e-14, law


# Logits, a law and its tokens, from reports of samplers that left too many or too few tokens.
REPORTED = {
    "vllm-project/tpu-inference#3580: two logits of 16 bits are the largest": (
        [21.375, 21.375, 20.0, 3.0], Sampling(top_k=1), [0],
    ),
    "vllm-project/vllm#50979: the k-th largest logit occurs twice": (
        [5.0, 2.0, 4.0, 2.0, 1.0], Sampling(top_k=3), [0, 1, 2],
    ),
    "flashinfer-ai/flashinfer#3774: two equal probabilities at the border": (
        np.log([0.4, 0.3, 0.3, 1e-9]).tolist(), Sampling(top_k=2), [0, 1],
    ),
    "flashinfer-ai/flashinfer#3774: the same for top-p": (
        np.log([0.4, 0.3, 0.3, 1e-9]).tolist(), Sampling(top_p=0.6), [0, 1],
    ),
    "Biohub/esm#360: the token that crosses top-p belongs to the set": (
        np.log([0.4, 0.3, 0.2, 0.1]).tolist(), Sampling(top_p=0.8), [0, 1, 2],
    ),
    "rasbt/reasoning-from-scratch#164: so does a second one": (
        np.log([0.5, 0.41, 0.09]).tolist(), Sampling(top_p=0.9), [0, 1],
    ),
    "ml-explore/mlx-lm#1912: a tiny top-p leaves the most probable token": (
        [0.5, 3.0, 1.0, 3.0], Sampling(0.8, 1e-8), [1],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("logits", "sampling", "tokens"), REPORTED.values(), ids=REPORTED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_reported_logits_leave_the_right_tokens(
    logits: list[float], sampling: Sampling, tokens: list[int], dtype: torch.dtype
) -> None:
    out = made(torch.tensor([logits], dtype=dtype), sampling, torch.float32)
    assert out[0].nonzero().view(-1).tolist() == tokens


@given(
    logits=st.lists(st.lists(st.integers(-4, 2), min_size=6, max_size=6), min_size=1, max_size=5),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.none() | st.integers(1, 8),
    top_p=st.none() | st.floats(0.01, 0.99),
    few=st.sampled_from([(), (1,), (2, 4)]),
    can_look=st.booleans(),
)
def test_ties_leave_the_tokens_of_the_definition(
    *,
    logits: list[list[int]],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    few: tuple[int, ...],
    can_look: bool,
) -> None:
    """Any logits with ties, with few tokens tried first, and as on a GPU, where nothing is read on the way."""
    law = Sampling(temperature, top_p, top_k)
    if top_p is not None:  # rounding decides only where a sum is top_p but for the last digits
        for row in logits:
            sums = np.cumsum(np.sort(plain_distribution(row, Sampling(temperature, None, top_k)))[::-1])
            assume(np.abs(sums - top_p).min() > 1e-9)
    wanted = np.stack([plain_distribution(row, law) for row in logits])
    with mock.patch.multiple(sampling, _FIRST_COUNTS=few, _host_may_read=mock.Mock(return_value=can_look)):
        found = made(torch.tensor(logits, dtype=torch.float64), law).numpy()
    assert np.array_equal(found > 0, wanted > 0)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.1, 4.0], ids=["flat", "peaked"])
def test_large_vocabularies_leave_the_first_tokens_in_order(dtype: torch.dtype, spread: float) -> None:
    """Against a stable sort of each row: exactly k tokens, and the fewest whose probabilities reach top-p."""
    logits = (spread * torch.randn(3, 6000, generator=torch.Generator().manual_seed(4))).to(dtype)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices
    for law in (Sampling(top_k=50), Sampling(top_k=5999), Sampling(top_p=0.9), Sampling(1.0, 0.99, 3000)):
        found = made(logits, law, torch.float32)
        left = (found > 0).sum(-1)
        for row, number in enumerate(left.tolist()):
            assert set(found[row].nonzero().view(-1).tolist()) == set(order[row, :number].tolist())
            if law.top_p is None:
                assert number == law.top_k
                continue
            laws = logits[row, order[row]].double()[: law.top_k].softmax(-1)
            assert laws[: number - 1].sum() - 1e-6 < law.top_p < laws[:number].sum() + 1e-6


def test_laws_are_those_of_the_definition() -> None:
    random = np.random.default_rng(2)
    for law in [*LAWS, GREEDY, FULL_SOFTMAX]:
        logits = np.where(random.random((6, 12)) < 0.5, random.integers(0, 4, (6, 12)), random.normal(0, 3, (6, 12)))
        wanted = np.stack([plain_distribution(row.tolist(), law) for row in logits])
        np.testing.assert_allclose(made(torch.from_numpy(logits), law).numpy(), wanted, rtol=0, atol=1e-14)
        table = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        np.testing.assert_allclose(deployed_table(table, law), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_depends_on_no_other_and_on_no_filling(dtype: torch.dtype) -> None:
    """Rows on a GPU are padded with minus infinity; logits of 16 bits have many ties."""
    logits = (4 * torch.randn(33, 5003, generator=torch.Generator().manual_seed(1))).to(dtype)
    filled = torch.cat([logits, torch.full((33, 5), -torch.inf, dtype=dtype)], 1)
    for law in [
        GREEDY,
        Sampling(0.7, 0.9),
        Sampling(1.0, None, 40),
        Sampling(1e-45),
        Sampling(1e30, 0.5, 9000),
    ]:
        whole = made(filled, law, torch.float32)
        assert not whole[:, 5003:].any()
        assert (whole.sum(1) - 1).abs().max() < 1e-5
        for rows in (slice(4, 5), slice(7, 30)):
            assert torch.equal(made(filled[rows], law, torch.float32), whole[rows])
        assert ((made(logits, law, torch.float32) > 0) == (whole[:, :5003] > 0)).all()
