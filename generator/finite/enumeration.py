"""Compute the exact quantities of a finite-state system, and exact moments of residual branching, by enumeration.

The overlap-residual coupling (paper, eq. coupling-kernel) is applied position by position to every pair of paths, with
its probability; pairs of histories that cannot occur are dropped on the way. All numbers are float64.

For the moments, every common prefix U is followed to the horizon with its probability and weights (paper, sec.
"residual-conditioning"). The moments of a branch at s are those of the coupled pairs with tau = s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvdrift.generator.finite.system import FiniteSystem, FloatArray
from kvdrift.schema.errors import InputError

LARGEST_ENUMERATION = 2**20
"""Most pairs of histories at one position, about 200 MB: enough for V = 4, H = 5 and for V = 2, H = 10."""


@dataclass(frozen=True, eq=False)
class PairPaths:
    """Every pair of paths that the reference and an action can take under the coupling."""

    probability: FloatArray  # probability of each pair, float64 [paths]; the sum is 1
    x: NDArray[np.int64]  # the reference's tokens, int64 [paths, H]
    y: NDArray[np.int64]  # the action's tokens, int64 [paths, H]
    delta: FloatArray  # the distances delta_t, float64 [paths, H]
    f: FloatArray  # the distances f_t, float64 [paths, H]
    kl: FloatArray  # KL divergences along X, float64 [paths, H]; NaN after X's end, as ``kl_own``
    kl_own: FloatArray  # KL divergences along own histories, float64 [paths, H]
    top1: NDArray[np.bool_]  # whether the most probable tokens along X are equal, bool [paths, H]
    x_ended: NDArray[np.bool_]  # whether the reference has emitted EOS at or before t, bool [paths, H]
    y_ended: NDArray[np.bool_]  # whether the action has emitted EOS at or before t, bool [paths, H]

    @property
    def mismatch(self) -> NDArray[np.bool_]:
        """The mismatches I_t, bool [paths, H]."""
        return np.asarray(self.x != self.y)

    @property
    def entry(self) -> NDArray[np.int64]:
        """The first mismatch tau, or H + 1 without one, int64 [paths]."""
        mismatch = self.mismatch
        first = np.where(mismatch.any(axis=1), mismatch.argmax(axis=1), mismatch.shape[1])
        return np.asarray(first + 1)

    @property
    def evaluated(self) -> NDArray[np.bool_]:
        """Whether the distributions at t are evaluated, bool [paths, H]: up to the later of the two ends."""
        before = self.x_ended[:, :-1] & self.y_ended[:, :-1]
        return ~np.column_stack([np.zeros(len(before), dtype=np.bool_), before])

    def mean(self, values: NDArray[np.generic]) -> FloatArray:
        """Return the expectation of ``values`` [paths, ...], an array [...]."""
        return np.asarray(np.tensordot(self.probability, values.astype(np.float64), axes=1))

    def variance(self, values: FloatArray) -> float:
        """Return the variance of ``values`` [paths]."""
        return float(self.mean((values - self.mean(values)) ** 2))


def pair_paths(system: FiniteSystem, action: str) -> PairPaths:
    """Enumerate the pairs of paths of the coupled reference and ``action``, to the system's horizon."""
    reference, compressed = system.absorbing_distributions(None), system.absorbing_distributions(action)
    size = system.alphabet
    x = y = np.zeros(1, dtype=np.int64)  # codes of the histories
    probability = np.ones(1)
    delta, f, kl, kl_own, top1 = np.empty((5, 1, 0))
    for p_distributions, q_distributions in zip(reference, compressed, strict=True):
        if len(x) * size**2 > LARGEST_ENUMERATION:
            raise InputError(
                f"system '{system.name}', action '{action}': more than {LARGEST_ENUMERATION} pairs of histories are "
                "too many to enumerate; use a smaller alphabet or a shorter horizon"
            )
        p, q = p_distributions[x], q_distributions[y]
        along_x = q_distributions[x]
        forced, agree = distribution_distance(p, along_x), p.argmax(axis=1) == along_x.argmax(axis=1)
        divergence, divergence_own = kl_divergence(p, along_x), kl_divergence(p, q)
        distance, step = coupling_kernel(p, q)
        step *= probability[:, None, None]
        row, u, v = step.nonzero()
        probability = step[row, u, v]
        x, y = x[row] * size + u, y[row] * size + v
        delta = np.column_stack([delta[row], distance[row]])
        f = np.column_stack([f[row], forced[row]])
        kl, kl_own = np.column_stack([kl[row], divergence[row]]), np.column_stack([kl_own[row], divergence_own[row]])
        top1 = np.column_stack([top1[row], agree[row]])
    x_ended = _ended(x, system)
    kl[:, 1:][x_ended[:, :-1]] = kl_own[:, 1:][x_ended[:, :-1]] = np.nan
    return PairPaths(
        probability=probability, x=_tokens(x, system), y=_tokens(y, system), delta=delta, f=f, kl=kl, kl_own=kl_own,
        top1=top1.astype(np.bool_), x_ended=x_ended, y_ended=_ended(y, system),
    )  # fmt: skip


