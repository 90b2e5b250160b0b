"""Numbers as people read them: percent, percentage points, tokens, bytes, seconds, and their intervals.

A missing number is an en dash, a negative one has a minus sign and not a hyphen, and zero has no sign.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from report.reading.estimates import Estimate
from report.reading.quantities import Unit

MISSING = "–"
_BYTE_STEP = 1024
_MINUTE = 60
_HOUR = 3600


def fixed(value: float | None, decimals: int) -> str:
    """A number with a fixed count of decimals."""
    if value is None:
        return MISSING
    text = f"{value:,.{decimals}f}"
    if not text.strip("-0.,"):
        return text.removeprefix("-")
    return text.replace("-", "−")


def significant(value: float | None, digits: int = 3) -> str:
    """A number to so many digits, for ratios and costs that go over orders of magnitude; no exponent."""
    if value is None or not value:
        return MISSING if value is None else "0"
    return fixed(value, max(0, digits - 1 - math.floor(math.log10(abs(value)))))


def decimals_for(estimates: Iterable[Estimate], unit: Unit) -> int:
    """Decimals for a column: one from 10 on, two below, so that small fractions keep three digits."""
    return decimals_of([row.estimate for row in estimates], unit.factor)


def decimals_of(values: Iterable[float | None], factor: float) -> int:
    """The same for plain values, each printed times ``factor``."""
    sizes = [abs(value) * factor for value in values if value is not None]
    return 2 if sizes and max(sizes) < 10 else 1


def point(estimate: Estimate, unit: Unit, decimals: int) -> str:
    """The point alone, without its unit."""
    return fixed(None if estimate.estimate is None else estimate.estimate * unit.factor, decimals)


def interval(estimate: Estimate, unit: Unit, decimals: int) -> str:
    """``[low, high]`` without unit; empty where there is no interval."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"[{fixed(estimate.low * unit.factor, decimals)}, {fixed(estimate.high * unit.factor, decimals)}]"


def published(estimate: Estimate, unit: Unit, decimals: int) -> str:
    """The paper's number as it stands under ours; empty where there is none."""
    return "" if estimate.published is None else f"published {fixed(estimate.published * unit.factor, decimals)}"


def in_text(estimate: Estimate, unit: Unit) -> str:
    """Point, unit and interval as they stand in a sentence: ``41.2% [38.0, 44.1]``."""
    decimals = decimals_for([estimate], unit)
    if estimate.estimate is None:
        return MISSING
    sign = unit.sign if unit is Unit.PERCENT else f" {unit.sign}"
    return f"{point(estimate, unit, decimals)}{sign} {interval(estimate, unit, decimals)}".rstrip()


def level(value: float | None) -> str:
    """Coverage of an interval: ``95%``, ``99.375%``."""
    return MISSING if value is None else f"{value * 100:.5g}%"


def count(value: float | None) -> str:
    """A whole number with thousands separated."""
    return fixed(value, 0)


def count_range(values: Iterable[int | None]) -> str:
    """``12`` or ``12–48``: all values at once."""
    known = [value for value in values if value is not None]
    if not known:
        return MISSING
    low, high = min(known), max(known)
    return count(low) if low == high else f"{count(low)}–{count(high)}"


def size(value: float | None) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    if value is None:
        return MISSING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < _BYTE_STEP:
            return f"{fixed(value, 0 if unit == 'B' or value >= 100 else 1)} {unit}"
        value /= _BYTE_STEP
    return f"{fixed(value, 1)} TiB"


def duration(value: float | None) -> str:
    """Seconds, from two minutes on minutes, from two hours on hours."""
    if value is None:
        return MISSING
    if value < 2 * _MINUTE:
        return f"{fixed(value, 1)} s"
    if value < 2 * _HOUR:
        return f"{fixed(value / _MINUTE, 1)} min"
    return f"{fixed(value / _HOUR, 1)} h"
