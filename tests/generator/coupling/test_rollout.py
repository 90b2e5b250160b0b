"""The coupled rollout against exact enumeration, on systems whose laws are tables over histories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import pytest
from fixtures.table_kernels import ACTIONS, CASES, Case, History, TableKernels, actions_for, rollout
from numpy.typing import NDArray
from oracles.plain_generator import coupled_pair, inverse_cdf
from scipy import stats

from kvdrift.generator.coupling.rollout import CoupledSteps, uniform_table
from kvdrift.generator.coupling.streams import Savings


@cache
def run(case: Case) -> tuple[TableKernels, list[CoupledSteps]]:
    kernels = TableKernels(case)
    replicates = range(case.replicates)
    reference = uniform_table(5, "doc", None, replicates, case.horizon, 1)
    return kernels, rollout(kernels, actions_for(replicates, case.horizon), replicates, reference, case.horizon)


def side_law(kernels: TableKernels, cache_number: int, history: History) -> NDArray[np.float64]:
    """The law with EOS absorbing."""
    if any(token in kernels.eos_tokens for token in history):
        law = np.zeros(kernels.vocabulary_size)
        law[kernels.eos_tokens[0]] = 1.0
        return law
    return kernels.law(cache_number, history)


@dataclass(frozen=True)
class Path:
    """One pair of histories with its probability and the expected events."""

    x: History
    y: History
    probability: float
    delta: tuple[float, ...]
    f: tuple[float, ...]


@cache
def enumerate_paths(case: Case, action: int) -> list[Path]:
    """The coupled process written out: overlap or residual at every pair of histories."""
    kernels = run(case)[0]
    paths = [Path((), (), 1.0, (), ())]
    for _ in range(case.horizon):
        longer = []
        for path in paths:
            p, q = side_law(kernels, 0, path.x), side_law(kernels, action, path.y)
            forced = side_law(kernels, action, path.x)
            common = np.minimum(p, q)
            delta = 1.0 - common.sum() if not np.array_equal(p, q) else 0.0
            f = 1.0 - np.minimum(p, forced).sum() if not np.array_equal(p, forced) else 0.0
            step = np.diag(common) if delta == 0 else np.diag(common) + np.outer(p - common, q - common) / delta
            for u, v in product(range(case.size), repeat=2):
                if step[u, v] > 0:
                    x, y = (*path.x, u), (*path.y, v)
                    longer.append(Path(x, y, path.probability * step[u, v], (*path.delta, delta), (*path.f, f)))
        paths = longer
    return paths


EVERY = pytest.mark.parametrize(
    ("case", "action"), list(product(CASES, (1, 2, 3))), ids=lambda value: getattr(value, "name", value)
)


@EVERY
def test_trajectories_have_the_law_of_the_process(case: Case, action: int) -> None:
    """Joint chi-square over all pairs of paths, cells expecting fewer than 5 pooled, at level 1e-6.

    With 15 of them a right rollout fails with probability below 2e-5 (as far as chi-square approximates).
    """
    steps = run(case)[1][action - 1]
    paths = enumerate_paths(case, action)
    assert abs(sum(path.probability for path in paths) - 1.0) < 1e-12
    place = {(path.x, path.y): number for number, path in enumerate(paths)}
    counts = np.zeros(len(paths))
    for x, y in zip(steps.x_token.tolist(), steps.y_token.tolist(), strict=True):
        counts[place[tuple(x), tuple(y)]] += 1  # a KeyError here is an impossible pair of paths
    expected = np.array([path.probability for path in paths]) * case.replicates
    small = expected < 5
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert stats.chi2.sf(statistic, len(counts) - 1) > 1e-6


@EVERY
def test_distances_are_those_of_the_table(case: Case, action: int) -> None:
    """delta and f of every event are functions of its histories; float32 rounds them by at most 6e-8."""
    steps = run(case)[1][action - 1]
    exact = {(path.x, path.y): (path.delta, path.f) for path in enumerate_paths(case, action)}
    pairs = zip(steps.x_token.tolist(), steps.y_token.tolist(), strict=True)
    expected = np.array([exact[tuple(x), tuple(y)] for x, y in pairs])
    assert np.abs(steps.delta - expected[:, 0]).max() < 1e-7
    assert np.abs(steps.f - expected[:, 1]).max() < 1e-7
    for tokens, ended in ((steps.x_token, steps.x_eos), (steps.y_token, steps.y_eos)):
        assert np.array_equal(ended, np.isin(tokens, case.eos).cumsum(1) > 0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_actions_share_the_reference_and_nothing_else(case: Case) -> None:
    """X is one path for all actions; given X the compressed paths of two actions are independent.

    Chi-square of (x, y of action 1, y of action 2) at level 1e-6, five times: false failure below 1e-5.
    """
    one, other, same = run(case)[1]
    assert np.array_equal(one.x_token, other.x_token)
    assert np.array_equal(one.x_token, same.x_token)
    assert np.array_equal(same.x_token, same.y_token)
    assert not same.delta.any()
    assert not same.f.any()
    given_x: list[dict[History, dict[History, float]]] = [{}, {}]
    for side, action in enumerate((1, 2)):
        for path in enumerate_paths(case, action):
            given_x[side].setdefault(path.x[:3], {}).setdefault(path.y[:3], 0.0)
            given_x[side][path.x[:3]][path.y[:3]] += path.probability
    expected = {}
    for x, y_laws in given_x[0].items():
        total = sum(y_laws.values())
        for (y_one, first), (y_other, second) in product(y_laws.items(), given_x[1][x].items()):
            expected[x, y_one, y_other] = first * second / total * case.replicates
    counts = dict.fromkeys(expected, 0)
    triples = zip(*(part[:, :3].tolist() for part in (one.x_token, one.y_token, other.y_token)), strict=True)
    for x, y_one, y_other in triples:
        counts[tuple(x), tuple(y_one), tuple(y_other)] += 1
    enough = [key for key, value in expected.items() if value >= 5]
    observed = np.array([counts[key] for key in enough] + [case.replicates - sum(counts[key] for key in enough)])
    wanted = np.array([expected[key] for key in enough])
    wanted = np.append(wanted, case.replicates - wanted.sum())
    if wanted[-1] < 1e-6:  # nothing was pooled
        observed, wanted = observed[:-1], wanted[:-1]
    assert stats.chi2.sf(((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1) > 1e-6


@EVERY
def test_tokens_are_those_of_a_plain_loop(case: Case, action: int) -> None:
    """The same uniforms through a loop over replicates and positions."""
    kernels, results = run(case)
    steps, count = results[action - 1], 400
    u_x = uniform_table(5, "doc", None, range(count), case.horizon, 1)
    u_y = uniform_table(5, "doc", f"action-{action}", range(count), case.horizon, 2)
    for k in range(count):
        x = y = (inverse_cdf(kernels.law(0, ()), u_x[k, 0, 0]),)
        for t in range(1, case.horizon):
            p, q = side_law(kernels, 0, x), side_law(kernels, action, y)
            u, v = coupled_pair(p, q, u_x[k, t, 0], *u_y[k, t])
            x, y = (*x, u), (*y, v)
        assert x == tuple(steps.x_token[k])
        assert y == tuple(steps.y_token[k])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_stream_is_computed_that_is_not_needed(case: Case) -> None:
    """Rows at every step, replicate by replicate.

    One per live reference, one along X per live X, one along Y once parted and still live.
    """
    kernels, count = TableKernels(case), 400
    reference = uniform_table(5, "doc", None, range(count), case.horizon, 1)
    actions = actions_for(range(count), case.horizon)
    results = rollout(kernels, actions, range(count), reference, case.horizon, Savings(share_equal_histories=False))
    for column, rows in enumerate(kernels.rows, start=1):
        assert rows[0] == (~results[0].x_eos[:, column - 1]).sum()
        for action, steps in enumerate(results, start=1):
            parted = (steps.x_token != steps.y_token)[:, :column].any(1)
            along_x = ~steps.x_eos[:, column - 1]
            along_y = parted & ~steps.y_eos[:, column - 1]
            assert rows[action] == along_x.sum() + along_y.sum()
    total = np.sum(kernels.rows, axis=0)
    assert [steps.laws for steps in results] == pytest.approx((total[1:] + total[0] / ACTIONS).tolist())


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
    assert sum(steps.laws for steps in results) == pytest.approx(np.sum(kernels.rows))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pair_evaluations_are_positions_before_both_sides_ended(case: Case) -> None:
    """The position at which the later side ends is evaluated; later positions are not."""
    for steps in run(case)[1]:
        both = steps.x_eos & steps.y_eos
        assert steps.pair_evaluations == (~both).sum() + both.any(1).sum()


@pytest.mark.parametrize("which", [(1,), (1, 2), (2, 3), (1, 2, 3)])
@pytest.mark.parametrize("replicates", [range(1), range(7, 30), [40, 3, 11]], ids=str)
def test_a_part_of_a_rollout_is_that_part(which: Sequence[int], replicates: Sequence[int]) -> None:
    """Fewer actions, other replicates: the same events, bitwise."""
    case = CASES[4]
    kernels = TableKernels(case)
    whole = run(case)[1]
    reference = uniform_table(5, "doc", None, replicates, case.horizon, 1)
    parts = rollout(kernels, actions_for(replicates, case.horizon, which), replicates, reference, case.horizon)
    for action, part in zip(which, parts, strict=True):
        for name in ("x_token", "y_token", "delta", "f", "x_eos", "y_eos"):
            assert np.array_equal(getattr(part, name), getattr(whole[action - 1], name)[list(replicates)]), name


def test_actions_may_have_different_replicates() -> None:
    """The control runs fewer replicates than the others: the reference serves the union."""
    case = CASES[3]
    whole = run(case)[1]
    shares = {1: range(3, 9), 2: range(2), 3: [20]}
    actions = [actions_for(share, case.horizon, [action])[0] for action, share in shares.items()]
    union = sorted({replicate for share in shares.values() for replicate in share})
    reference = uniform_table(5, "doc", None, union, case.horizon, 1)
    parts = rollout(TableKernels(case), actions, union, reference, case.horizon)
    for (action, share), part in zip(shares.items(), parts, strict=True):
        assert np.array_equal(part.y_token, whole[action - 1].y_token[list(share)])
        assert np.array_equal(part.f, whole[action - 1].f[list(share)])


def test_one_position() -> None:
    """H = 1: the first law alone, no kernel evaluated after it."""
    case = Case("short", 3, 1, (2,), 50)
    kernels = TableKernels(case)
    parts = rollout(kernels, actions_for(range(50), 1), range(50), uniform_table(5, "doc", None, range(50), 1, 1), 1)
    for part in parts:
        assert part.x_token.shape == (50, 1)
        assert np.array_equal(part.x_token, part.y_token)
        assert np.array_equal(part.x_eos, part.x_token == 2)
        assert not part.delta.any()
        assert part.laws == 0
        assert part.pair_evaluations == 50
