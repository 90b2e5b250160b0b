"""The frozen plan: read from the store, and held against the study file that it belongs to.

A plan stays as it was frozen. Larger K and N, and with ``run --replan`` other changes of ``[plan]``, make a later
revision of it; the newest one is the plan.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from log.store import Store
from log.units.revisions import newest_plans
from schema.errors import PlanError
from schema.frozen_text import frozen_sha256
from schema.study import PlanSection, Study, values_of
from stats.endpoints import Endpoint, Family
from stats.ends import PERCENTILE
from stats.sequential.resolution import Resolution

PRIMARY_FAMILY = "primary"

# Keys of [plan] that came later: settings and hashes of plans have them where they are not at their default.
_LATER = ("stopping", "looks", "resolve", "margin", "variance")

# What of [plan] may grow, and where a plan has what was chosen for it.
_SIZES = {"plan.replicates": "replicates", "plan.documents": "documents_per_stratum"}


@dataclass(frozen=True)
class FrozenPlan:
    """A revision of a plan as it stands in the store; ``content`` is its JSON."""

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
        """N of the evaluation: how many documents of each stratum it takes, the first ones."""
        return int(self.content["documents_per_stratum"])

    @property
    def documents(self) -> dict[str, dict[str, list[dict[str, Any]]]] | None:
        """The frozen documents by split and stratum, in their order; None of plans from before they had any."""
        return self.content.get("documents")

    @property
    def evaluated_documents(self) -> dict[str, dict[str, Any]]:
        """Those of the frozen documents that the evaluation takes, by their ids."""
        strata = (self.documents or {}).get("evaluation", {})
        return {row["doc"]: row for rows in strata.values() for row in rows[: self.documents_per_stratum]}

    @property
    def looks(self) -> Looks | None:
        """The looks of a sequential study; None of one that goes to N."""
        sequential = self.content.get("sequential")
        return None if sequential is None else Looks.of(sequential)

    @property
    def seen(self) -> bool:
        """Whether evaluation documents had been seen when the plan was frozen: its own, or of an earlier revision.

        Older plans do not know.
        """
        return bool(self.content.get("seen", False))

    @property
    def evaluated(self) -> int:
        """How many evaluation documents of the study and model had units when the plan was frozen."""
        return int(self.content.get("evaluated_documents", 0))

    @property
    def interval(self) -> str:
        """How intervals are made; older plans do not say, and have percentile ones."""
        return str(self.content.get("interval", PERCENTILE))

    @property
    def seed(self) -> int:
        """The study's seed, which is also that of resampling."""
        return int(self.content["seed"])

    @property
    def draws(self) -> int:
        """Bootstrap draws for primary quantities."""
        return int(self.content["draws"])

    @property
    def exploratory_draws(self) -> int:
        """Bootstrap draws for everything else."""
        return int(self.content["exploratory_draws"])

    @property
    def actions(self) -> list[str]:
        """Actions that were fixed with the plan, controls left out."""
        return list(self.content["actions"])

    @property
    def branched_actions(self) -> list[str]:
        """Actions that the plan gives replicates of residual branching too."""
        return list(self.content.get("residual_branching", {}).get("actions", []))

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
    """The looks of a sequential plan (definitions, "Sequential studies").

    Attributes:
        order: the evaluation documents of each stratum, in the order in which they are taken.
        documents: how many of each stratum every look has, from the first one on.
        shares: of the information, by look.
        constants: critical constants in standard errors, by look.
        resolution: what resolves an endpoint.

    """

    order: dict[str, list[str]]
    documents: list[dict[str, int]]
    shares: list[float]
    constants: list[float]
    resolution: Resolution

    @classmethod
    def of(cls, content: dict[str, Any]) -> Looks:
        """Return the looks that a plan's ``sequential`` says."""
        looks = content["looks"]
        documents, shares, constants = ([look[name] for look in looks] for name in ("documents", "share", "constant"))
        return cls(content["order"], documents, shares, constants, Resolution(content["resolve"], content["bound"]))

    def __len__(self) -> int:
        return len(self.documents)

    def names(self, look: int) -> set[str]:
        """Return the documents of a look, counted from 1."""
        return {doc for stratum, count in self.documents[look - 1].items() for doc in self.order[stratum][:count]}


def find_plan(store: Store, study: str, model: str) -> FrozenPlan | None:
    """Return the newest revision of the frozen plan of a study and model, None before there is one."""
    row = newest_plans(store.read("plans")).get((study, model))
    if row is None:
        return None
    if frozen_sha256(row["plan"]) != row["plan_sha256"]:
        raise PlanError(f"the plan of study '{study}' does not have its hash {row['plan_sha256'][:12]}…")
    content = json.loads(row["plan"])
    return FrozenPlan(study, model, row["plan_sha256"], row["frozen_at"], content, row["plan_revision"])


