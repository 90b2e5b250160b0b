"""What a quantity is: a named function of pooled moments, with meaning, printed scale, and SQL view.

A function takes pooled moments whose arrays have any leading axes (draws, strata, actions) and, for profile moments,
the position or lag as last axis; it returns the same leading axes, with a last axis for a quantity that has an
``axis``. Values are fractions, entry times are tokens. Undefined values are NaN (null in results). Functions of smooth
quantities use only smooth arithmetic and exact comparisons with 0, so complex moments go through them too
(``kvdrift.stats.standard_errors`` differentiates them that way). The quantities themselves are in
``kvdrift.stats.quantities``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvdrift.schema.windows import Windows

Array = NDArray[Any]  # float64, or complex128 while a derivative is taken

Kind = Literal["action", "contrast"]
FeatureKind = Literal["scalar", "profile", "until", "since"]
Axis = Literal["t", "lag", "block", "eos_set"]
Support = Literal["branched", "both"]

DIFFERENCE = "_difference"


class Scale(Enum):
    """The printed form of stored values: a factor, and the sign of the unit."""

    PERCENT = (100.0, "%")
    POINTS = (100.0, "pp")
    TOKENS = (1.0, "tokens")
    RATIO = (1.0, "×")
    SQUARED_POINTS = (10_000.0, "pp²")
    PAIRS = (1.0, "pairs")
    MILLISECONDS = (1_000.0, "ms")
    NATS = (1.0, "nats")

    @property
    def factor(self) -> float:
        """Printed value / stored value."""
        return self.value[0]

    @property
    def sign(self) -> str:
        """The unit in a column's head: "pp" are percentage points, "pairs" are pairs of next-token distributions."""
        return self.value[1]

    @property
    def implied_range(self) -> Range:
        """The range of a quantity of this scale that declares no range."""
        known = {Scale.PERCENT: Range.FRACTION, Scale.POINTS: Range.DIFFERENCE, Scale.TOKENS: Range.POSITION}
        return known.get(self, Range.AT_LEAST_ZERO)


class Between(NamedTuple):
    """The ends of a range of values; infinite if the range has no end."""

    low: float
    high: float

    @property
    def bounded(self) -> bool:
        """Whether the range has any end."""
        return self != (-np.inf, np.inf)

    @property
    def finite(self) -> bool:
        """Whether the range has both ends."""
        return bool(np.isfinite(self).all())

    @property
    def is_fraction(self) -> bool:
        """Whether the values are fractions, in a range from 0 to at most 1."""
        return self.low == 0 and self.high <= 1

    @property
    def resolution(self) -> float:
        """The largest standard error that counts as 0: 1e-12 of the range's width; 1e-12 if that is 0 or infinite."""
        width = self.high - self.low
        return 1e-12 * (width if 0 < width < np.inf else 1.0)


class Range(Enum):
    """The range of a quantity's values, whatever the documents; intervals are cut to it."""

    FRACTION = "fraction"
    DIFFERENCE = "difference of two fractions"
    SECOND_DIFFERENCE = "difference of two such differences"
    PER_POSITION = "fraction, divided by H"
    POSITION = "position"
    POSITION_DIFFERENCE = "difference of two positions"
    AT_LEAST_ZERO = "at least 0"
    UNBOUNDED = "any number"

    def between(self, horizon: int) -> Between:
        """Return the lower and the upper end of the range at a horizon H."""
        ends = {
            Range.FRACTION: (0.0, 1.0),
            Range.DIFFERENCE: (-1.0, 1.0),
            Range.SECOND_DIFFERENCE: (-2.0, 2.0),
            Range.PER_POSITION: (0.0, 1.0 / horizon),
            Range.POSITION: (1.0, float(horizon)),
            Range.POSITION_DIFFERENCE: (1.0 - horizon, horizon - 1.0),
            Range.AT_LEAST_ZERO: (0.0, np.inf),
            Range.UNBOUNDED: (-np.inf, np.inf),
        }
        return Between(*ends[self])

    @property
    def of_difference(self) -> Range:
        """Return the range of the difference of two values of this range."""
        return {
            Range.FRACTION: Range.DIFFERENCE,
            Range.DIFFERENCE: Range.SECOND_DIFFERENCE,
            Range.PER_POSITION: Range.DIFFERENCE,
            Range.POSITION: Range.POSITION_DIFFERENCE,
        }.get(self, Range.UNBOUNDED)


