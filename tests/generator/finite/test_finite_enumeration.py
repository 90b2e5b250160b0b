"""Exact quantities of finite-state systems against closed forms and against the process written out in loops."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from fixtures.random_systems import ACTION, KINDS, History, all_paths, evaluations, random_system
from oracles.exact_branching import branching_distributions

from kvdrift.generator.finite.enumeration import ExactQuantities, exact_quantities, exact_rows, pair_paths
from kvdrift.generator.finite.system import FiniteSystem
from kvdrift.schema.errors import InputError

# Sums of at most 65,536 numbers in [0, 1], each off by some 1e-16 of its size.
ROUNDING = 1e-12

SHAPES: list[tuple[int, int, History]] = [
    (2, 2, ()), (2, 3, ()), (2, 4, ()), (2, 4, (1,)), (3, 2, ()), (3, 3, ()), (3, 3, (2,)), (3, 3, (2, 0)), (4, 2, ()),
    (4, 3, (3,)), (4, 3, (1, 3)),
]  # fmt: skip
SYSTEMS = [random_system(*shape, kind) for shape in SHAPES for kind in KINDS]
EVERY = pytest.mark.parametrize(
    "system", SYSTEMS, ids=lambda system: f"{system.name}-{''.join(map(str, system.eos_tokens))}"
)


@cache
def exact(system: FiniteSystem) -> ExactQuantities:
    return exact_quantities(system, ACTION)


def mean(system: FiniteSystem, value: object) -> float:
    """The expectation of a function of a ``Path``."""
    return math.fsum(path.probability * value(path) for path in all_paths(system))  # type: ignore[operator]


@EVERY
def test_pairs_of_paths_are_those_of_the_definition(system: FiniteSystem) -> None:
    paths = pair_paths(system, ACTION)
    expected = {(path.x, path.y): path for path in all_paths(system)}
    found = {
        (tuple(x), tuple(y)): number
        for number, (x, y) in enumerate(zip(paths.x.tolist(), paths.y.tolist(), strict=True))
    }
    # The definition's 1 - sum min(p, q) may leave a residual of 1e-17 where the other side has none.
    assert set(found) <= set(expected)
    assert all(expected[pair].probability < 1e-15 for pair in set(expected) - set(found))
    assert paths.probability.sum() == pytest.approx(1.0, abs=ROUNDING)
    eos = set(system.eos_tokens)
    for pair, number in found.items():
        path = expected[pair]
        assert paths.probability[number] == pytest.approx(path.probability, abs=ROUNDING)
        assert paths.delta[number] == pytest.approx(path.delta, abs=ROUNDING)
        assert paths.f[number] == pytest.approx(path.f, abs=ROUNDING)
        for side, ended in ((path.x, paths.x_ended), (path.y, paths.y_ended)):
            assert ended[number].tolist() == [bool(eos & set(side[: t + 1])) for t in range(system.horizon)]


@EVERY
def test_decomposition(system: FiniteSystem) -> None:
    found, horizon = exact(system), system.horizon
    tokens = mean(system, lambda path: sum(path.mismatch)) / horizon
    assert found.mismatch == pytest.approx(tokens, abs=ROUNDING)
    assert found.rollout_tv == pytest.approx(mean(system, lambda path: sum(path.delta)) / horizon, abs=ROUNDING)
    assert found.fixed_history_tv == pytest.approx(mean(system, lambda path: sum(path.f)) / horizon, abs=ROUNDING)
    diverges = mean(system, lambda path: path.entry is not None)
    assert found.divergence_probability == pytest.approx(diverges, abs=ROUNDING)
    assert found.occurrence == pytest.approx(diverges / horizon, abs=ROUNDING)
    exposure = mean(system, lambda path: horizon - (path.entry or horizon)) / horizon
    occupation = mean(system, lambda path: sum(path.mismatch[path.entry :]) if path.entry else 0) / horizon
    assert found.exposure == pytest.approx(exposure, abs=ROUNDING)
    assert found.occupation == pytest.approx(occupation, abs=ROUNDING)
    assert found.mismatch_rate * exposure == pytest.approx(occupation, abs=ROUNDING)
    assert found.mean_entry is not None
    assert found.mean_entry * diverges == pytest.approx(mean(system, lambda path: path.entry or 0), abs=ROUNDING)
    variance = mean(system, lambda path: (sum(path.mismatch) / horizon - tokens) ** 2)
    assert found.plain_variance == pytest.approx(variance, abs=ROUNDING)
    counted = mean(system, lambda path: evaluations(system, path.x, path.y, 1))
    assert found.plain_evaluations == pytest.approx(counted, abs=ROUNDING)


@EVERY
def test_depth_profile(system: FiniteSystem) -> None:
    found, horizon = exact(system), system.horizon
    for s in range(1, horizon + 1):
        p = mean(system, lambda path, s=s: path.entry == s)
        assert found.p[s - 1] == pytest.approx(p, abs=ROUNDING)
        for j in range(horizon):
            joint = mean(system, lambda path, s=s, j=j: path.entry == s and path.mismatch[s + j - 1 : s + j] == [True])
            assert found.rho[s - 1, j] * found.p[s - 1] == pytest.approx(joint, abs=ROUNDING)
    for depth in range(1, horizon + 1):
        observed = mean(system, lambda path, d=depth: sum(path.mismatch[path.entry - 1 :][:d]) if path.entry else 0)
        capacity = mean(system, lambda path, d=depth: max(horizon - path.entry - d + 1, 0) if path.entry else 0)
        assert found.observed[depth - 1] == pytest.approx(observed / horizon, abs=ROUNDING)
        assert found.capacity[depth - 1] == pytest.approx(capacity / horizon, abs=ROUNDING)


@EVERY
def test_residual_branching(system: FiniteSystem) -> None:
    """Every scan and all of its branches in turn."""
    found = exact(system)
    distributions = branching_distributions(system, ACTION, pair_paths(system, ACTION))
    assert found.swrb_risk == pytest.approx(distributions["risk"].mean, abs=ROUNDING)
    assert found.swrb_variance == pytest.approx(distributions["risk"].variance, abs=ROUNDING)
    assert found.swrb_evaluations == pytest.approx(distributions["evaluations"].mean, abs=ROUNDING)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eos", [(), (1,), (0, 1)])
def test_identities(eos: History, kind: str) -> None:
    """The identities of the paper hold over all 65,536 pairs of paths of 4 tokens to horizon 4."""
    found = exact_quantities(random_system(4, 4, eos, kind), ACTION)
    assert found.mismatch == pytest.approx(found.rollout_tv, abs=ROUNDING)
    assert found.mismatch == pytest.approx(found.occurrence + found.occupation, abs=ROUNDING)
    assert found.mismatch == pytest.approx(found.occurrence + found.exposure * found.mismatch_rate, abs=ROUNDING)
    assert found.observed[-1] == pytest.approx(found.mismatch, abs=ROUNDING)
    assert found.observed[0] == pytest.approx(found.occurrence, abs=ROUNDING)
    assert found.capacity[-1] == 0.0
    assert found.capacity[0] == pytest.approx(found.exposure, abs=ROUNDING)
    assert (found.observed <= found.mismatch + ROUNDING).all()
    assert (found.observed + found.capacity >= found.mismatch - ROUNDING).all()
    assert found.swrb_risk == pytest.approx(found.mismatch, abs=ROUNDING)
    assert found.plain_variance >= found.swrb_variance - ROUNDING


@pytest.mark.parametrize("e", [0.01, 0.3, 0.75])
@pytest.mark.parametrize("horizon", [1, 2, 5])
def test_persistent_intervention(e: float, horizon: int) -> None:
    """P = delta_0, Q = (1 - e) delta_0 + e delta_1 whatever the history: I_t are independent Bernoulli(e)."""
    histories = [2**t for t in range(horizon)]
    reference = tuple(np.tile([1.0, 0.0], (count, 1)) for count in histories)
    persistent = tuple(np.tile([1.0 - e, e], (count, 1)) for count in histories)
    found = exact(FiniteSystem("persistent", 2, horizon, reference, {ACTION: persistent}))
    stays = [(1 - e) ** t for t in range(horizon + 1)]  # survival to t + 1
    assert found.p == pytest.approx([e * stays[s] for s in range(horizon)], abs=ROUNDING)
    assert found.mismatch == pytest.approx(e, abs=ROUNDING)
    assert found.fixed_history_tv == pytest.approx(e, abs=ROUNDING)
    assert found.occurrence == pytest.approx((1 - stays[-1]) / horizon, abs=ROUNDING)
    assert found.occupation == pytest.approx(e - (1 - stays[-1]) / horizon, abs=ROUNDING)
    assert found.mismatch_rate == pytest.approx(e if horizon > 1 else 0.0, abs=ROUNDING)
    assert found.plain_variance == pytest.approx(e * (1 - e) / horizon, abs=ROUNDING)
    inside = np.tri(horizon, dtype=bool)[::-1]  # s + j <= H
    first = np.arange(horizon) == 0
    assert found.rho == pytest.approx(np.where(inside, np.where(first, 1.0, e), 0.0), abs=ROUNDING)
    # U is 0, 0, ... for sure, so M is a number; D_J given J = s is 1 + Binomial(H - s, e), over H.
    mass = 1 - stays[-1]
    second = sum(
        e * stays[s - 1] * ((1 + (horizon - s) * e) ** 2 + (horizon - s) * e * (1 - e)) for s in range(1, horizon + 1)
    )
    assert found.swrb_variance == pytest.approx(mass * second / horizon**2 - e**2, abs=ROUNDING)
    branch_start = sum(s * e * stays[s - 1] for s in range(1, horizon + 1)) / mass
    assert found.swrb_evaluations == pytest.approx(horizon + horizon - branch_start, abs=1e-11)


@pytest.mark.parametrize("eos", [(), (1,)])
def test_equal_distributions(eos: History) -> None:
    """M = 0: nothing diverges, and nothing is undefined but the mean entry."""
    near = random_system(3, 3, eos)
    found = exact(FiniteSystem("equal", 3, 3, near.reference, {ACTION: near.reference}, eos))
    for name in ("mismatch", "rollout_tv", "fixed_history_tv", "occurrence", "exposure", "occupation", "mismatch_rate"):
        assert getattr(found, name) == 0.0, name
    assert found.divergence_probability == found.plain_variance == found.swrb_variance == 0.0
    assert found.mean_entry is None
    assert not found.p.any()
    assert not found.rho.any()
    assert found.swrb_evaluations == pytest.approx(found.plain_evaluations, abs=ROUNDING)
    if not eos:
        assert found.plain_evaluations == pytest.approx(3.0, abs=ROUNDING)


@pytest.mark.parametrize("position", [1, 2, 3])
def test_disjoint_supports(position: int) -> None:
    """M = 1: residual branching equals the plain coupling, and its scan ends when survival does."""
    near = random_system(3, 3)
    apart = [list(near.reference), list(near.actions[ACTION])]
    histories = 3 ** (position - 1)
    apart[0][position - 1] = np.tile([0.25, 0.0, 0.75], (histories, 1))
    apart[1][position - 1] = np.tile([0.0, 1.0, 0.0], (histories, 1))
    found = exact(FiniteSystem("apart", 3, 3, tuple(apart[0]), {ACTION: tuple(apart[1])}))
    assert found.divergence_probability == pytest.approx(1.0, abs=ROUNDING)
    assert found.swrb_variance == pytest.approx(found.plain_variance, abs=ROUNDING)
    # Scanned to ``position``, and H - J positions of the branch; P(J = s) = p_s since M = 1.
    later = sum(found.p[s - 1] * (3 - s) for s in (1, 2, 3))
    assert found.swrb_evaluations == pytest.approx(position + later, abs=ROUNDING)


def test_rows() -> None:
    """There is one row per quantity and position, and no row for an undefined value."""
    system = random_system(2, 3)
    rows, found = exact_rows(system, ACTION), exact(system)
    assert all(list(row) == ["action", "quantity", "x", "value"] and row["action"] == ACTION for row in rows)
    cells = {(row["quantity"], row["x"]): row["value"] for row in rows}
    assert len(cells) == len(rows)
    scalars = {name: value for (name, x), value in cells.items() if x is None}
    assert set(scalars) == {
        "mismatch", "rollout_tv", "fixed_history_tv", "occurrence", "exposure", "occupation", "mismatch_rate",
        "divergence_probability", "mean_entry", "plain_variance", "swrb_variance", "plain_evaluations",
        "swrb_evaluations",
    }  # fmt: skip
    assert scalars["mismatch"] == found.mismatch
    assert scalars["swrb_variance"] == found.swrb_variance
    assert scalars["swrb_evaluations"] == found.swrb_evaluations
    for name in ("p", "observed", "capacity"):
        assert [cells[name, x] for x in (1, 2, 3)] == getattr(found, name).tolist()
    assert len(cells) == len(scalars) + 9

    equal = FiniteSystem("equal", 2, 3, system.reference, {ACTION: system.reference})
    assert "mean_entry" not in {row["quantity"] for row in exact_rows(equal, ACTION)}


def test_what_cannot_be_enumerated() -> None:
    with pytest.raises(InputError, match=r"^system 'near-2-2' has no action 'actoin'; did you mean 'action'\?$"):
        exact_rows(random_system(2, 2), "actoin")
    line = "system 'far-16-3', action 'action': more than 1048576 pairs of histories are too many to enumerate; use"
    with pytest.raises(InputError, match=line):
        exact_rows(random_system(16, 3, kind="far"), ACTION)
