"""The frozen plan as stored, its comparison with the study file, and the remaining work.

A frozen plan never changes. Larger K and N, and with ``run --replan`` other changes of ``[plan]``, make a later
revision; the newest revision is the plan.

Every count of remaining work uses ``lacking``: a run and its forecast for each document, ``kvdrift status`` for groups
of documents that hold the same units. An interim look of a sequential study is taken when all of its documents are
generated and derived; its rows in table ``looks`` record it. Everything else follows from these rows, so a run that was
killed anywhere stops at the same interim look.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from kvdrift.log.counts import Counts
from kvdrift.log.store import Store
from kvdrift.log.units.revisions import newest_plans, newest_revisions
from kvdrift.schema.errors import PlanError
from kvdrift.schema.frozen_text import frozen_sha256, wanted_documents
from kvdrift.schema.study import CONTROL_REPLICATES, Study
from kvdrift.schema.tables import PLAIN, SWRB
from kvdrift.stats.endpoints import Endpoint, Family
from kvdrift.stats.sequential import Resolution

PRIMARY_FAMILY = "primary"

T = TypeVar("T")
Row = dict[str, Any]
Held = Mapping[tuple[str, str], Sequence[tuple[int, int]]]
"""By action and estimator, the ranges of replicates that a document holds: the first replicate, and the one after the
last."""

# Keys of [plan] whose values may grow, each with the key of the chosen value in the content of a plan.
_SIZES = {"plan.replicates": "replicates", "plan.documents": "documents_per_stratum"}


class _Entry(Generic[T]):
    """An attribute of a plan: the entry with the attribute's name in the plan's content, converted by ``kind``."""

    def __init__(self, kind: Callable[[Any], T]) -> None:
        self._kind = kind

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    def __get__(self, plan: FrozenPlan, _owner: type) -> T:
        return self._kind(plan.content[self._name])


@dataclass(frozen=True)
class FrozenPlan:
    """A revision of a plan in the store; ``content`` is its JSON."""

    study: str
    model: str
    sha256: str
    frozen_at: datetime
    content: dict[str, Any]
    revision: int = 0

    replicates = _Entry(int)  # K of the evaluation
    documents_per_stratum = _Entry(int)  # N of the evaluation: it takes the first N documents of each stratum
    documents = _Entry[dict[str, dict[str, list[dict[str, Any]]]]](dict)  # by split and stratum, in order
    actions = _Entry[list[str]](list)  # the actions that were fixed with the plan, controls left out
    seen = _Entry(bool)  # whether evaluation documents of this or an earlier revision had been seen before
    interval = _Entry(str)  # the method of intervals
    seed = _Entry(int)  # of the study, and of resampling
    draws = _Entry(int)  # bootstrap draws of primary quantities
    exploratory_draws = _Entry(int)  # bootstrap draws of all other quantities

    @property
    def evaluated_documents(self) -> dict[str, dict[str, Any]]:
        """The frozen documents that the evaluation takes, keyed by id."""
        strata = self.documents["evaluation"].values()
        return {row["doc"]: row for rows in strata for row in rows[: self.documents_per_stratum]}

    @property
    def looks(self) -> InterimLooks | None:
        """The interim looks of a sequential study; None for a study of fixed size N."""
        sequential = self.content.get("sequential")
        return None if sequential is None else InterimLooks.of(sequential)

    @property
    def evaluated(self) -> int:
        """How many evaluation documents of the study and model had units when the plan was frozen."""
        return int(self.content.get("evaluated_documents", 0))

    @property
    def estimator(self) -> str:
        """The study file's estimator: plain, SWRB or hybrid."""
        return str(self.content["residual_branching"]["estimator"])

    @property
    def branched_actions(self) -> list[str]:
        """The actions for which the plan has replicates of residual branching."""
        return list(self.content["residual_branching"]["actions"])

    def branched(self, measured: Sequence[str]) -> list[str]:
        """Return the measured actions that get replicates of residual branching in the evaluation.

        Under the estimator "swrb" an action that was added after the plan is branched like the planned actions.
        """
        return list(measured) if self.estimator == SWRB else self.branched_actions

    @property
    def primary(self) -> list[str]:
        """The names of the quantities of the primary endpoints."""
        return list(dict.fromkeys(endpoint["quantity"] for endpoint in self.content["primary_endpoints"]))

    @property
    def family(self) -> Family:
        """The primary endpoints, whose intervals are adjusted together."""
        endpoints = tuple(
            Endpoint(entry["quantity"], entry["action"], entry["baseline"])
            for entry in self.content["primary_endpoints"]
        )
        return Family(PRIMARY_FAMILY, endpoints, self.content["alpha"], self.content.get("family_size") or 0)


