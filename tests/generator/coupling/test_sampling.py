"""Laws as they are deployed: transformers' own warpers, plain definitions, ties, and rows that do not meet."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from oracles.plain_laws import plain_law
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from generator.coupling.laws import total_variation
from generator.coupling.sampling import deployed, deployed_table
from schema.sampling import FULL_SOFTMAX, SamplingLaw

GREEDY = SamplingLaw(0.0)
LAWS = [
    SamplingLaw(temperature, top_p, top_k)
    for temperature, top_p, top_k in product((0.3, 1.0, 2.5), (None, 0.23, 0.91, 0.999), (None, 1, 5, 5000))
]


def made(logits: Tensor, law: SamplingLaw, dtype: torch.dtype = torch.float64) -> Tensor:
    out = torch.full(logits.shape, torch.nan, dtype=dtype)
    deployed(logits, law, out)
    return out


def by_transformers(logits: Tensor, law: SamplingLaw) -> Tensor:
    """Its warpers in the order of its ``generate``."""
    ids, scores = torch.empty(0), TemperatureLogitsWarper(law.temperature)(torch.empty(0), logits)
    if law.top_k is not None:
        scores = TopKLogitsWarper(law.top_k)(ids, scores)
    if law.top_p is not None:
        scores = TopPLogitsWarper(law.top_p)(ids, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize("size", [7, 1500])
def test_laws_are_those_of_transformers(size: int) -> None:
    """Logits without ties: the same tokens are left, and probabilities round at the 15th digit."""
    logits = 4 * torch.randn(8, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    for law in LAWS:
        ours, theirs = made(logits, law), by_transformers(logits, law)
        assert torch.equal(ours > 0, theirs > 0), law
        assert (ours - theirs).abs().max() < 1e-14, law


def test_ties_are_those_of_transformers_but_for_which_of_equal_ones_top_p_leaves() -> None:
    """Logits of few values. Which of equally probable tokens top-p leaves is up to transformers' sort: only how many."""
    logits = torch.randint(0, 6, (40, 30), generator=torch.Generator().manual_seed(0)).double()
    for law in LAWS:
        ours, theirs = made(logits, law), by_transformers(logits, law)
        assert (ours.sort().values - theirs.sort().values).abs().max() < 1e-14, law
        if law.top_p is None:
            assert torch.equal(ours > 0, theirs > 0), law


def test_ties_have_rules_of_their_own() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]], dtype=torch.float64)
    assert made(logits, GREEDY).tolist() == [[0, 1, 0, 0, 0]], "the lowest token id"
    assert made(logits, SamplingLaw(top_k=1)).tolist() == [[0, *[pytest.approx(1 / 3)] * 2, 0, pytest.approx(1 / 3)]]
    assert made(logits, SamplingLaw(top_p=0.5)).tolist() == [[0, 0.5, 0.5, 0, 0]], "the lowest token ids"


def test_laws_are_those_of_the_definition() -> None:
    random = np.random.default_rng(2)
    for law in [*LAWS, GREEDY, FULL_SOFTMAX]:
        logits = np.where(random.random((6, 12)) < 0.5, random.integers(0, 4, (6, 12)), random.normal(0, 3, (6, 12)))
        wanted = np.stack([plain_law(row.tolist(), law) for row in logits])
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
        SamplingLaw(0.7, 0.9),
        SamplingLaw(1.0, None, 40),
        SamplingLaw(1e-45),
        SamplingLaw(1e30, 0.5, 9000),
    ]:
        whole = made(filled, law, torch.float32)
        assert not whole[:, 5003:].any()
        assert (whole.sum(1) - 1).abs().max() < 1e-5
        for rows in (slice(4, 5), slice(7, 30)):
            assert torch.equal(made(filled[rows], law, torch.float32), whole[rows])
        assert ((made(logits, law, torch.float32) > 0) == (whole[:, :5003] > 0)).all()


def test_greedy_laws_are_equal_or_apart() -> None:
    logits = torch.randn(2, 50, 9)
    left, right = (made(part, GREEDY) for part in logits)
    assert torch.equal(left.argmax(-1), logits[0].argmax(-1))
    assert torch.equal(total_variation(left, right), (logits[0].argmax(-1) != logits[1].argmax(-1)).double())
