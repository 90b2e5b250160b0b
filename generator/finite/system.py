"""A finite-state system: a table of next-token distributions for every history, of a reference and of each action.

A history is coded as a number in base V whose first digit is the first token. The distributions of position t + 1 are
an array [V**t, V], and a history's code times V plus a token is the code of the history with that token added.

The paper's random family mixes the reference with each action's own random distribution. Such a distribution is a
function of seed, system, action and history alone. It depends neither on the other systems and actions of a study nor
on the horizon.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvdrift.schema.errors import InputError, nearest
from kvdrift.schema.keyed_random import keyed_generator

FloatArray = NDArray[np.float64]
Distributions = tuple[FloatArray, ...]
"""The distributions of each position t = 1..H, [V**(t - 1), V]."""

SUM_TOLERANCE = 1e-12
"""Largest error of a distribution's sum; rounding moves the sum over V tokens by at most V * 1.2e-16."""
LARGEST_TABLE = 2**22
"""Most numbers in one kernel's distributions of the last position: 32 MiB."""


@dataclass(frozen=True, eq=False)
class FiniteSystem:
    """Kernels P and Q^a over an alphabet of V tokens to horizon H (paper, sec. "timing-occupation").

    The distributions may differ at position 1 already, since there is no prompt.

    Attributes:
        name: The system's name.
        alphabet: V, the number of tokens, at least 2.
        horizon: H, the number of positions, at least 1.
        reference: Distributions of the reference on its own history.
        actions: Distributions of each action on its own history, at least one action.
        eos_tokens: Absorbing tokens. After a side has emitted one, its distribution is the point mass on
            ``eos_tokens[0]``, whatever its table says.
    """

    name: str
    alphabet: int
    horizon: int
    reference: Distributions
    actions: Mapping[str, Distributions]
    eos_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_shape(self.name, self.alphabet, self.horizon, self.eos_tokens)
        where = f"system '{self.name}'"
        if not self.actions:
            raise InputError(f"{where}: no action; a system has a reference and at least one action")
        self._check_distributions(f"{where}, reference", self.reference)
        for action, distributions in self.actions.items():
            self._check_distributions(f"{where}, action '{action}'", distributions)

    def distributions(self, action: str | None) -> Distributions:
        """Return the tables of an action, or of the reference (None)."""
        if action is None:
            return self.reference
        if action not in self.actions:
            raise InputError(f"system '{self.name}' has no action '{action}'; {nearest(action, self.actions)}")
        return self.actions[action]

    def absorbing_distributions(self, action: str | None) -> Distributions:
        """Return the tables in which each distribution after an EOS token is the point mass on ``eos_tokens[0]``."""
        distributions = self.distributions(action)
        if not self.eos_tokens:
            return distributions
        absorbed = np.eye(self.alphabet)[self.eos_tokens[0]]
        return tuple(
            np.where(ended[:, None], absorbed, table) for ended, table in zip(self.ended(), distributions, strict=False)
        )

    def ended(self) -> tuple[NDArray[np.bool_], ...]:
        """Return whether each history of t = 0..H tokens contains an EOS token, bool [V**t] each."""
        is_eos = np.isin(np.arange(self.alphabet), self.eos_tokens)
        ended = [np.zeros(1, dtype=np.bool_)]
        for _ in range(self.horizon):
            ended.append((ended[-1][:, None] | is_eos).ravel())
        return tuple(ended)

    def _check_distributions(self, where: str, distributions: Distributions) -> None:
        if len(distributions) != self.horizon:
            raise InputError(
                f"{where}: has distributions of {len(distributions)} position(s), and the horizon is {self.horizon}"
            )
        for t, table in enumerate(distributions):
            shape = (self.alphabet**t, self.alphabet)
            if table.shape != shape or table.dtype != np.float64:
                raise InputError(
                    f"{where}, position {t + 1}: distributions are {table.dtype} {list(table.shape)}, not float64 "
                    f"{list(shape)}"
                )
            # Written so that NaN fails both.
            faulty = ~((table >= 0.0).all(axis=1) & (np.abs(table.sum(axis=1) - 1.0) <= SUM_TOLERANCE))
            if faulty.any():
                code = int(faulty.argmax())
                raise InputError(
                    f"{where}, position {t + 1}, history {list(history_of(code, t, self.alphabet))}: "
                    f"{_fault(table[code])}"
                )