@dataclass(frozen=True)
class InterimLooks:
    """The interim looks of a sequential plan (``docs/sequential.md``)."""

    order: dict[str, list[str]]  # the evaluation documents of each stratum, in the order in which they are taken
    documents: list[dict[str, int]]  # for each interim look the number of documents of each stratum, in order
    constants: list[float]  # critical constant of each interim look, in standard errors
    resolution: Resolution  # the rule that resolves an endpoint

    @classmethod
    def of(cls, content: dict[str, Any]) -> InterimLooks:
        """Return the interim looks from a plan's ``sequential`` entry."""
        stored_looks = content["looks"]
        documents, constants = (
            [stored_look[name] for stored_look in stored_looks] for name in ("documents", "constant")
        )
        return cls(content["order"], documents, constants, Resolution(content["resolve"], content["bound"]))

    def __len__(self) -> int:
        return len(self.documents)

    def names(self, number: int) -> set[str]:
        """Return the names of the documents of interim look ``number``; the first interim look is number 1."""
        return {doc for stratum, count in self.documents[number - 1].items() for doc in self.order[stratum][:count]}


def find_plan(store: Store, study: str, model: str) -> FrozenPlan | None:
    """Return the newest revision of the frozen plan of a study and model; None if there is no plan yet.

    Raises:
        PlanError: the stored plan was changed.
    """
    row = newest_plans(store.read("plans")).get((study, model))
    if row is None:
        return None
    if frozen_sha256(row["plan"]) != row["plan_sha256"]:
        raise PlanError(
            f"the stored plan of study '{study}' was changed: its SHA-256 is not {row['plan_sha256'][:12]}…, with "
            "which it was frozen; restore the store from a backup"
        )
    content = json.loads(row["plan"])
    return FrozenPlan(study, model, row["plan_sha256"], row["frozen_at"], content, row["plan_revision"])


def require_plan(store: Store, study: Study) -> FrozenPlan:
    """Return the frozen plan of a study, after checking that the study file agrees with the plan."""
    plan = find_plan(store, study.name, study.model.id)
    if plan is None:
        raise PlanError(f"study '{study.name}' has no frozen plan to evaluate by; kvdrift run STUDY.toml freezes one")
    check_plan_agrees(plan, study)
    return plan


def check_plan_agrees(plan: FrozenPlan, study: Study) -> None:
    """Compare a study file with its frozen plan, and refuse differences."""
    if differences := plan_differences(plan, study):
        frozen = f"the plan frozen on {plan.frozen_at:%Y-%m-%d %H:%M} UTC ({plan.sha256[:12]}…)"
        listed = "; ".join(map(str, differences))
        accept = "give the changed study a new name"
        if all(difference.replanned for difference in differences):
            accept = "kvdrift run STUDY.toml --replan plans anew"
        line = f"[plan] or [windows] differ from {frozen}: {listed}; restore them, or {accept}"
        raise PlanError(f"study '{study.name}': {line}")
    names = [action.name for action in study.actions]
    for name in plan.actions:
        if name not in names:
            raise PlanError(
                f"study '{study.name}': action '{name}' is in the frozen plan but not in the study file: restore it"
            )


@dataclass(frozen=True)
class PlanDifference:
    """A value of ``[plan]`` or ``[windows]`` that a study file and its frozen plan do not share."""

    what: str  # The key, as in ``plan.alpha``
    frozen: Any  # The frozen value, as JSON holds it
    requested: Any  # The study file's value
    chosen: int | None = None  # The plan's K or N, if the key sets K or N

    @property
    def grows(self) -> bool:
        """Whether the difference is a larger K or N, which the next revision of the plan adopts."""
        return self.chosen is not None and isinstance(self.requested, int) and self.requested > self.chosen

    @property
    def replanned(self) -> bool:
        """Whether ``--replan`` adopts the difference; it adopts no windows, which are fixed with the study."""
        return not self.what.startswith("windows.")

    @property
    def before(self) -> str:
        """The frozen value as text, followed by the plan's chosen K or N in brackets if that differs."""
        chosen = "" if self.chosen is None or self.chosen == self.frozen else f" ({self.chosen})"
        return shown(self.frozen) + chosen

    def __str__(self) -> str:
        return f"{self.what}: frozen {self.before}, requested {shown(self.requested)}"


