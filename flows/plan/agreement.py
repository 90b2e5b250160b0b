"""The comparison of a frozen plan with its study file, and the plan that a larger K or N makes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from kvdrift.flows.plan.frozen_plan import FrozenPlan, find_plan
from kvdrift.log.store import Store
from kvdrift.schema.errors import PlanError
from kvdrift.schema.study import PlanSection, Study, values_of

# Keys of [plan] that were added later: settings and hashes of plans include such keys only if not at their defaults.
_LATER = ("stopping", "looks", "resolve", "margin", "variance")

# Keys of [plan] that may grow, with the plan's key of the chosen value.
_SIZES = {"plan.replicates": "replicates", "plan.documents": "documents_per_stratum"}


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
    """Compare ``[plan]`` and ``[windows]`` with the frozen values, or their hashes if a plan records only a hash.

    A key that the frozen plan does not know had its default. The method of intervals is compared with the plan's, if
    the study file names a method. Under a greedy law the study file's number of replicates decides nothing.
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

    The method of intervals, which the plan records itself, and later keys at their defaults are left out.
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
    """Return the SHA-256 of the settings that decide the plan, as in ``plan_settings``, without later defaults."""
    plan = values_of(study.plan.model_copy(update={"interval": None}), ("estimator", "interval", *_LATER))
    deciding = {"plan": plan, "windows": study.window_values.without_horizon}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def shown(value: object) -> str:
    """Write a setting's value for a line."""
    return "none" if value is None else str(value)
