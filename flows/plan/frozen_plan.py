"""The frozen plan, read from the store.

A frozen plan never changes. Larger K and N, and with ``run --replan`` other changes of ``[plan]``, make a later
revision; the newest revision is the plan.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvdrift.log.store import Store
from kvdrift.log.units.revisions import newest_plans
from kvdrift.schema.errors import PlanError
from kvdrift.schema.frozen_text import frozen_sha256
from kvdrift.schema.tables import PLAIN, SWRB
from kvdrift.stats.endpoints import Endpoint, Family
from kvdrift.stats.ends import PERCENTILE
from kvdrift.stats.sequential.resolution import Resolution

PRIMARY_FAMILY = "primary"


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
    def documents(self) -> dict[str, dict[str, list[dict[str, Any]]]] | None:
        """The frozen documents by split and stratum, in order; None for plans that predate such lists."""
        return self.content.get("documents")

    @property
    def evaluated_documents(self) -> dict[str, dict[str, Any]]:
        """The frozen documents that the evaluation takes, by their ids."""
        strata = (self.documents or {}).get("evaluation", {})
        return {row["doc"]: row for rows in strata.values() for row in rows[: self.documents_per_stratum]}

    @property
    def looks(self) -> Looks | None:
        """The looks of a sequential study; None for a study that goes to N."""
        sequential = self.content.get("sequential")
        return None if sequential is None else Looks.of(sequential)

    @property
    def seen(self) -> bool:
        """Whether evaluation documents of this or an earlier revision had been seen when the plan was frozen.

        Older plans do not record this.
        """
        return bool(self.content.get("seen", False))

    @property
    def evaluated(self) -> int:
        """How many evaluation documents of the study and model had units when the plan was frozen."""
        return int(self.content.get("evaluated_documents", 0))

    @property
    def interval(self) -> str:
        """The method of intervals; older plans record none, and have percentile intervals."""
        return str(self.content.get("interval", PERCENTILE))

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
        return str(self.content.get("residual_branching", {}).get("estimator", PLAIN))

    @property
    def branched_actions(self) -> list[str]:
        """The actions for which the plan has replicates of residual branching."""
        return list(self.content.get("residual_branching", {}).get("actions", []))

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