class Feature(NamedTuple):
    """The input of a quantity: a scalar moment, a profile moment, or a profile's sum up to, or from, each place x."""

    kind: FeatureKind
    name: str


@dataclass(frozen=True)
class Pooled:
    """Pooled moments M(g) of one action; ``m[name]`` is a scalar moment.

    Scalars and profiles are kept apart because a scalar and a profile moment share a name (``mismatch``). A quantity
    over positions or lags at x is a function of features at the same x; sums over x are the features ``until`` and
    ``since``.
    """

    scalars: Mapping[str, Array]  # [...] by moment
    profiles: Mapping[str, Array]  # [..., H or T] by moment
    windows: Windows
    sums: dict[Feature, Array] = field(default_factory=dict)  # the sums over x that were read

    def __getitem__(self, name: str) -> Array:
        return self.read(Feature("scalar", name))

    def profile(self, name: str) -> Array:
        """Return the profile moment at every x, [..., X]."""
        return self.read(Feature("profile", name))

    def until(self, name: str) -> Array:
        """Return the profile moment summed over 1..x, [..., X]."""
        return self.read(Feature("until", name))

    def since(self, name: str) -> Array:
        """Return the profile moment summed over x and all later places, [..., X]."""
        return self.read(Feature("since", name))

    def read(self, feature: Feature) -> Array:
        """Return a feature of the moments."""
        if feature.kind == "scalar":
            return self.scalars[feature.name]
        if feature.kind == "profile":
            return self.profiles[feature.name]
        if feature not in self.sums:
            # Since x from the far end, so that an empty rest is exactly 0; a difference of sums would leave 1e-16.
            turn = slice(None, None, 1 if feature.kind == "until" else -1)
            self.sums[feature] = np.cumsum(self.profiles[feature.name][..., turn], axis=-1)[..., turn]
        return self.sums[feature]


class Higher(Enum):
    """Whether higher values of a quantity are worse, better, or neither for an action."""

    WORSE = "worse"
    BETTER = "better"
    NEITHER = "neither"


@dataclass(frozen=True)
class Quantity:
    """One reported quantity."""

    name: str  # its name in ``results.quantity``
    kind: Kind  # whether it belongs to an action or to a contrast of two actions
    function: Callable[..., Array]  # takes one Pooled for an action, two (baseline a, action b) for a contrast
    label: str  # the symbol or short name in a column's head
    meaning: str  # its meaning, in words
    scale: Scale  # the printed form of its values
    range: Range  # the ends that its values lie between
    view: str | None  # the view that has the point value; None if no view has it
    column: str  # the view's column
    axis: Axis | None = None  # the name of ``x`` and of its column in the view; None for a scalar
    profile: tuple[str, ...] = ()  # the profile moments that the function needs beyond the scalars
    higher: Higher = Higher.NEITHER  # whether more of it is worse, better, or neither by itself
    # the quantity of an action whose difference a contrast is; None for every other quantity
    difference_of: str | None = None
    # the denominator of a ratio of moments, as a function of them; None for every other quantity
    per: Callable[[Pooled], Array] | None = None
    # whether it has derivatives by its moments; others have no standard errors, but intervals of expanded percentiles
    smooth: bool = True

    def x(self, windows: Windows) -> tuple[int | None, ...]:
        """Return the values of ``x`` in order: positions, lags, blocks or EOS sets; (None,) for a scalar."""
        if self.axis is None:
            return (None,)
        first = 0 if self.axis == "eos_set" else 1
        last = {"t": windows.horizon, "lag": windows.cohort_bound, "block": 3, "eos_set": 3}[self.axis]
        return tuple(range(first, last + 1))


