"""Draw the paper's random family of finite-state systems: each action mixes the reference with its own random law.

A law is a function of seed, system, action and history alone. It depends neither on the other systems and actions of a
study nor on the horizon.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from kvdrift.generator.finite.system import FiniteSystem, FloatArray, check_shape
from kvdrift.schema.errors import InputError
from kvdrift.schema.keyed_random import keyed_generator


def mixture_system(
    seed: int, name: str, number: int, total: int, alphabet: int, horizon: int, actions: Sequence[str]
) -> FiniteSystem:
    """Draw system c = ``number`` of C = ``total`` of the paper's section "measurement-validation".

    Q = (1 - lambda) P + lambda A. At every prefix P and A normalize independent Gamma(1.5, 1) + 0.05 weights, and
    lambda = (0.05 + 0.45 c / C) U V with U ~ Unif[.5, 1], V ~ Unif[0, 1]. The published systems have 2 tokens, H = 3
    and C = 24. No token is EOS.

    U and V are drawn for each prefix, like P and A. The paper does not say whether lambda belongs to a prefix or to a
    system, but one lambda per system does not fit its numbers. In 500 simulated families (512 replicates of each
    estimator) the largest of the 24 variance ratios is at most the published 289 in 18% with a lambda per prefix and in
    0.6% with one per system; the median is at most the published 52.7 in 12% and in 0.8%; and the 24 published risks
    are nine times likelier with a lambda per prefix.
    """
    check_shape(name, alphabet, horizon)
    if not 1 <= number <= total:
        raise InputError(f"system '{name}': number {number} is not one of 1..{total}")
    strength = 0.05 + 0.45 * number / total
    lengths = range(horizon)
    stream = _stream(seed, name, None)
    reference = tuple(_random_laws(stream, alphabet**t, alphabet) for t in lengths)
    mixtures = {}
    for action in actions:
        stream = _stream(seed, name, action)
        mixed = []
        for p in reference:
            own = _random_laws(stream, len(p), alphabet)
            u, v = stream.random((2, len(p), 1))
            share = strength * (0.5 + 0.5 * u) * v
            mixed.append((1.0 - share) * p + share * own)
        mixtures[action] = tuple(mixed)
    return FiniteSystem(name, alphabet, horizon, reference, mixtures)


def _random_laws(stream: np.random.Generator, histories: int, alphabet: int) -> FloatArray:
    """Draw normalized Gamma(1.5, 1) + 0.05 weights, [histories, V], from 3 uniforms each.

    Gamma(1.5, 1) is the sum of a Gamma(1, 1), here -log u, and a Gamma(1/2, 1), half a squared normal (Box-Muller). The
    numbers are the same under every version of numpy, which ``Generator.gamma`` does not promise.
    """
    u = 1.0 - stream.random((histories, alphabet, 3))  # in (0, 1]
    gamma = -np.log(u[..., 0]) - np.log(u[..., 1]) * np.cos(2.0 * np.pi * u[..., 2]) ** 2
    weights = gamma + 0.05
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _stream(seed: int, system: str, action: str | None) -> np.random.Generator:
    """Return the random stream of one kernel."""
    return keyed_generator(json.dumps(["laws", seed, system, action]))
