"""The overlap-residual coupling: its joint distribution, its marginals, its edges, and total variation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fixtures.distributions import kl_divergence, large_distributions
from fixtures.pretend_device import SECOND, TwoDevices
from numpy.typing import NDArray
from oracles.plain_generator import coupled_pair
from scipy import stats

from kvdrift.generator.coupling.distributions import (
    BLOCK_TOKENS,
    DistributionTable,
    block_sums,
    couple,
    draw,
    softmax,
    total_variation,
)

Distribution = NDArray[np.float64]

LAST_UNIFORM = 1.0 - 2.0**-53


def distribution_pairs() -> list[tuple[str, Distribution, Distribution]]:
    """Distributions over 2 to 12 tokens: generic, peaked, with ties, zeros, disjoint or half disjoint supports, nearly equal."""
    random = np.random.default_rng(20240607)
    pairs = []
    for size in (2, 3, 4, 5, 8, 12):
        p, q, r = random.dirichlet(np.ones(size), 3)
        peaked = random.dirichlet(np.full(size, 0.1), 2) + 1e-300
        half = size // 2
        left, right = np.zeros(size), np.zeros(size)
        left[:half] = random.dirichlet(np.ones(half))
        right[half:] = random.dirichlet(np.ones(size - half))
        tied = random.integers(0, 3, (2, size)) + np.eye(size)[:2]
        swapped = p.copy()
        swapped[[0, 1]] = p[[1, 0]]
        pairs += [
            (f"generic-{size}", p, q), (f"peaked-{size}", *peaked), (f"disjoint-{size}", left, right),
            (f"inside-{size}", left, r), (f"around-{size}", r, right), (f"tied-{size}", *tied),
            (f"swapped-{size}", p, swapped), (f"near-{size}", p, p * (1 + 0.02 * random.standard_normal(size))),
            (f"equal-{size}", p, p), (f"points-{size}", np.eye(size)[0], np.eye(size)[-1]),
        ]  # fmt: skip
    return [(name, p / p.sum(), q / q.sum()) for name, p, q in pairs]


PAIRS = distribution_pairs()
NAMES = [name for name, _, _ in PAIRS]
DISTRIBUTIONS = [(p, q) for _, p, q in PAIRS]


def joint_distribution(p: Distribution, q: Distribution) -> NDArray[np.float64]:
    """The coupling as defined: (u, u) with probability min(p, q)(u), otherwise both residuals independently."""
    common = np.minimum(p, q)
    excess = 1.0 - common.sum()
    if np.array_equal(p, q):
        return np.diag(p)
    return np.asarray(np.diag(common) + np.outer(p - common, q - common) / excess)


def coupled(
    p: Distribution | torch.Tensor, q: Distribution | torch.Tensor, u: Distribution
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of both sides by uniforms [B, 3]."""
    uniforms = torch.as_tensor(u)
    distributions = [torch.as_tensor(distribution).expand(len(u), -1) for distribution in (p, q)]
    x = draw(distributions[0], uniforms[:, 0])
    return x, couple(*distributions, x, uniforms[:, 1], uniforms[:, 2])


def agrees(counts: NDArray[np.int64], probability: NDArray[np.float64], level: float) -> bool:
    """Tell whether counts pass Pearson's chi-square at ``level``; cells expecting fewer than 5 are pooled."""
    counts, probability = counts.ravel(), probability.ravel()
    if counts[probability <= 0.0].any():
        return False
    expected = probability * counts.sum()
    small = expected < 5.0
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] < 5.0:  # what was pooled is itself too little for the approximation: bound its count by Poisson's
        tail = stats.poisson.sf(observed[-1] - 1, expected[-1]) if observed[-1] else 1.0
        if tail < level / 2:
            return False
        observed, expected, level = observed[:-1], expected[:-1], level / 2
    if len(observed) < 2:
        return True
    statistic = ((observed - expected) ** 2 / expected).sum()
    return bool(stats.chi2.sf(statistic, len(observed) - 1) >= level)