def plan_differences(plan: FrozenPlan, study: Study) -> list[PlanDifference]:
    """Return the values of a study file's ``[plan]`` and ``[windows]`` that differ from the frozen values.

    The method of intervals is compared if the study file names a method. At temperature 0 the study file's
    number of replicates has no effect.
    """
    frozen, method = plan.content["settings"], study.plan.interval or plan.interval
    methods = [] if method == plan.interval else [PlanDifference("plan.interval", plan.interval, method)]
    idle = {"plan.replicates"} if study.sampling.greedy else set()
    return methods + [
        PlanDifference(what := f"{section}.{key}", held, requested, plan.content.get(_SIZES.get(what, "")))
        for section, values in plan_settings(study).items()
        for key, requested in values.items()
        if (held := frozen[section].get(key)) != requested and f"{section}.{key}" not in idle
    ]


def grown_plan(plan: FrozenPlan, study: Study) -> FrozenPlan:
    """Return a plan with the larger K and N of its study file, or the plan itself if nothing grows.

    The grown plan is not frozen yet; it stands for the next revision as far as K and N go.

    Raises:
        PlanError: the study file differs in something else, or a planned action is missing.
    """
    growing = [difference for difference in plan_differences(plan, study) if difference.grows]
    if not growing:
        check_plan_agrees(plan, study)
        return plan
    settings = plan.content["settings"]
    requested = {difference.what.removeprefix("plan."): difference.requested for difference in growing}
    content = plan.content | {_SIZES[difference.what]: difference.requested for difference in growing}
    content.pop("sequential", None)  # these interim looks belong to the frozen size
    grown = replace(plan, content=content | {"settings": settings | {"plan": settings["plan"] | requested}})
    check_plan_agrees(grown, study)
    return grown


def plan_settings(study: Study) -> dict[str, dict[str, Any]]:
    """Return the settings that decide the plan, as JSON holds them: ``[plan]``, and ``[windows]`` with defaults.

    The method of intervals is left out, since the plan records it itself.
    """
    return {
        "plan": study.plan.model_dump(mode="json", exclude={"interval"}),
        "windows": dict(study.window_values.without_horizon),
    }


def plan_section_sha256(study: Study) -> str:
    """Return the SHA-256 of ``plan_settings`` and the method of intervals."""
    deciding = plan_settings(study) | {"interval": study.plan.interval}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def shown(value: object) -> str:
    """Return a setting's value as text for a message."""
    return "none" if value is None else str(value)


class Wanted(NamedTuple):
    """Units that a document is to have: replicates 0 to K - 1 of an action."""

    action: str
    estimator: str
    replicates: int


def wanted_units(controls: Mapping[str, bool], replicates: int, branched: Collection[str]) -> list[Wanted]:
    """Return the units that each document of a split is to have, with K ``replicates`` of each action.

    An action in ``branched`` also needs K replicates of residual branching. ``controls`` says of each action whether it
    is a control, which needs at most ``CONTROL_REPLICATES`` replicates.
    """
    least = min(replicates, CONTROL_REPLICATES)
    plain = [Wanted(name, PLAIN, least if control else replicates) for name, control in controls.items()]
    return plain + [unit._replace(estimator=SWRB) for unit in plain if unit.action in branched]


def lacking(held: Held, wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, int, int]]:
    """Yield each gap in a document's wanted replicates: the unit, the gap's first replicate, and the gap's length."""
    for unit in wanted:
        at = 0
        for first, after in [*sorted(held.get((unit.action, unit.estimator), ())), (unit.replicates, unit.replicates)]:
            if at < min(first, unit.replicates):
                yield unit, at, min(first, unit.replicates) - at
            at = max(at, after)


@dataclass(frozen=True)
class UnitsDone:
    """The number of units that an action has in a split, and the number that it needs."""

    split: str
    action: str
    done: int
    wanted: int


