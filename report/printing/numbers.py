"""Numbers and counts as text for readers: percent, points, tokens, bytes, seconds, intervals, and lists of words.

A missing number is an en dash, a negative one has a minus sign and not a hyphen, and zero has no sign.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal

from kvdrift.report.reading.estimates import Estimate
from kvdrift.stats.ends import error_of_ends
from kvdrift.stats.registry import Scale

MISSING = "–"
_BYTE_STEP = 1024
_MOST_DECIMALS = 6  # most decimals of an interval's end
_NOISE = 6  # further decimals beyond which sums of the same numbers in another order may differ
_LINED_UP = {Scale.PERCENT, Scale.POINTS, Scale.TOKENS}  # printed with equally many decimals in a column


def fixed(value: float | None, decimals: int) -> str:
    """Format a number with a fixed number of decimals; halves, up to rounding noise, are rounded away from zero."""
    if value is None:
        return MISSING
    rounded: float | Decimal = value
    if math.isfinite(value):
        exact = Decimal(repr(round(float(value), decimals + _NOISE)))
        rounded = exact.quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP)
    text = f"{rounded:,.{decimals}f}"
    if not text.strip("-0.,"):
        return text.removeprefix("-")
    return text.replace("-", "−")


def significant(value: float | None, digits: int = 3, most: int | None = None) -> str:
    """Format a number with ``digits`` significant digits, no exponent, and at most ``most`` decimals."""
    if not value:
        return MISSING if value is None else "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return fixed(value, decimals if most is None else min(decimals, most))


def decimals_for(estimates: Iterable[Estimate], scale: Scale) -> int:
    """Return the decimals of a column of estimates: one if a printed value reaches 10, else two."""
    return decimals_of([row.estimate for row in estimates], scale.factor)


def decimals_of(values: Iterable[float | None], factor: float) -> int:
    """Return the decimals of a column of values printed times ``factor``: one if any reaches 10, else two."""
    sizes = [abs(value) * factor for value in values if value is not None]
    return 2 if sizes and max(sizes) < 10 else 1


def scaled(value: float | None, scale: Scale, decimals: int) -> str:
    """Format a value without unit: percentages, points and tokens to ``decimals``, ratios and costs to 3 digits."""
    times = None if value is None else value * scale.factor
    return fixed(times, decimals) if scale in _LINED_UP else significant(times)


def interval(estimate: Estimate, scale: Scale, decimals: int) -> str:
    """Format ``[low, high]`` without unit, with as many decimals as bootstrap draws support; empty if unknown."""
    low, high = estimate.low, estimate.high
    if low is None or high is None:
        return ""
    low, high = scale.factor * low, scale.factor * high
    if scale in _LINED_UP:
        decimals = sure_decimals(low, high, estimate.level, estimate.draws, decimals)
        return f"[{fixed(low, decimals)}, {fixed(high, decimals)}]"
    most = sure_decimals(low, high, estimate.level, estimate.draws, _MOST_DECIMALS)
    return f"[{significant(low, most=most)}, {significant(high, most=most)}]"


def sure_decimals(
    low: float, high: float, level: float | None, draws: int | None, decimals: int, boundary: float = 0.0
) -> int:
    """Return the number of decimals for the ends of an interval, which are given in their printed unit.

    It is ``decimals``, the estimate's, or more if the ends would look equal and are not. If the interval has bootstrap
    draws, the number is reduced until two Monte Carlo standard errors of an end are at most one unit of the last
    decimal, but never so far that an end looks equal to ``boundary`` and is not.
    """
    while decimals < _MOST_DECIMALS and fixed(low, decimals) == fixed(high, decimals) and low != high:
        decimals += 1
    if not draws or level is None or not high > low:
        return decimals
    sure = max(0, min(decimals, math.floor(-math.log10(2 * error_of_ends(high - low, level, draws)))))
    while sure < decimals and any(end != boundary and fixed(end, sure) == fixed(boundary, sure) for end in (low, high)):
        sure += 1
    return sure


def in_text(estimate: Estimate, scale: Scale) -> str:
    """Format point, unit and interval for a sentence: ``41.2% [38.0, 44.1]``; ratios have no unit."""
    decimals = decimals_for([estimate], scale)
    if estimate.estimate is None:
        return MISSING
    sign = {Scale.PERCENT: "%", Scale.RATIO: ""}.get(scale, f" {scale.sign}")
    return f"{scaled(estimate.estimate, scale, decimals)}{sign} {interval(estimate, scale, decimals)}".rstrip()


def level(value: float | None) -> str:
    """Format the level of an interval: ``95%``, ``99.375%``."""
    return MISSING if value is None else f"{value * 100:.5g}%"


def count(value: float | None) -> str:
    """Format a whole number with thousands separated."""
    return fixed(value, 0)


def count_range(values: Iterable[int | None]) -> str:
    """Format the range of the known values, such as ``12–48``, or ``12`` if all are equal."""
    known = [value for value in values if value is not None]
    if not known:
        return MISSING
    low, high = min(known), max(known)
    return count(low) if low == high else f"{count(low)}–{count(high)}"


def size(value: float | None) -> str:
    """Format bytes in the largest binary unit that leaves at least 1."""
    if value is None:
        return MISSING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < _BYTE_STEP:
            return f"{fixed(value, 0 if unit == 'B' or value >= 100 else 1)} {unit}"
        value /= _BYTE_STEP
    return f"{fixed(value, 1)} TiB"


def duration(value: float | None) -> str:
    """Format a duration: in seconds, from two minutes on in minutes, from two hours on in hours."""
    if value is None:
        return MISSING
    for seconds, unit in ((3600, "h"), (60, "min")):
        if value >= 2 * seconds:
            return f"{fixed(value / seconds, 1)} {unit}"
    return f"{fixed(value, 1)} s"


def listed(parts: Sequence[str]) -> str:
    """Join words: ``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)
