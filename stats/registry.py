"""What a quantity is: a named function of pooled moments, and where SQL computes the same.

A function takes pooled moments whose arrays have any leading axes (draws, strata, actions) and, for profile moments,
the position or lag as last axis; it returns the same leading axes, with a last axis for a quantity that has an
``axis``. Values are fractions, entry times are tokens. Undefined is NaN (null in results). Functions use only smooth
arithmetic and exact comparisons with 0, so complex moments go through them too (``stats.allocation`` differentiates
them that way). The quantities themselves are in ``stats.quantities``.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stats.moments import Windows

Array = NDArray[Any]  # float64, or complex128 while a derivative is taken

Axis = Literal["t", "lag", "block", "eos_set"]


@dataclass(frozen=True)
class Pooled:
    """Pooled moments M(g) of one action (definitions, "Pooling"): ``scalars`` [...], ``profiles`` [..., H or T].

    The two are kept apart because a scalar and a profile moment share a name (``mismatch``). ``m[name]`` is a scalar.
    """

    scalars: Mapping[str, Array]
    profiles: Mapping[str, Array]
    windows: Windows

    def __getitem__(self, name: str) -> Array:
        return self.scalars[name]


@dataclass(frozen=True)
class Quantity:
    """One reported quantity.

    ``function`` takes one Pooled for an action, two (baseline a, action b) for a contrast. ``axis`` is what ``x``
    counts, None for a scalar; ``profile`` names the profile moments it needs beyond the scalars; ``view`` is None where
    no SQL view has it.
    """

    name: str
    kind: Literal["action", "contrast"]
    function: Callable[..., Array]
    meaning: str
    view: str | None
    column: str
    axis: Axis | None = None
    profile: tuple[str, ...] = ()

    def x(self, windows: Windows) -> tuple[int | None, ...]:
        """Return the values of ``x`` in order: positions, lags, blocks or EOS sets; (None,) for a scalar."""
        if self.axis is None:
            return (None,)
        first, last = {
            "t": (1, windows.horizon),
            "lag": (1, windows.cohort_bound),
            "block": (1, 3),
            "eos_set": (0, 3),
        }[self.axis]
        return tuple(range(first, last + 1))


_REGISTERED: dict[str, Quantity] = {}


def ratio(numerator: Array, denominator: Array) -> Array:
    """Ratio of moments, NaN where the denominator is 0 (definitions, "Pooling": a ratio is a ratio of moments)."""
    numerator, denominator = np.broadcast_arrays(numerator, denominator)
    kind = np.result_type(numerator, denominator, np.float64)
    quotient: Array = np.divide(
        numerator, denominator, out=np.full(numerator.shape, np.nan, kind), where=denominator != 0
    )
    return quotient


def register(
    kind: Literal["action", "contrast"],
    view: str | None,
    column: str | None = None,
    axis: Axis | None = None,
    profile: tuple[str, ...] = (),
) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Register the decorated function under its own name; its docstring's first line is the meaning."""

    def add(function: Callable[..., Array]) -> Callable[..., Array]:
        name = function.__name__
        meaning = (function.__doc__ or "").strip().splitlines()[0]
        _REGISTERED[name] = Quantity(name, kind, function, meaning, view, column or name, axis, profile)
        return function

    return add


def difference_of(of: Callable[[Pooled], Array]) -> None:
    """Register the contrast ``<name>_difference``: an action quantity of b minus that of baseline a."""

    def difference(a: Pooled, b: Pooled) -> Array:
        return of(b) - of(a)

    name = f"{of.__name__}_difference"
    _REGISTERED[name] = Quantity(name, "contrast", difference, f"{of.__name__}(b) - {of.__name__}(a).", None, name)


def registered() -> MappingProxyType[str, Quantity]:
    """Return the registry as a read-only view; complete once ``stats.quantities`` is imported."""
    return MappingProxyType(_REGISTERED)
