"""Every reported quantity of the definitions page, by its name in ``results.quantity``.

A quantity is a function with its label, meaning, scale, and SQL view. Module ``actions`` has the quantities of one
action, ``contrasts`` those of two actions, ``answers`` those of answers, and ``estimator_costs`` those of residual
branching. Names are the column names of the SQL views if those are unique. ``kvdrift.stats.registry`` says which
operations a function may use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvdrift.schema.errors import InputError, nearest
from kvdrift.stats.quantities.actions import ACTION_QUANTITIES
from kvdrift.stats.quantities.answers import ANSWER_QUANTITIES
from kvdrift.stats.quantities.contrasts import CONTRAST_QUANTITIES
from kvdrift.stats.quantities.estimator_costs import BRANCHING_QUANTITIES
from kvdrift.stats.registry import Quantity, difference_of

QUANTITIES: Mapping[str, Quantity] = {**ACTION_QUANTITIES, **CONTRAST_QUANTITIES}

PAIR_QUANTITIES: Mapping[str, Quantity] = {**QUANTITIES, **ANSWER_QUANTITIES}  # of coupled pairs

# By the quantity of an action whose difference they are: the registered contrasts, and contrasts that are estimated
# only if they are asked for by name.
DIFFERENCES: Mapping[str, Quantity] = {
    **{name: difference_of(one) for name, one in PAIR_QUANTITIES.items() if one.kind == "action"},
    **{one.difference_of: one for one in PAIR_QUANTITIES.values() if one.difference_of},
}

SIMULTANEOUS_GAP = "gap_simultaneous"
"""The gap of every pair of actions with intervals that hold for all pairs together: ``kvdrift.stats.simultaneous``."""

SIMULTANEOUS_OF: Mapping[str, str] = {name: f"{name}_simultaneous" for name in ("mismatch", "accuracy")}
"""Quantities of the members of sweeps with intervals that hold for all members together, by the quantity."""

ALL_QUANTITIES: Mapping[str, Quantity] = {
    **PAIR_QUANTITIES,
    **BRANCHING_QUANTITIES,
    SIMULTANEOUS_GAP: replace(
        QUANTITIES["gap"], name=SIMULTANEOUS_GAP, meaning="gap in R (token), of all pairs together", view=None,
        column=SIMULTANEOUS_GAP,
    ),
    **{
        together: replace(
            PAIR_QUANTITIES[name], name=together, meaning=f"{PAIR_QUANTITIES[name].meaning}, of all members of sweeps "
            "together", view=None, column=together,
        )
        for name, together in SIMULTANEOUS_OF.items()
    },
}  # fmt: skip

_BY_NAME = {**{one.name: one for one in DIFFERENCES.values()}, **PAIR_QUANTITIES}


def quantity_named(name: str) -> Quantity:
    """Return a quantity of coupled pairs by name: a registered quantity, or the difference of one between actions."""
    if name not in _BY_NAME:
        raise InputError(f"no quantity is named '{name}'; {nearest(name, PAIR_QUANTITIES)}")
    return _BY_NAME[name]
