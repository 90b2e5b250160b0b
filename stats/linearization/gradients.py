"""The pooled moments that a quantity reads, and its derivative by each moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvdrift.stats.moments import DocumentMoments, Float
from kvdrift.stats.pooling import evaluate
from kvdrift.stats.registry import Array, Feature, Pooled, Quantity

# Complex-step differentiation: f(m + ih) has imaginary part h f'(m) + O(h^3), without cancellation. Quantities are
# rational functions of their moments, so any h whose cube underflows against h gives the derivative to rounding.
STEP = 1e-30


@dataclass(frozen=True)
class _Recorded(Pooled):
    """Pooled moments that record which features are read."""

    seen: dict[Feature, None] = field(default_factory=dict)

    def read(self, feature: Feature) -> Array:
        self.seen[feature] = None
        return super().read(feature)


@dataclass(frozen=True)
class _Stepped(Pooled):
    """Pooled moments of which one feature has a step into the complex plane."""

    at: Feature | None = None

    def read(self, feature: Feature) -> Array:
        value = super().read(feature)
        return value + 1j * STEP if feature == self.at else value


def features_read(quantity: Quantity, moments: DocumentMoments) -> tuple[tuple[int, Feature], ...]:
    """Return the features that a quantity reads, each with its side: 0 an action or baseline, 1 a contrast's action."""
    ones = {name: np.ones(()) for name in moments.scalars}
    profiles = {name: np.ones(value.shape[2:]) for name, value in {**moments.positions, **moments.lags}.items()}
    sides = [_Recorded(ones, profiles, moments.windows) for _ in range(1 if quantity.kind == "action" else 2)]
    quantity.function(*sides)
    return tuple((number, feature) for number, side in enumerate(sides) for feature in side.seen)


def constant_gradient(
    quantity: Quantity, moments: DocumentMoments, read: Sequence[tuple[int, Feature]]
) -> list[Float] | None:
    """Return a linear quantity's derivative by each feature, [1 or X]; None if the quantity is not linear.

    Quantities are rational functions, so a gradient that is equal at two generic points is constant.
    """
    random = np.random.default_rng(0)
    profiles = {**moments.positions, **moments.lags}
    found = []
    for _ in range(2):
        scalars = {name: random.uniform(0.1, 0.9) * np.ones(()) for name in moments.scalars}
        longs = {name: random.uniform(0.1, 0.9, size=value.shape[2:]) for name, value in profiles.items()}
        sides = [Pooled(scalars, longs, moments.windows), Pooled(_halved(scalars), _halved(longs), moments.windows)]
        own = sides[: 1 if quantity.kind == "action" else 2]
        found.append([derivative(quantity, own, side, feature) for side, feature in read])
    same = all(np.array_equal(one, other) for one, other in zip(*found, strict=True))
    return found[0] if same else None


def _halved(values: Mapping[str, Array]) -> dict[str, Array]:
    return {name: value / 2 for name, value in values.items()}


def derivative(quantity: Quantity, pooled: Sequence[Pooled], side: int, feature: Feature) -> Float:
    """Return the derivative of a quantity by one feature of one side, at pooled moments, in the shape of the values."""
    stepped = [
        _Stepped(one.scalars, one.profiles, one.windows, one.sums, feature) if number == side else one
        for number, one in enumerate(pooled)
    ]
    found: Float = evaluate(quantity, stepped).imag / STEP
    return found
