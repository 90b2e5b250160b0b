"""The remaining work of a study: the units that a document is to have, and the units that it lacks.

Every count of remaining work uses ``lacking``: a run and its forecast for each document, ``kvdrift status`` for groups
of documents that hold the same units.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvdrift.flows.plan.frozen_plan import FrozenPlan
from kvdrift.schema.study import CONTROL_REPLICATES
from kvdrift.schema.tables import PLAIN, SWRB

Row = dict[str, Any]
Place = tuple[str, str]  # split, stratum
Cell = tuple[str, str, str, str, int]  # action, estimator, split, stratum, replicates
Held = Mapping[tuple[str, str], Sequence[tuple[int, int]]]
"""By action and estimator, the ranges of replicates that a document holds, each as its first and the one after its
last."""


class Wanted(NamedTuple):
    """Units that a document is to have: replicates 0 to K - 1 of an action."""

    action: str
    estimator: str
    replicates: int


def wanted_units(controls: Mapping[str, bool], replicates: int, branched: Collection[str]) -> list[Wanted]:
    """Return the units that each document of a split is to have: K replicates, also of residual branching if branched.

    Of an action that is a control ``CONTROL_REPLICATES`` at most are needed.
    """
    least = min(replicates, CONTROL_REPLICATES)
    plain = [Wanted(name, PLAIN, least if control else replicates) for name, control in controls.items()]
    return plain + [one._replace(estimator=SWRB) for one in plain if one.action in branched]


def lacking(held: Held, wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, int, int]]:
    """Yield the gaps in a document's wanted replicates: the first replicate of each gap, and the gap's length."""
    for one in wanted:
        at = 0
        for first, after in [*sorted(held.get((one.action, one.estimator), ())), (one.replicates, one.replicates)]:
            if at < min(first, one.replicates):
                yield one, at, min(first, one.replicates) - at
            at = max(at, after)


@dataclass(frozen=True)
class UnitsDone:
    """The number of document-action units that an action has in a split, and that it is to have."""

    split: str
    action: str
    done: int
    wanted: int


def units_done(
    actions: Mapping[str, Row], documents: Mapping[Place, int], covered: Mapping[Cell, int], plan: FrozenPlan | None,
    wanted_documents: Mapping[str, int],
) -> list[UnitsDone]:  # fmt: skip
    """Return how many documents of each split and stratum have at least ``replicates`` replicates of an action."""
    controls = {name: bool(row["control"]) for name, row in sorted(actions.items())}
    measured = [name for name, control in controls.items() if not control]
    most = max((replicates for _, _, split, _, replicates in covered if split == "development"), default=1)
    branched = measured if plan is not None and plan.estimator != PLAIN else []
    wanted = {"development": wanted_units(controls, most, branched)}
    if plan is not None:
        wanted["evaluation"] = wanted_units(controls, plan.replicates, plan.branched(measured))
    there = defaultdict[tuple[str, str, str], list[tuple[str, int, int]]](list)
    for (action, estimator, split, stratum, replicates), count in covered.items():
        there[split, action, estimator].append((stratum, replicates, count))
    found: dict[tuple[str, str], UnitsDone] = {}
    for split, one in ((split, one) for split, units in wanted.items() for one in units):
        whole = Counter[str]()
        for stratum, replicates, count in there[split, one.action, one.estimator]:
            held = {(one.action, one.estimator): [(0, replicates)]}
            whole[stratum] += 0 if any(lacking(held, [one])) else count
        each = {stratum: count for (of, stratum), count in documents.items() if of == split}
        if split == "evaluation":
            each = {stratum: wanted_documents[stratum] for stratum in each}
        done = sum(min(count, whole[stratum]) for stratum, count in each.items())
        before = found.get((split, one.action), UnitsDone(split, one.action, 0, 0))
        found[split, one.action] = UnitsDone(split, one.action, before.done + done, before.wanted + sum(each.values()))
    return list(found.values())
