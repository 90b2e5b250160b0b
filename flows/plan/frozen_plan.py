"""The frozen plan, read from the store, and its comparison with the study file.

A frozen plan never changes. Larger K and N, and with ``run --replan`` other changes of ``[plan]``, make a later
revision; the newest revision is the plan.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from kvdrift.log.store import Store
from kvdrift.log.units.revisions import newest_plans
from kvdrift.schema.errors import PlanError
from kvdrift.schema.frozen_text import frozen_sha256
from kvdrift.schema.study import Study
from kvdrift.schema.tables import SWRB
from kvdrift.stats.endpoints import Endpoint, Family
from kvdrift.stats.sequential import Resolution

PRIMARY_FAMILY = "primary"

# Keys of [plan] that may grow, with the plan's key of the chosen value.
_SIZES = {"plan.replicates": "replicates", "plan.documents": "documents_per_stratum"}


@dataclass(frozen=True)
class FrozenPlan:
    """A revision of a plan in the store; ``content`` is its JSON."""

    study: str
    model: str
    sha256: str
    frozen_at: datetime
    content: dict[str, Any]
    revision: int = 0

    @property
    def replicates(self) -> int:
        """K of the evaluation."""
        return int(self.content["replicates"])

    @property
    def documents_per_stratum(self) -> int:
        """N of the evaluation: how many documents of each stratum it takes, in their order."""
        return int(self.content["documents_per_stratum"])

    @property
    def documents(self) -> dict[str, dict[str, list[dict[str, Any]]]]:
        """The frozen documents by split and stratum, in order."""
        return dict(self.content["documents"])

    @property
    def evaluated_documents(self) -> dict[str, dict[str, Any]]:
        """The frozen documents that the evaluation takes, by their ids."""
        strata = self.documents["evaluation"].values()
        return {row["doc"]: row for rows in strata for row in rows[: self.documents_per_stratum]}

    @property
    def looks(self) -> Looks | None:
        """The looks of a sequential study; None for a study that goes to N."""
        sequential = self.content.get("sequential")
        return None if sequential is None else Looks.of(sequential)

    @property
    def seen(self) -> bool:
        """Whether evaluation documents of this or an earlier revision had been seen when the plan was frozen."""
        return bool(self.content["seen"])

    @property
    def evaluated(self) -> int:
        """How many evaluation documents of the study and model had units when the plan was frozen."""
        return int(self.content.get("evaluated_documents", 0))

    @property
    def interval(self) -> str:
        """The method of intervals."""
        return str(self.content["interval"])

    @property
    def seed(self) -> int:
        """The study's seed, which is also the seed of resampling."""
        return int(self.content["seed"])

    @property
    def draws(self) -> int:
        """Bootstrap draws of primary quantities."""
        return int(self.content["draws"])

    @property
    def exploratory_draws(self) -> int:
        """Bootstrap draws of all other quantities."""
        return int(self.content["exploratory_draws"])

    @property
    def actions(self) -> list[str]:
        """Actions that were fixed with the plan, controls left out."""
        return list(self.content["actions"])

    @property
    def estimator(self) -> str:
        """The estimator that the study file asks for: plain, SWRB or hybrid."""
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
        """Quantities of the primary endpoints."""
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
class Looks:
    """The looks of a sequential plan (definitions, "Sequential studies")."""

    order: dict[str, list[str]]  # the evaluation documents of each stratum, in the order in which they are taken
    documents: list[dict[str, int]]  # for each look the number of documents of each stratum, counted from the first
    constants: list[float]  # critical constant of each look, in standard errors
    resolution: Resolution  # the rule that resolves an endpoint

    @classmethod
    def of(cls, content: dict[str, Any]) -> Looks:
        """Return the looks from a plan's ``sequential`` entry."""
        looks = content["looks"]
        documents, constants = ([look[name] for look in looks] for name in ("documents", "constant"))
        return cls(content["order"], documents, constants, Resolution(content["resolve"], content["bound"]))

    def __len__(self) -> int:
        return len(self.documents)

    def names(self, look: int) -> set[str]:
        """Return the documents of a look, counted from 1."""
        return {doc for stratum, count in self.documents[look - 1].items() for doc in self.order[stratum][:count]}