def check_shape(name: str, alphabet: int, horizon: int, eos_tokens: tuple[int, ...] = ()) -> None:
    """Check that a table has room for alphabet and horizon, and that EOS tokens are distinct tokens of the alphabet."""
    if alphabet < 2:
        raise InputError(f"system '{name}': an alphabet has at least 2 tokens, not {alphabet}")
    if horizon < 1:
        raise InputError(f"system '{name}': a horizon is at least 1, not {horizon}")
    if horizon > 64 or alphabet**horizon > LARGEST_TABLE:
        raise InputError(
            f"system '{name}': {alphabet} tokens to horizon {horizon} make distributions of {alphabet}^{horizon} "
            f"numbers; a table holds at most {LARGEST_TABLE}: use a smaller alphabet or a shorter horizon"
        )
    for place, token in enumerate(eos_tokens):
        if not 0 <= token < alphabet:
            raise InputError(f"system '{name}': EOS token {token} is not one of 0..{alphabet - 1}")
        if token in eos_tokens[:place]:
            raise InputError(f"system '{name}': EOS token {token} is given twice")


def history_of(code: int, length: int, alphabet: int) -> tuple[int, ...]:
    """Return the ``length`` tokens of a history from its code."""
    return tuple(code // alphabet**place % alphabet for place in reversed(range(length)))


def _fault(distribution: FloatArray) -> str:
    for token, probability in enumerate(distribution.tolist()):
        if not probability >= 0.0:
            return f"token {token} has probability {probability!r}; a probability is at least 0"
    return f"the distribution sums to {float(distribution.sum())!r}, not to 1 (within {SUM_TOLERANCE:g})"


def mixture_system(
    seed: int, name: str, number: int, total: int, alphabet: int, horizon: int, actions: Sequence[str]
) -> FiniteSystem:
    """Draw system c = ``number`` of C = ``total`` of the paper's section "measurement-validation".

    Q = (1 - lambda) P + lambda A. At every prefix P and A normalize independent Gamma(1.5, 1) + 0.05 weights, and
    lambda = (0.05 + 0.45 c / C) U V with U ~ Unif[.5, 1], V ~ Unif[0, 1]. The published systems have 2 tokens, H = 3
    and C = 24. No token is EOS.

    U and V are drawn for each prefix, like P and A. The paper does not say whether lambda belongs to a prefix or to a
    system, but one lambda per system does not fit its numbers. In 500 simulated families (512 replicates of each
    estimator) the largest of the 24 variance ratios is at most the published 289 in 18% of the families with a lambda
    per prefix, and in 0.6% with one per system; the median is at most the published 52.7 in 12% and in 0.8%; and the 24
    published risks are nine times likelier with a lambda per prefix.
    """
    check_shape(name, alphabet, horizon)
    strength = 0.05 + 0.45 * number / total
    lengths = range(horizon)
    stream = keyed_generator(json.dumps(["laws", seed, name, None]))
    reference = tuple(_random_distributions(stream, alphabet**t, alphabet) for t in lengths)
    mixtures = {}
    for action in actions:
        stream = keyed_generator(json.dumps(["laws", seed, name, action]))
        mixed = []
        for p in reference:
            own_kernel = _random_distributions(stream, len(p), alphabet)
            u, v = stream.random((2, len(p), 1))
            share = strength * (0.5 + 0.5 * u) * v
            mixed.append((1.0 - share) * p + share * own_kernel)
        mixtures[action] = tuple(mixed)
    return FiniteSystem(name, alphabet, horizon, reference, mixtures)


def _random_distributions(stream: np.random.Generator, histories: int, alphabet: int) -> FloatArray:
    """Draw normalized Gamma(1.5, 1) + 0.05 weights, [histories, V], from 3 uniforms each.

    Gamma(1.5, 1) is the sum of a Gamma(1, 1), here -log u, and a Gamma(1/2, 1), half a squared normal (Box-Muller). The
    numbers are the same under every version of numpy, which ``Generator.gamma`` does not promise.
    """
    u = 1.0 - stream.random((histories, alphabet, 3))  # in (0, 1]
    gamma = -np.log(u[..., 0]) - np.log(u[..., 1]) * np.cos(2.0 * np.pi * u[..., 2]) ** 2
    weights = gamma + 0.05
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))