@dataclass(frozen=True)
class BranchingQuantity(Quantity):
    """A quantity of residual branching, whose function takes pooled moments by name (``kvdrift.stats.efficiency``)."""

    # the documents that its moments are pooled over: those with SWRB replicates (``branched``), or those with at least
    # two replicates of both estimators (``both``)
    support: Support = "both"


def moment(name: str) -> Callable[[Pooled], Array]:
    """Return the function that reads the scalar moment of a name from pooled moments."""
    return lambda m: m[name]


def ratio(numerator: Array, denominator: Array) -> Array:
    """Divide moments, NaN if the denominator is 0 (a ratio is a ratio of means: ``docs/quantities.md``)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient: Array = np.asarray(np.true_divide(numerator, denominator))
    zero = np.equal(denominator, 0)
    if zero.any():  # usually no denominator is 0, and a masked division would take several times as long
        np.copyto(quotient, np.nan, where=zero)
    return quotient


def action_quantity(
    name: str, function: Callable[[Pooled], Array], label: str, meaning: str, view: str | None,
    higher: Higher = Higher.NEITHER, scale: Scale = Scale.PERCENT, *, column: str = "", axis: Axis | None = None,
    profile: tuple[str, ...] = (), values: Range | None = None, per: str | Callable[[Pooled], Array] = "",
    smooth: bool = True,
) -> Quantity:  # fmt: skip
    """Make a quantity of an action; the arguments are the attributes of ``Quantity``.

    By default ``column`` is the quantity's name, and ``values``, the range, is implied by the scale. ``per`` may be the
    name of a scalar moment.
    """
    denominator = moment(per) if isinstance(per, str) and per else per or None
    return Quantity(
        name, "action", function, label, meaning, scale, values or scale.implied_range, view, column or name, axis,
        profile, higher, per=denominator, smooth=smooth,
    )  # fmt: skip


def ratio_quantity(
    name: str, part: str, whole: str, label: str, meaning: str, view: str, higher: Higher = Higher.NEITHER,
    scale: Scale = Scale.PERCENT,
) -> Quantity:  # fmt: skip
    """Make a quantity of an action that is the ratio of two scalar moments."""
    return action_quantity(name, lambda m: ratio(m[part], m[whole]), label, meaning, view, higher, scale, per=whole)


def contrast_quantity(
    name: str, function: Callable[[Pooled, Pooled], Array], label: str, meaning: str, view: str | None,
    higher: Higher = Higher.NEITHER, scale: Scale = Scale.POINTS, values: Range | None = None,
) -> Quantity:  # fmt: skip
    """Make a contrast, a function of a baseline's and an action's moments; arguments are as for ``action_quantity``."""
    between = values or scale.implied_range
    return Quantity(name, "contrast", function, label, meaning, scale, between, view, name, higher=higher)


def difference_of(quantity: Quantity) -> Quantity:
    """Return the contrast ``<name>_difference`` of a quantity: the action's value less the baseline's."""

    def difference(a: Pooled, b: Pooled) -> Array:
        return quantity.function(b) - quantity.function(a)

    full = f"{quantity.name}{DIFFERENCE}"
    scale = quantity.scale if quantity.scale in {Scale.TOKENS, Scale.NATS} else Scale.POINTS
    between, meaning = quantity.range.of_difference, f"difference: {quantity.meaning}"
    return Quantity(
        full, "contrast", difference, f"Δ {quantity.label}", meaning, scale, between, None, full, quantity.axis,
        quantity.profile, quantity.higher, quantity.name, smooth=quantity.smooth,
    )  # fmt: skip