def find_plan(store: Store, study: str, model: str) -> FrozenPlan | None:
    """Return the newest revision of the frozen plan of a study and model; None if there is none yet."""
    row = newest_plans(store.read("plans")).get((study, model))
    if row is None:
        return None
    if frozen_sha256(row["plan"]) != row["plan_sha256"]:
        raise PlanError(f"the plan of study '{study}' does not have its hash {row['plan_sha256'][:12]}…")
    content = json.loads(row["plan"])
    return FrozenPlan(study, model, row["plan_sha256"], row["frozen_at"], content, row["plan_revision"])


def require_plan(store: Store, study: Study) -> FrozenPlan:
    """Return the frozen plan of a study, after checking that the study file agrees with the plan."""
    plan = find_plan(store, study.name, study.model.id)
    if plan is None:
        raise PlanError(f"study '{study.name}' has no frozen plan: evaluation starts after the plan, not before")
    check_plan_agrees(plan, study)
    return plan


def check_plan_agrees(plan: FrozenPlan, study: Study) -> None:
    """Compare a study file with its frozen plan, and refuse differences."""
    if differences := plan_differences(plan, study):
        frozen = f"the plan frozen on {plan.frozen_at:%Y-%m-%d %H:%M} UTC ({plan.sha256[:12]}…)"
        listed = "; ".join(map(str, differences))
        accept = "give the changed study a new name"
        if all(one.replanned for one in differences):
            accept = "kvdrift run STUDY.toml --replan plans anew"
        line = f"[plan] or [windows] differ from {frozen}: {listed}; restore them, or {accept}"
        raise PlanError(f"study '{study.name}': {line}")
    names = [action.name for action in study.actions]
    for name in plan.actions:
        if name not in names:
            raise PlanError(f"study '{study.name}': action '{name}' is in the frozen plan but not in the study file")


@dataclass(frozen=True)
class PlanDifference:
    """A value of ``[plan]`` or ``[windows]`` that a study file and its frozen plan do not share."""

    what: str  # The key, as in ``plan.alpha``
    frozen: Any  # The frozen value, as JSON holds it
    asked: Any  # The study file's value
    chosen: int | None = None  # The plan's K or N, if the key sets K or N

    @property
    def grows(self) -> bool:
        """Whether the difference is a larger K or N, which the next revision of the plan takes."""
        return self.chosen is not None and isinstance(self.asked, int) and self.asked > self.chosen

    @property
    def replanned(self) -> bool:
        """Whether planning anew takes the difference; windows are fixed with the study."""
        return not self.what.startswith("windows.")

    @property
    def before(self) -> str:
        """The frozen value, with the chosen value in brackets if they differ."""
        chosen = "" if self.chosen is None or self.chosen == self.frozen else f" ({self.chosen})"
        return shown(self.frozen) + chosen

    def __str__(self) -> str:
        return f"{self.what}: frozen {self.before}, asked {shown(self.asked)}"


def plan_differences(plan: FrozenPlan, study: Study) -> list[PlanDifference]:
    """Compare ``[plan]`` and ``[windows]`` with the frozen values.

    The method of intervals is compared if the study file names a method. Under a greedy law the study file's number of
    replicates decides nothing.
    """
    frozen, method = plan.content["settings"], study.plan.interval or plan.interval
    methods = [] if method == plan.interval else [PlanDifference("plan.interval", plan.interval, method)]
    idle = {"plan.replicates"} if study.law.greedy else set()
    return methods + [
        PlanDifference(what := f"{section}.{key}", held, asked, plan.content.get(_SIZES.get(what, "")))
        for section, values in plan_settings(study).items()
        for key, asked in values.items()
        if (held := frozen[section].get(key)) != asked and f"{section}.{key}" not in idle
    ]


def grown_plan(plan: FrozenPlan, study: Study) -> FrozenPlan:
    """Return a plan with the larger K and N of its study file, or the plan itself if nothing grows.

    The grown plan is not frozen yet; it stands for the next revision as far as K and N go.

    Raises:
        PlanError: the study file differs in something else, or a planned action is missing.
    """
    growing = [one for one in plan_differences(plan, study) if one.grows]
    if not growing:
        check_plan_agrees(plan, study)
        return plan
    settings = plan.content["settings"]
    asked = {one.what.removeprefix("plan."): one.asked for one in growing}
    content = plan.content | {_SIZES[one.what]: one.asked for one in growing}
    content.pop("sequential", None)  # these looks belong to the frozen size
    grown = replace(plan, content=content | {"settings": settings | {"plan": settings["plan"] | asked}})
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
    """Write a setting's value for a line."""
    return "none" if value is None else str(value)
