"""The coupled rollout against a plain loop, on systems whose distributions are tables over histories."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product

import numpy as np
import pytest
from fixtures.table_kernels import ACTIONS, CASES, Case, History, TableKernels, actions_for, rollout
from numpy.typing import NDArray
from oracles.plain_generator import coupled_pair
from scipy.special import rel_entr

from kvdrift.generator.coupling.rollout import CoupledSteps, uniform_table


@cache
def run(case: Case) -> tuple[TableKernels, list[CoupledSteps]]:
    kernels = TableKernels(case)
    replicates = range(case.replicates)
    reference = uniform_table(5, "doc", None, replicates, case.horizon, 1)
    return kernels, rollout(kernels, actions_for(replicates, case.horizon), replicates, reference, case.horizon)


def side_distribution(kernels: TableKernels, cache_number: int, history: History) -> NDArray[np.float64]:
    """The distribution with EOS absorbing."""
    if any(token in kernels.eos_tokens for token in history):
        distribution = np.zeros(kernels.vocabulary_size)
        distribution[kernels.eos_tokens[0]] = 1.0
        return distribution
    return kernels.distribution(cache_number, history)


EVERY = pytest.mark.parametrize(
    ("case", "action"), list(product(CASES, (1, 2, 3))), ids=lambda value: getattr(value, "name", value)
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_actions_share_the_reference_and_nothing_else(case: Case) -> None:
    """X is one path for all actions, and the last action has the reference's distributions; other uniforms have other keys."""
    one, other, same = run(case)[1]
    assert np.array_equal(one.x_token, other.x_token)
    assert np.array_equal(one.x_token, same.x_token)
    assert np.array_equal(same.x_token, same.y_token)
    assert not same.delta.any()
    assert not same.f.any()
    assert not np.nan_to_num(same.kl).any()
    assert not np.nan_to_num(same.kl_own).any()


@EVERY
def test_steps_are_those_of_a_plain_loop(case: Case, action: int) -> None:
    """The same uniforms through a loop over replicates and positions; float32 rounds distances by at most 6e-8."""
    kernels, results = run(case)
    steps, count = results[action - 1], 200
    u_x = uniform_table(5, "doc", None, range(count), case.horizon, 1)
    u_y = uniform_table(5, "doc", f"action-{action}", range(count), case.horizon, 2)
    for k in range(count):
        x, y = (), ()
        delta, f = np.empty(case.horizon), np.empty(case.horizon)
        kl, kl_own = np.full((2, case.horizon), np.nan)
        for t in range(case.horizon):
            p, q, forced = (side_distribution(kernels, *side) for side in ((0, x), (action, y), (action, x)))
            delta[t], f[t] = (np.maximum(p - other, 0).sum() for other in (q, forced))
            if not set(x) & set(case.eos):
                kl_own[t], kl[t] = (rel_entr(p, other).sum() for other in (q, forced))
                assert steps.top1[k, t] == (p.argmax() == forced.argmax())
            u, v = coupled_pair(p, q, u_x[k, t, 0], *u_y[k, t])
            x, y = (*x, u), (*y, v)
        assert x == tuple(steps.x_token[k])
        assert y == tuple(steps.y_token[k])
        assert np.abs(steps.delta[k] - delta).max() < 1e-7
        assert np.abs(steps.f[k] - f).max() < 1e-7
        np.testing.assert_allclose(steps.kl[k], kl, rtol=1e-6, atol=1e-12)
        np.testing.assert_allclose(steps.kl_own[k], kl_own, rtol=1e-6, atol=1e-12)
    for tokens, ended in ((steps.x_token, steps.x_eos), (steps.y_token, steps.y_eos)):
        assert np.array_equal(ended, np.isin(tokens, case.eos).cumsum(1) > 0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equal_histories_are_computed_once(case: Case) -> None:
    """Rows at every step: the different live histories that each cache is followed along, by either side."""
    kernels, results = run(case)
    for column, rows in enumerate(kernels.rows, start=1):
        for action, steps in enumerate(results, start=1):
            histories = [
                {tuple(history) for history in tokens[~ended[:, column - 1], :column].tolist()}
                for tokens, ended in ((steps.x_token, steps.x_eos), (steps.y_token, steps.y_eos))
            ]
            assert rows[0] == len(histories[0])
            assert rows[action] == len(histories[0] | histories[1])
    total = np.sum(kernels.rows, axis=0)
    assert [steps.kernel_evaluations for steps in results] == pytest.approx((total[1:] + total[0] / ACTIONS).tolist())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pair_evaluations_are_positions_before_both_sides_ended(case: Case) -> None:
    """The position at which the later side ends is evaluated; later positions are not."""
    for steps in run(case)[1]:
        both = steps.x_eos & steps.y_eos
        assert steps.pair_evaluations == (~both).sum() + both.any(1).sum()


@pytest.mark.parametrize(
    "shares",
    [
        {1: range(1)}, {1: range(7, 30), 2: range(7, 30)}, {2: [40, 3, 11], 3: [40, 3, 11]},
        {1: range(3, 9), 2: range(2), 3: [20]},
    ],
    ids=str,
)  # fmt: skip
def test_a_part_of_a_rollout_is_that_part(shares: dict[int, Sequence[int]]) -> None:
    """Fewer actions, other replicates, each action its own: the same events, bitwise. The reference serves the union."""
    case = CASES[4]
    actions = [actions_for(share, case.horizon, [action])[0] for action, share in shares.items()]
    union = list(dict.fromkeys(replicate for share in shares.values() for replicate in share))
    reference = uniform_table(5, "doc", None, union, case.horizon, 1)
    parts = rollout(TableKernels(case), actions, union, reference, case.horizon)
    for (action, share), part in zip(shares.items(), parts, strict=True):
        for name in ("x_token", "y_token", "delta", "f", "x_eos", "y_eos", "kl", "kl_own", "top1"):
            np.testing.assert_array_equal(getattr(part, name), getattr(run(case)[1][action - 1], name)[list(share)])


def test_one_position() -> None:
    """H = 1: the first distribution alone, no kernel evaluated after it."""
    case = Case("short", 3, 1, (2,), 50)
    kernels = TableKernels(case)
    parts = rollout(kernels, actions_for(range(50), 1), range(50), uniform_table(5, "doc", None, range(50), 1, 1), 1)
    for part in parts:
        assert part.x_token.shape == (50, 1)
        assert np.array_equal(part.x_token, part.y_token)
        assert np.array_equal(part.x_eos, part.x_token == 2)
        assert not part.delta.any()
        assert part.kernel_evaluations == 0
        assert part.pair_evaluations == 50