@pytest.mark.parametrize(("p", "q"), DISTRIBUTIONS, ids=NAMES)
def test_the_pair_has_the_distribution_of_the_definition(p: Distribution, q: Distribution) -> None:
    """60 pairs of distributions, three tests each at level 5e-7: all pass with probability above 1 - 1e-4."""
    level, size, draws = 5e-7, len(p), 20_000
    x, y = coupled(p, q, np.random.default_rng(size).random((draws, 3)))
    joint = np.zeros((size, size), dtype=np.int64)
    np.add.at(joint, (x, y), 1)
    assert agrees(joint, joint_distribution(p, q), level)
    assert agrees(joint.sum(1), p, level)
    assert agrees(joint.sum(0), q, level)


@pytest.mark.parametrize(("p", "q"), DISTRIBUTIONS, ids=NAMES)
def test_tokens_are_those_of_the_plain_coupling(p: Distribution, q: Distribution) -> None:
    """Same uniforms, same tokens. Only a uniform within 1e-15 of a boundary could tell the two roundings apart."""
    u = np.random.default_rng(3).random((300, 3))
    x, y = coupled(p, q, u)
    assert list(zip(x.tolist(), y.tolist(), strict=True)) == [coupled_pair(p, q, *row) for row in u]


@pytest.mark.parametrize(("p", "q"), DISTRIBUTIONS, ids=NAMES)
def test_no_impossible_token_at_the_ends_of_the_uniforms(p: Distribution, q: Distribution) -> None:
    ends = torch.tensor([0.0, 2.0**-53, 0.5, 1.0 - 2.0**-52, LAST_UNIFORM], dtype=torch.float64)
    x, y = coupled(p, q, torch.cartesian_prod(ends, ends, ends).numpy())
    assert bool((torch.from_numpy(p)[x] > 0).all())
    assert bool((torch.from_numpy(q)[y] > 0).all())
    if np.array_equal(p, q):
        assert torch.equal(x, y)