def distribution_distance(p: FloatArray, q: FloatArray) -> FloatArray:
    """Compute the total variation of distributions [..., V], as [...].

    It is exactly 0 for equal distributions. It is also 0 if p is nowhere above q, or q nowhere above p: such
    a difference comes from rounding alone.
    """
    differ = np.logical_and((p > q).any(axis=-1), (q > p).any(axis=-1))
    return np.where(differ, 0.5 * np.abs(p - q).sum(axis=-1), 0.0)


def kl_divergence(p: FloatArray, q: FloatArray) -> FloatArray:
    """Compute KL(p || q) of distributions [..., V] in nats, as [...]; infinite if q lacks a token of p."""
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(p > 0.0, p * np.log(p / q), 0.0)
    return np.asarray(terms.sum(axis=-1))


def coupling_kernel(p: FloatArray, q: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Compute e = TV(p, q) [B] and the joint transition kernel [B, V, V] of distributions [B, V].

    This is the paper's eq. coupling-kernel.

    Each residual is divided by its own sum, which by rounding may differ from e. So each [V, V] kernel sums to 1 as
    nearly as p and q do.
    """
    distance = distribution_distance(p, q)
    residual_x, residual_y = np.maximum(p - q, 0.0), np.maximum(q - p, 0.0)
    apart = distance > 0.0
    for residual in (residual_x, residual_y):
        np.divide(residual, residual.sum(axis=1, keepdims=True), out=residual, where=apart[:, None])
    kernel = residual_x[:, :, None] * (residual_y * distance[:, None])[:, None, :]
    token = np.arange(p.shape[1])
    kernel[:, token, token] = np.minimum(p, q)
    return distance, kernel


def _tokens(codes: NDArray[np.int64], system: FiniteSystem) -> NDArray[np.int64]:
    places = system.alphabet ** np.arange(system.horizon - 1, -1, -1)
    return codes[:, None] // places % system.alphabet


def _ended(codes: NDArray[np.int64], system: FiniteSystem) -> NDArray[np.bool_]:
    ended = system.ended()
    horizon = system.horizon
    return np.column_stack([ended[t][codes // system.alphabet ** (horizon - t)] for t in range(1, horizon + 1)])


_SCALARS = (
    "mismatch", "rollout_tv", "fixed_history_tv", "occurrence", "exposure", "occupation", "mismatch_rate",
    "divergence_probability", "mean_entry", "plain_variance", "plain_evaluations", "swrb_variance",
    "swrb_evaluations",
)  # fmt: skip


def _branching_moments(system: FiniteSystem, action: str, paths: PairPaths) -> dict[str, float]:
    """Compute the moments of one replicate of residual branching, fields of ``ExactQuantities``."""
    size = system.alphabet
    branches = _branches(paths, size)
    # Of all common prefixes u of t tokens, in the order of their codes: P(U = u), and the survival S.
    probability = survival = np.ones(1)
    # Along U, sums over s of w_s, and of w_s times the branch's mean loss m_s, mean squared loss nu_s and evaluations.
    mass = risk = second = later = np.zeros(1)
    scanned = 0.0
    ended = system.ended()
    for t, (p, q) in enumerate(
        zip(system.absorbing_distributions(None), system.absorbing_distributions(action), strict=True)
    ):
        deficit, overlap = _normalized_overlap(p, q)
        scanned += float(probability @ ((survival > 0.0) & ~ended[t]))
        weight = survival * deficit
        loss, square, evaluations = branches[t]
        mass = np.repeat(mass + weight, size)
        risk = np.repeat(risk + weight * loss, size)
        second = np.repeat(second + weight * square, size)
        later = np.repeat(later + weight * evaluations, size)
        probability = (probability[:, None] * overlap).ravel()
        survival = np.repeat(survival * (1.0 - deficit), size)
    # J is s with probability w_s / M: Z^R has mean sum_s w_s m_s and second moment M sum_s w_s nu_s given U.
    mean = float(probability @ risk)
    branched = np.divide(later, mass, out=np.zeros_like(later), where=mass > 0.0)
    return {
        "swrb_risk": mean,
        "swrb_variance": max(float(probability @ (mass * second)) - mean**2, 0.0),
        "swrb_evaluations": scanned + float(probability @ branched),
    }


def _normalized_overlap(p: FloatArray, q: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the total variation e_s [B] and normalized overlap [B, V] of p and q [B, V]; without overlap, e_s is 1."""
    common = np.minimum(p, q)
    total = common.sum(axis=1, keepdims=True)
    deficit = np.where(total[:, 0] > 0.0, distribution_distance(p, q), 1.0)
    return deficit, np.divide(common, total, out=p.copy(), where=total > 0.0)


def _branches(paths: PairPaths, size: int) -> list[list[FloatArray]]:
    """Return for each s three conditional means given tau = s and the common prefix of s - 1 tokens.

    They are the means of D_H, the share of positions that differ, of D_H^2, and of the number of evaluated positions
    after s. Each is float64 [V**(s - 1)], with an entry for each prefix: 0 for a prefix with which no pair has tau = s.
    """
    horizon = paths.x.shape[1]
    entry, loss = paths.entry, paths.mismatch.mean(axis=1)
    evaluated = paths.evaluated
    branches: list[list[FloatArray]] = []
    code = np.zeros(len(loss), dtype=np.int64)  # of X_<s, which is Y_<s where tau = s
    for s in range(1, horizon + 1):
        chosen = entry == s
        values = np.stack([np.ones_like(loss), loss, loss**2, evaluated[:, s:].sum(axis=1)])
        total, *sums = (
            np.bincount(code[chosen], weights=row[chosen] * paths.probability[chosen], minlength=size ** (s - 1))
            for row in values
        )
        branches.append([np.divide(part, total, out=np.zeros(len(total)), where=total > 0.0) for part in sums])
        code = code * size + paths.x[:, s - 1]
    return branches


@dataclass(frozen=True, eq=False)
class ExactQuantities:
    """The exact quantities of one action of one system, with the moments of coupled rollouts and residual branching.

    The fields up to ``mean_entry`` are the decomposition's quantities of the same names.
    """

    mismatch: float
    rollout_tv: float
    fixed_history_tv: float
    occurrence: float
    exposure: float
    occupation: float
    mismatch_rate: float
    divergence_probability: float
    mean_entry: float | None  # None if nothing diverges
    p: FloatArray  # P(tau = s), float64 [H]
    rho: FloatArray  # rho_{s,j} in row s - 1 and column j, float64 [H, H]; 0 beyond the horizon and if p_s = 0
    observed: FloatArray  # R_L for L = 1..H, float64 [H]
    capacity: FloatArray  # B_L for L = 1..H, float64 [H]
    plain_variance: float  # variance of D_H of one coupled replicate
    plain_evaluations: float  # expected kernel-pair evaluations of one coupled replicate
    swrb_risk: float  # mean of Z^R = M D_J, the sum of the weights times the loss of the branch at J
    swrb_variance: float  # variance of Z^R
    swrb_evaluations: float  # expected kernel-pair evaluations of scan and branch


def exact_quantities(system: FiniteSystem, action: str) -> ExactQuantities:
    """Compute every quantity of ``action`` from all pairs of paths and all common prefixes."""
    paths = pair_paths(system, action)
    horizon = system.horizon
    entry, mismatch = paths.entry, paths.mismatch
    diverges, loss = entry <= horizon, mismatch.mean(axis=1)
    divergence = float(paths.mean(diverges))
    exposure = float(paths.mean((horizon - entry) * diverges)) / horizon
    occupation = float(paths.mean(mismatch.sum(axis=1) - diverges)) / horizon
    p, rho = _profile(paths)
    s = np.arange(1, horizon + 1)
    return ExactQuantities(
        mismatch=float(paths.mean(loss)),
        rollout_tv=float(paths.mean(paths.delta).sum()) / horizon,
        fixed_history_tv=float(paths.mean(paths.f).sum()) / horizon,
        occurrence=divergence / horizon,
        exposure=exposure,
        occupation=occupation,
        mismatch_rate=occupation / exposure if exposure > 0.0 else 0.0,
        divergence_probability=divergence,
        mean_entry=float(paths.mean(entry * diverges)) / divergence if divergence > 0.0 else None,
        p=p,
        rho=rho,
        observed=(p @ rho).cumsum() / horizon,  # rho is 0 beyond the horizon: the first L columns are all j < l_s
        capacity=np.array([p @ np.maximum(horizon - s - depth + 1, 0) for depth in s]) / horizon,
        plain_variance=paths.variance(loss),
        plain_evaluations=float(paths.mean(paths.evaluated).sum()),
        **_branching_moments(system, action, paths),
    )


def exact_rows(system: FiniteSystem, action: str) -> list[dict[str, Any]]:
    """Make the rows of table ``exact_values`` for ``action``: action, quantity, x and value.

    x is the position s for quantity ``p``, the depth L for ``observed`` and ``capacity``, and None for a scalar.
    Undefined values have no row.
    """
    exact = exact_quantities(system, action)
    scalars = {name: getattr(exact, name) for name in _SCALARS}
    profiles = {"p": exact.p, "observed": exact.observed, "capacity": exact.capacity}
    return [
        *({"action": action, "quantity": name, "x": None, "value": v} for name, v in scalars.items() if v is not None),
        *(
            {"action": action, "quantity": name, "x": x, "value": value}
            for name, profile in profiles.items()
            for x, value in enumerate(profile.tolist(), start=1)
        ),
    ]


def _profile(paths: PairPaths) -> tuple[FloatArray, FloatArray]:
    """Compute p_s = P(tau = s), [H], and rho_{s,j} = P(mismatch at s + j | tau = s), [H, H].

    See the paper, sec. "finite-branch-window".
    """
    entry, mismatch = paths.entry, paths.mismatch
    horizon = mismatch.shape[1]
    p, rho = np.zeros(horizon), np.zeros((horizon, horizon))
    for s in range(1, horizon + 1):
        here = paths.probability * (entry == s)
        p[s - 1] = here.sum()
        if p[s - 1] > 0.0:
            rho[s - 1, : horizon - s + 1] = here @ mismatch[:, s - 1 :] / p[s - 1]
    return p, rho
