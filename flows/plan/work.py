"""What of a study is generated, of what its documents, actions and plan ask for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flows.plan.frozen_plan import FrozenPlan
from schema.study import CONTROL_REPLICATES
from schema.tables import PLAIN, SWRB

Row = dict[str, Any]
Place = tuple[str, str]  # split, stratum
Cell = tuple[str, str, str, str, int]  # action, estimator, split, stratum, replicates


@dataclass(frozen=True)
class Work:
    """What one action takes in one split under one estimator: document-action units done, of those wanted."""

    split: str
    action: str
    done: int
    wanted: int


def planned_work(
    actions: Mapping[str, Row], documents: Mapping[Place, int], covered: Mapping[Cell, int], plan: FrozenPlan | None,
    wanted_documents: Mapping[str, int],
) -> list[Work]:  # fmt: skip
    """Count what the present actions have of what documents, actions and plan ask for, by split and action.

    How many replicates development documents are to have is in the study file alone: as many as the most have.

    Args:
        actions: Current rows of ``actions`` by name.
        documents: How many there are of each split and stratum.
        covered: How many documents of each split and stratum have so many replicates of an action.
        plan: The frozen plan, if there is one.
        wanted_documents: How many evaluation documents of each stratum the plan asks for by now.

    """
    there = defaultdict[tuple[str, str, str], Counter[tuple[str, int]]](Counter)
    for (action, estimator, split, stratum, replicates), count in covered.items():
        there[action, estimator, split][stratum, replicates] += count
    most = max((replicates for _, _, split, _, replicates in covered if split == "development"), default=1)
    branching = {} if plan is None else plan.content.get("residual_branching", {})
    found = []
    for split, replicates in (("development", most), ("evaluation", 0 if plan is None else plan.replicates)):
        strata = {stratum: count for (of, stratum), count in documents.items() if of == split}
        for name, declared in sorted(actions.items()) if replicates else ():
            least = min(replicates, CONTROL_REPLICATES) if declared["control"] else replicates
            estimators = [PLAIN]
            if not declared["control"] and (name in branching.get("actions", []) or branching.get("estimator") == SWRB):
                estimators.append(SWRB)
            done = wanted = 0
            for estimator in estimators:
                whole = Counter[str]()
                for (stratum, held), count in there[name, estimator, split].items():
                    whole[stratum] += count if held >= least else 0
                for stratum, count in strata.items():
                    each = count if split == "development" else wanted_documents[stratum]
                    wanted, done = wanted + each, done + min(each, whole[stratum])
            found.append(Work(split, name, done, wanted))
    return found