TINY = 5e-324  # the least positive float64
WEIGHTS = [
    [0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [0.0, 0.3, 0.0, 0.7, 0.0], [TINY, 0.0, TINY, 0.0],
    [0.0, TINY, 0.0], [0.0, 1.0, TINY, 0.0], [0.0, TINY, 1.0, 0.0], [0.1] * 10 + [0.0], [0.0, 1e308, 0.0, 1e-308, 0.0],
    [1 / 3, 0.0, 1 / 3, 1 / 3, 0.0],
]  # fmt: skip


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_a_token_without_weight_is_never_drawn(weights: list[float]) -> None:
    row = torch.tensor(weights, dtype=torch.float64)
    u = torch.cat([torch.tensor([0.0, TINY, 2.0**-53, LAST_UNIFORM]), torch.linspace(0, LAST_UNIFORM, 997)]).double()
    u = u.clamp(max=LAST_UNIFORM)
    drawn = draw(row.expand(len(u), -1), u)
    assert bool((row[drawn] > 0).all())
    assert int(drawn[0]) == next(token for token, weight in enumerate(weights) if weight > 0)
    assert bool((drawn[4:].diff() >= 0).all()), "an inverse distribution function does not decrease"


def test_equal_distributions_never_part() -> None:
    """Bitwise equal distributions, denormal probabilities among them, every accepting uniform up to the last."""
    random = np.random.default_rng(11)
    p = torch.from_numpy(random.dirichlet(np.full(50, 0.01), 4000))  # many entries down to denormals and 0
    u = torch.from_numpy(random.random((4000, 3)))
    u[::2, 1] = LAST_UNIFORM
    x = draw(p, u[:, 0])
    assert torch.equal(couple(p, p.clone(), x, u[:, 1], u[:, 2]), x)
    row = torch.tensor([[TINY, 1.0 - 1e-16]], dtype=torch.float64)
    rarest, last = torch.tensor([0]), torch.tensor([LAST_UNIFORM], dtype=torch.float64)
    assert couple(row, row.clone(), rarest, last, last).tolist() == [0]


def test_distributions_that_differ_only_by_rounding_give_possible_tokens() -> None:
    """Excess mass of an ulp, or none if q lies below p everywhere: the token still has positive probability."""
    random = np.random.default_rng(13)
    p = torch.from_numpy(random.dirichlet(np.ones(6), 2000))
    step = torch.from_numpy(random.integers(-1, 2, p.shape).astype(np.float64))
    q = p * (1 + step * 2.0**-52)
    u = torch.from_numpy(random.random((2000, 3)))
    u[::2, 1] = LAST_UNIFORM
    x = draw(p, u[:, 0])
    y = couple(p, q, x, u[:, 1], u[:, 2])
    assert bool((q.gather(1, y[:, None]) > 0).all())
    below = p * (1 - 2.0**-52)
    assert torch.equal(couple(p, below, x, u[:, 1], u[:, 2]), x)


def test_total_variation() -> None:
    random = np.random.default_rng(17)
    p, q = (torch.from_numpy(random.dirichlet(np.full(500, 0.3), 64)) for _ in range(2))
    distance = total_variation(p, q)
    assert distance.shape == (64,)
    assert torch.equal(total_variation(p, p.clone()), torch.zeros(64, dtype=torch.float64))
    assert torch.equal(distance, total_variation(q, p))
    # 500 probabilities summing to 1: both formulas round within a few 1e-15.
    assert (distance - (1.0 - torch.minimum(p, q).sum(-1))).abs().max() < 1e-12
    nearby = p * (1 + 1e-9)
    assert bool((total_variation(p, nearby) > 0).all())


def test_total_variation_of_disjoint_distributions_is_one() -> None:
    random = np.random.default_rng(19)
    p, q = torch.zeros(2, 64, 300, dtype=torch.float64)
    p[:, ::3] = torch.from_numpy(random.dirichlet(np.ones(100), 64))
    q[:, 1::3] = torch.from_numpy(random.dirichlet(np.ones(100), 64))
    distance = total_variation(p, q)
    assert bool((distance <= 1.0).all())
    assert bool((distance > 1.0 - 1e-14).all())
    points = torch.eye(7, dtype=torch.float64)
    assert float(total_variation(points[2], points[5])) == 1.0
    assert float(total_variation(points[2], points[2])) == 0.0


# --- Large vocabularies, and distributions by row ------------------------------------------------------------------------------


SIZES = pytest.mark.parametrize("size", [BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 7 * BLOCK_TOKENS, 10_007])


@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_vocabularies_are_drawn_block_by_block(size: int, dtype: torch.dtype) -> None:
    """The tokens equal the plain coupling's; none of 150 uniforms is within 1e-7 of a boundary."""
    p, q = large_distributions(size, 2, dtype)
    u = np.random.default_rng(size).random((50, 3))
    x, y = coupled(p, q, u)
    plain = [coupled_pair(p.double().numpy(), q.double().numpy(), *row) for row in u]
    assert list(zip(x.tolist(), y.tolist(), strict=True)) == plain


@SIZES
def test_no_impossible_token_of_a_large_vocabulary(size: int) -> None:
    """Uniforms lie at every cumulative probability, including the ends of blocks, and next to it."""
    distribution = large_distributions(size, 1, torch.float32)
    at = distribution.double().cumsum(-1)[0]
    u = torch.cat([torch.tensor([0.0, LAST_UNIFORM]), at, torch.nextafter(at, torch.ones(()))]).clamp(max=LAST_UNIFORM)
    drawn = draw(distribution.expand(len(u), -1), u)
    assert bool((distribution[0, drawn] > 0).all())


@SIZES
def test_total_variation_of_float32_distributions(size: int) -> None:
    """Differences round by 6e-8 of their sum, as blocks of them do; exactly 0 on equal ones; the same for a row beside any others."""
    p, q = large_distributions(size, 40, torch.float32).view(2, 20, size)
    distance = total_variation(p, q)
    assert distance.dtype == torch.float64
    assert (distance - (p.double() - q.double()).abs().sum(-1) / 2).abs().max() < 2e-7
    assert not total_variation(p, p.clone()).any()
    for row in range(20):
        assert torch.equal(total_variation(p[row : row + 1], q[row : row + 1])[0], distance[row])


@pytest.mark.parametrize("long", [0, 2**15])
@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_a_table_of_distributions(at_once: int, long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs by row number, few or many at a time, distributions copied or not; row -1 is the point mass on the absorbing token."""
    distributions, absorbed = large_distributions(900, 6, torch.float32), 17
    monkeypatch.setattr("kvdrift.generator.coupling.distributions._CPU_BYTES", at_once * distributions[0].nbytes)
    monkeypatch.setattr("kvdrift.generator.coupling.distributions._LONG_BYTES", long)
    table = DistributionTable(distributions, absorbed)
    random = np.random.default_rng(1)
    left, right = torch.from_numpy(random.integers(-1, 6, (2, 40)))
    u = torch.from_numpy(random.random((40, 3)))
    point = torch.zeros(1, 900)
    point[0, absorbed] = 1.0
    p, q = (torch.cat([distributions, point])[rows] for rows in (left, right))
    x = draw(p, u[:, 0])
    assert torch.equal(table.draw(left, u[:, 0]), x)
    distance, divergence = table.compare(left, right)
    assert torch.equal(distance, total_variation(p, q))
    assert torch.equal(divergence, kl_divergence(p, q))
    assert torch.equal(table.most_probable(), distributions.argmax(-1))
    y = table.couple(left, right, x, u[:, 1], u[:, 2])
    assert torch.equal(y, couple(p, q, x, u[:, 1], u[:, 2]))
    none = u[:0, 0]
    nothing = (table.draw(left[:0], none), table.couple(left[:0], right[:0], x[:0], none, none))
    assert [len(part) for part in (*nothing, *table.compare(left[:0], right[:0]))] == [0] * 4
    assert bool((x[left < 0] == absorbed).all())
    assert bool((y[right < 0] == absorbed).all())


@pytest.mark.parametrize("size", [5, BLOCK_TOKENS, 10_007])
def test_on_a_gpu_a_row_is_added_up_in_one_order(size: int) -> None:
    """The first half of a block is added to the second, since torch's order depends on the rows."""
    distributions = large_distributions(size, 3, torch.float32)
    with TwoDevices():
        found = block_sums(distributions.to(SECOND)).cpu().numpy()
    expected = np.zeros((3, -(-size // BLOCK_TOKENS) * BLOCK_TOKENS), dtype=np.float32)
    expected[:, :size] = distributions
    blocks = expected.reshape(3, -1, BLOCK_TOKENS)
    while blocks.shape[-1] > 1:
        first, second = np.split(blocks, 2, axis=-1)
        blocks = first + second
    np.testing.assert_array_equal(found, blocks[..., 0])


def test_probabilities_of_a_large_vocabulary_sum_to_one() -> None:
    """Behind a probable token, torch's own float32 softmax was off by up to 1.7e-5 in sum."""
    logits = 3.0 * torch.randn(8, 49_152, generator=torch.Generator().manual_seed(0))
    logits[:, 0] = logits[:, 1:].logsumexp(-1) + np.log(9.0)  # probability .9
    out = torch.empty_like(logits)
    softmax(logits, out)
    assert (out.double().sum(-1) - 1.0).abs().max() < 1e-6, "float32 rounds each probability by at most 6e-8 of itself"
    assert (total_variation(out.double(), logits.double().softmax(-1)) < 1e-6).all()