def require_plan(store: Store, study: Study) -> FrozenPlan:
    """Return the frozen plan of a study, which its file must still agree with."""
    plan = find_plan(store, study.name, study.model.id)
    if plan is None:
        raise PlanError(f"study '{study.name}' has no frozen plan: evaluation starts after the plan, not before")
    check_plan_agrees(plan, study)
    return plan


def check_plan_agrees(plan: FrozenPlan, study: Study) -> None:
    """Hold a study file against its frozen plan."""
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
    """A value of ``[plan]`` or ``[windows]`` that a study file and its frozen plan do not share.

    Attributes:
        what: The key, as in ``plan.alpha``.
        frozen: The frozen value, as JSON holds it.
        asked: The study file's value.
        chosen: The K or N of the plan, where the key is that of one.

    """

    what: str
    frozen: Any
    asked: Any
    chosen: int | None = None

    @property
    def grows(self) -> bool:
        """Whether it is a larger K or N, which the next revision of the plan has."""
        return self.chosen is not None and isinstance(self.asked, int) and self.asked > self.chosen

    @property
    def replanned(self) -> bool:
        """Whether planning anew takes it; windows are the study's."""
        return not self.what.startswith("windows.")

    @property
    def before(self) -> str:
        """The frozen value, with what was chosen where that is another."""
        chosen = "" if self.chosen is None or self.chosen == self.frozen else f" ({self.chosen})"
        return shown(self.frozen) + chosen

    def __str__(self) -> str:
        return f"{self.what}: frozen {self.before}, asked {shown(self.asked)}"


def plan_differences(plan: FrozenPlan, study: Study) -> list[PlanDifference]:
    """Compare ``[plan]`` and ``[windows]`` with the frozen ones, as a whole where a plan records their hash alone.

    A key that the frozen plan does not know had its default. The method of intervals is compared with what the plan
    has, where the study file names one. How many replicates a study file asks of a greedy law decides nothing.
    """
    frozen, method = plan.content.get("settings", {}), study.plan.interval or plan.interval
    methods = [] if method == plan.interval else [PlanDifference("plan.interval", plan.interval, method)]
    if not frozen:
        held, asked = plan.content["plan_section_sha256"], plan_section_sha256(study)
        whole = PlanDifference("[plan] or [windows]", f"{held[:12]}…", f"{asked[:12]}…")
        return methods if held == asked else [whole, *methods]
    idle = {"plan.replicates"} if study.law.greedy else set()
    defaults = {"plan": {key: field.default for key, field in PlanSection.model_fields.items()}, "windows": {}}
    return methods + [
        PlanDifference(what := f"{section}.{key}", held, asked, plan.content.get(_SIZES.get(what, "")))
        for section, values in _all_settings(study).items()
        for key, asked in values.items()
        if (held := frozen[section].get(key, defaults[section].get(key, asked))) != asked
        and f"{section}.{key}" not in idle
    ]


def grown_plan(plan: FrozenPlan, study: Study) -> FrozenPlan:
    """Return a plan as a study file has it: itself, or with the larger K and N that are asked for.

    What has grown is not frozen yet; it stands for the next revision as far as K and N go.

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
    content.pop("sequential", None)  # the looks are those of the frozen size
    grown = replace(plan, content=content | {"settings": settings | {"plan": settings["plan"] | asked}})
    check_plan_agrees(grown, study)
    return grown


def plan_settings(study: Study) -> dict[str, dict[str, Any]]:
    """Return what in the study file decides the plan, as JSON holds it: ``[plan]``, and ``[windows]`` with defaults.

    Without the method of intervals, which the plan has itself, and without later keys at their default.
    """
    settings = _all_settings(study)
    left_out = set(_LATER) - values_of(study.plan, _LATER).keys()
    return settings | {"plan": {key: value for key, value in settings["plan"].items() if key not in left_out}}


def _all_settings(study: Study) -> dict[str, dict[str, Any]]:
    return {
        "plan": study.plan.model_dump(mode="json", exclude={"interval"}),
        "windows": dict(study.window_values.without_horizon),
    }


def plan_section_sha256(study: Study) -> str:
    """SHA-256 of what in the study file decides the plan, as ``plan_settings`` has it, without later defaults."""
    plan = values_of(study.plan.model_copy(update={"interval": None}), ("estimator", "interval", *_LATER))
    deciding = {"plan": plan, "windows": study.window_values.without_horizon}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def shown(value: object) -> str:
    """Return a setting's value as a line names it."""
    return "none" if value is None else str(value)