def units_done(
    actions: Mapping[str, Row], counts: Counts, plan: FrozenPlan | None, wanted_documents: Mapping[str, int]
) -> list[UnitsDone]:
    """Return for each split and action how many units are done and wanted; a unit is all replicates of a document.

    ``actions`` maps names of actions to rows of table ``actions``, ``counts`` are those of the study and model.
    ``wanted_documents`` is the number of evaluation documents of each stratum that the ``plan`` needs by now; without a
    plan the evaluation is left out.
    """
    controls = {name: bool(row["control"]) for name, row in sorted(actions.items())}
    measured = [name for name, control in controls.items() if not control]
    most = max((held.replicates for place, held in counts.current if place.split == "development"), default=1)
    branched = measured if plan is not None and plan.estimator != PLAIN else []
    wanted = {"development": wanted_units(controls, most, branched)}
    if plan is not None:
        wanted["evaluation"] = wanted_units(controls, plan.replicates, plan.branched(measured))
    there = defaultdict[tuple[str | None, str, str], list[tuple[str | None, int, int]]](list)
    for (place, held), count in counts.current.items():
        there[place.split, held.action, held.estimator].append((place.stratum, held.replicates, count))
    counted: dict[tuple[str, str], UnitsDone] = {}
    for split, unit in ((split, unit) for split, units in wanted.items() for unit in units):
        whole, each = Counter[str | None](), Counter[str | None]()
        for stratum, replicates, count in there[split, unit.action, unit.estimator]:
            covered = {(unit.action, unit.estimator): [(0, replicates)]}
            whole[stratum] += 0 if any(lacking(covered, [unit])) else count
        for place, count in counts.documents.items():
            if place.split == split:
                each[place.stratum] += count
        if split == "evaluation":
            each = Counter({stratum: wanted_documents[stratum or ""] for stratum in each})
        done = sum(min(count, whole[stratum]) for stratum, count in each.items())
        before = counted.get((split, unit.action), UnitsDone(split, unit.action, 0, 0))
        counted[split, unit.action] = UnitsDone(
            split, unit.action, before.done + done, before.wanted + sum(each.values())
        )
    return list(counted.values())


@dataclass(frozen=True)
class InterimLooksTaken:
    """The interim looks that a sequential study and model has taken, under its newest plan."""

    plan: FrozenPlan  # the plan
    looks: InterimLooks  # the plan's interim looks
    # the number of the last interim look taken, 0 before the first. Its results for actions that were redone since, or
    # for revised documents, do not count and must be computed again.
    reached: int
    rows: tuple[Row, ...]  # results of interim look ``reached``, for current revisions of actions and documents

    @classmethod
    def in_store(cls, store: Store, plan: FrozenPlan) -> InterimLooksTaken | None:
        """Read the interim looks from a store; None if the study is not sequential."""
        interim_looks = plan.looks
        if interim_looks is None:
            return None
        rows_of_plan = [row for row in store.read("looks").to_pylist() if row["plan_sha256"] == plan.sha256]
        rows_of_plan = [row for row in rows_of_plan if (row["study"], row["model"]) == (plan.study, plan.model)]
        reached = max((row["look"] for row in rows_of_plan), default=0)
        newest = newest_revisions(store.read("actions")) if rows_of_plan else {}
        documents = store.documents_revision(plan.study, plan.model)

        def is_current(row: Row) -> bool:
            named = ((row["action"], row["action_revision"]), (row["baseline"], row["baseline_revision"]))
            current = all(revision == newest.get((plan.study, action or ""), 0) for action, revision in named)
            return current and row["documents_revision"] == documents

        return cls(
            plan,
            interim_looks,
            reached,
            tuple(row for row in rows_of_plan if row["look"] == reached and is_current(row)),
        )

    @cached_property
    def lacking(self) -> bool:
        """Whether the last interim look must be taken again, because actions were redone or documents revised."""
        return bool(self.reached) and len(self.rows) < len(self.plan.family.endpoints)

    @property
    def stopped(self) -> bool:
        """Whether the study is complete: all primary endpoints are resolved, or the last interim look was taken."""
        whole = bool(self.reached) and not self.lacking
        return whole and (self.reached == len(self.looks) or all(row["resolved"] for row in self.rows))

    @property
    def wanted(self) -> int:
        """The number of the interim look to take next, or of the last one taken if the study has stopped."""
        return self.reached + (not self.stopped and not self.lacking)

    @property
    def documents(self) -> Mapping[str, int]:
        """How many documents of each stratum are wanted by now, with the strata in the plan's order."""
        counts, order = self.looks.documents[self.wanted - 1], self.looks.order
        return {stratum: min(count, len(order[stratum])) for stratum, count in counts.items()}


def wanted_by_stratum(plan: FrozenPlan, taken: InterimLooksTaken | None, *, at_most: bool = False) -> Mapping[str, int]:
    """Return how many documents of each stratum a plan needs by now: N, unless the plan is sequential.

    With ``at_most``, a sequential study that has not stopped needs N too.
    """
    if taken is None or (at_most and not taken.stopped):
        return wanted_documents(plan.content)
    return taken.documents


def interim_look_line(taken: InterimLooksTaken) -> str:
    """Return a line on the progress of a sequential study, and on which endpoints are resolved."""
    count = sum(taken.looks.documents[taken.reached - 1].values()) if taken.reached else 0
    total = sum(taken.looks.documents[-1].values())
    line = f"interim look {taken.reached} of {len(taken.looks)}, {count} of {total} documents"
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


def number(value: float) -> float | None:
    """Replace NaN by None: JSON has no NaN, and an undefined number is null in the store."""
    return None if math.isnan(value) else float(value)
