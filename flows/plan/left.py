"""The remaining work of a study: the units that a document is to have, the units that it lacks, and the looks taken.

Every count of remaining work uses ``lacking``: a run and its forecast for each document, ``kvdrift status`` for groups
of documents that hold the same units.

A look of a sequential study is taken when all of its documents are generated and derived; its rows in table ``looks``
record it. Everything else follows from these rows, so that a run that was killed anywhere stops at the same look.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from kvdrift.flows.plan.frozen_plan import FrozenPlan, Looks
from kvdrift.log.store import Store
from kvdrift.log.units.revisions import newest_revisions
from kvdrift.schema.frozen_text import wanted_documents
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


@dataclass(frozen=True)
class LooksTaken:
    """The looks that a sequential study and model has taken, under its newest plan."""

    plan: FrozenPlan  # the plan
    looks: Looks  # the plan's looks
    # the last look that was taken, 0 before the first. Its results for actions that were redone since, or for revised
    # documents, do not count and must be computed again.
    reached: int
    rows: tuple[Row, ...]  # results of look ``reached``, for current revisions of actions and documents

    @classmethod
    def in_store(cls, store: Store, plan: FrozenPlan) -> LooksTaken | None:
        """Read the looks from a store; None if the study is not sequential."""
        looks = plan.looks
        if looks is None:
            return None
        own = [row for row in store.read("looks").to_pylist() if row["plan_sha256"] == plan.sha256]
        own = [row for row in own if (row["study"], row["model"]) == (plan.study, plan.model)]
        reached = max((row["look"] for row in own), default=0)
        newest = newest_revisions(store.read("actions")) if own else {}
        documents = store.documents_revision(plan.study, plan.model)

        def is_current(row: Row) -> bool:
            named = ((row["action"], row["action_revision"]), (row["baseline"], row["baseline_revision"]))
            current = all(revision == newest.get((plan.study, action or ""), 0) for action, revision in named)
            return current and row["documents_revision"] == documents

        return cls(plan, looks, reached, tuple(row for row in own if row["look"] == reached and is_current(row)))

    @cached_property
    def lacking(self) -> bool:
        """Whether the last look must be taken again, because actions were redone or documents revised."""
        return bool(self.reached) and len(self.rows) < len(self.plan.family.endpoints)

    @property
    def stopped(self) -> bool:
        """Whether the study is complete: every primary endpoint is resolved, or the last look was taken."""
        whole = bool(self.reached) and not self.lacking
        return whole and (self.reached == len(self.looks) or all(row["resolved"] for row in self.rows))

    @property
    def wanted(self) -> int:
        """The look whose documents are wanted; if the study has stopped, the last look that was taken."""
        return self.reached + (not self.stopped and not self.lacking)

    @property
    def documents(self) -> Mapping[str, int]:
        """The number of documents of each stratum wanted by now, in the plan's order."""
        counts, order = self.looks.documents[self.wanted - 1], self.looks.order
        return {stratum: min(count, len(order[stratum])) for stratum, count in counts.items()}


def wanted_by_stratum(plan: FrozenPlan, taken: LooksTaken | None, *, at_most: bool = False) -> Mapping[str, int]:
    """Return how many documents of each stratum a plan asks for by now: N, unless the plan is sequential.

    ``at_most`` takes a sequential study that has not stopped to its N.
    """
    if taken is None or (at_most and not taken.stopped):
        return wanted_documents(plan.content)
    return taken.documents


def look_line(taken: LooksTaken) -> str:
    """Return a line on how far a study has come, and which endpoints are resolved."""
    count = sum(taken.looks.documents[taken.reached - 1].values()) if taken.reached else 0
    total = sum(taken.looks.documents[-1].values())
    line = f"look {taken.reached} of {len(taken.looks)}, {count} of {total} documents"
    if not taken.reached:
        return line
    open_ones = [_named(row) for row in taken.rows if not row["resolved"]]
    resolved = len(taken.rows) - len(open_ones)
    line += f": {resolved} of {len(taken.plan.family.endpoints)} primary endpoints resolved"
    if taken.lacking:
        return f"{line}, to be taken again"
    unresolved = f"; unresolved: {', '.join(open_ones)}" if open_ones else ""
    return f"{line}{'; stopped' if taken.stopped else ''}{unresolved}"


def _named(row: Row) -> str:
    return f"{row['quantity']} of {row['action']}" + ("" if row["baseline"] is None else f" against {row['baseline']}")
