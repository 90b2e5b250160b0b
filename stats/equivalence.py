"""Whether an action is at most a margin worse than a baseline (definitions, "Gate")."""

from __future__ import annotations

from enum import Enum

from schema.errors import InputError, nearest
from stats.quantities import DIFFERENCES, QUANTITIES
from stats.registry import Higher, Quantity


class Decision(Enum):
    """What an interval of a difference says of a margin."""

    EQUIVALENT = "equivalent or better"
    WORSE = "worse"
    UNRESOLVED = "unresolved"


def decide(low: float | None, high: float | None, margin: float, higher: Higher) -> Decision:
    """Decide by the two-sided 1 - 2 alpha interval [low, high] of theta_b - theta_a, each answer at level 1 - alpha.

    Where higher is better, the difference is turned round: [-high, -low]. Without an interval nothing is decided.
    """
    if low is None or high is None:
        return Decision.UNRESOLVED
    if higher is Higher.BETTER:
        low, high = -high, -low
    if high < margin:
        return Decision.EQUIVALENT
    return Decision.WORSE if low > margin else Decision.UNRESOLVED


def decidable_quantities() -> dict[str, Quantity]:
    """Return the contrasts that can be decided on, by each name that they can be asked for.

    A single number, of which more is worse or better: a quantity of actions stands for its difference.
    """
    contrasts = {name: one for name, one in QUANTITIES.items() if one.kind == "contrast"}
    return {
        name: one for name, one in {**DIFFERENCES, **contrasts}.items()
        if one.axis is None and one.higher is not Higher.NEITHER
    }  # fmt: skip


def decidable_quantity(name: str) -> Quantity:
    """Return the contrast that is meant by the name of a quantity of actions, or its own.

    Raises:
        InputError: there is none, or it cannot be decided on; the message says why.

    """
    known = decidable_quantities()
    if name in known:
        return known[name]
    if name not in QUANTITIES:
        raise InputError(f"no quantity is named '{name}'; {nearest(name, known)}")
    if (axis := QUANTITIES[name].axis) is not None:
        why = f"it has a value at each {axis}, and a decision is on a single number"
    else:
        why = "more of it is neither worse nor better"
    raise InputError(f"'{name}' cannot be decided on: {why}; kvdrift list quantities names those that can")
