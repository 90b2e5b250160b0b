"""Endpoints, each the name of one number of an analysis; families with adjusted intervals; decisions on a margin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvdrift.schema.errors import InputError, nearest
from kvdrift.schema.study import POOLED
from kvdrift.schema.windows import Windows
from kvdrift.stats.quantities import DIFFERENCES, PAIR_QUANTITIES, quantity_named
from kvdrift.stats.registry import Higher, Quantity


@dataclass(frozen=True)
class Endpoint:
    """The name of one number in a plan or family: a quantity of an action, or of its contrast with a ``baseline``.

    ``x`` is the position, lag, block or EOS set, if the quantity has a number at each; else None.
    """

    quantity: str
    action: str
    baseline: str | None = None
    stratum: str = POOLED
    x: int | None = None

    def __str__(self) -> str:
        subject = self.action if self.baseline is None else f"{self.action} against {self.baseline}"
        return f"{self.quantity}{'' if self.x is None else f'[{self.x}]'} of {subject} ({self.stratum})"

    def check(self, actions: Sequence[str], strata: Sequence[str], windows: Windows) -> Quantity:
        """Check the endpoint against existing actions and strata (without ``pooled``); return its quantity.

        Raises:
            InputError: The quantity, action, baseline or stratum does not exist; the quantity needs a baseline, or
                takes none; or it has no value at ``x``.
        """
        quantity = quantity_named(self.quantity)
        if self.action == self.baseline:
            raise InputError(f"endpoint {self}: an action against itself; give another baseline")
        for action in (self.action,) if self.baseline is None else (self.action, self.baseline):
            if action not in actions:
                raise InputError(f"endpoint {self}: no action '{action}'; {nearest(action, actions)}")
        if (self.baseline is None) != (quantity.kind == "action"):
            need = "takes no baseline" if quantity.kind == "action" else "needs a baseline"
            raise InputError(f"endpoint {self}: '{self.quantity}' {need}")
        if self.stratum not in (POOLED, *strata):
            raise InputError(f"endpoint {self}: no stratum '{self.stratum}'; {nearest(self.stratum, strata)}")
        if self.x not in quantity.x(windows):
            raise InputError(f"endpoint {self}: x must be {_span(quantity.x(windows))}")
        return quantity


@dataclass(frozen=True)
class Family:
    """A prespecified family of m endpoints: each interval is at 1 - alpha / m.

    ``size`` is m if the family has members outside this analysis (another model's endpoints); 0 stands for the number
    of endpoints here.
    """

    name: str
    endpoints: tuple[Endpoint, ...]
    alpha: float = 0.05
    size: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise InputError(f"family '{self.name}': alpha {self.alpha} is not between 0 and 1")
        if len(set(self.endpoints)) != len(self.endpoints):
            twice = next(endpoint for endpoint in self.endpoints if self.endpoints.count(endpoint) > 1)
            raise InputError(f"family '{self.name}' names endpoint {twice} twice")
        if self.size and self.size < len(self.endpoints):
            raise InputError(f"family '{self.name}' has {len(self.endpoints)} endpoints but a size of {self.size}")

    @property
    def level(self) -> float:
        """The level of each interval, 1 - alpha / m."""
        return 1 - self.alpha / max(self.size or len(self.endpoints), 1)


class Decision(StrEnum):
    """The outcome of comparing the interval of a difference with a margin."""

    EQUIVALENT = "equivalent or better"
    WORSE = "worse"
    UNRESOLVED = "unresolved"


def decide(low: float | None, high: float | None, margin: float, higher: Higher) -> Decision:
    """Decide whether an action is worse than a baseline by more than a margin, from an interval of their difference.

    [low, high] is the two-sided 1 - 2 alpha interval of the action's value less the baseline's, so that ``EQUIVALENT``
    and ``WORSE`` each have level 1 - alpha. If higher values are better, the interval is negated: [-high, -low].
    Without an interval the decision is ``UNRESOLVED``.
    """
    if low is None or high is None:
        return Decision.UNRESOLVED
    if higher is Higher.BETTER:
        low, high = -high, -low
    if high < margin:
        return Decision.EQUIVALENT
    return Decision.WORSE if low > margin else Decision.UNRESOLVED


def decidable_quantities() -> dict[str, Quantity]:
    """Return the contrasts that a gate can decide on, by name.

    Such a contrast is a single number, and higher values of it are either worse or better. A registered contrast has
    its own name; the difference of a quantity between two actions has the quantity's name.
    """
    contrasts = {name: quantity for name, quantity in PAIR_QUANTITIES.items() if quantity.kind == "contrast"}
    return {
        name: quantity for name, quantity in {**DIFFERENCES, **contrasts}.items()
        if quantity.axis is None and not quantity.profile and quantity.higher is not Higher.NEITHER
    }  # fmt: skip


def decidable_quantity(name: str) -> Quantity:
    """Return the contrast with a name, or the difference between two actions of the quantity with that name."""
    known = decidable_quantities()
    if name in known:
        return known[name]
    if name not in PAIR_QUANTITIES:
        raise InputError(f"no quantity is named '{name}'; {nearest(name, known)}")
    if (axis := PAIR_QUANTITIES[name].axis) is not None:
        why = f"it has a value at each {axis}, and a decision is on a single number"
    elif PAIR_QUANTITIES[name].profile:
        why = "it needs moments at every position, and a decision is made from means over whole pairs"
    else:
        why = "neither higher nor lower values are better"
    raise InputError(
        f"'{name}' cannot be decided on: {why}; kvdrift list quantities names the quantities that can be decided"
    )


def _span(values: tuple[int | None, ...]) -> str:
    if values == (None,):
        return "null, since the quantity is a single number"
    return f"one of {values[0]}..{values[-1]}" if values else "in the quantity's window, which is empty"
