"""What of a study is generated, of what its documents, actions and plan ask for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flows.frozen_plan import FrozenPlan
from schema.study import CONTROL_REPLICATES
from schema.tables import PLAIN, SWRB

Row = dict[str, Any]
Cell = tuple[str, str, str]  # doc, action, estimator


@dataclass(frozen=True)
class Work:
    """What one action takes in one split under one estimator: document-action units done, of those wanted."""

    split: str
    action: str
    done: int
    wanted: int


def planned_work(
    actions: Mapping[str, Row], documents: Mapping[str, Row], covered: Mapping[Cell, int], plan: FrozenPlan | None
) -> list[Work]:
    """Count what the present actions have of what documents, actions and plan ask for, by split and action.

    How many replicates development documents are to have is in the study file alone: as many as the most have.

    Args:
        actions: Current rows of ``actions`` by name.
        documents: Rows of ``documents`` by document.
        covered: Replicates that are there.
        plan: The frozen plan, if there is one.

    """
    by_split: dict[str, Counter[str]] = {"development": Counter(), "evaluation": Counter()}
    for row in documents.values():
        by_split[row["split"]][row["stratum"]] += 1
    there = defaultdict[tuple[str, str], list[tuple[str, int]]](list)
    for (doc, action, estimator), count in covered.items():
        if doc in documents:
            there[action, estimator].append((doc, count))
    development = [n for (doc, _, _), n in covered.items() if documents.get(doc, {}).get("split") == "development"]
    branching = {} if plan is None else plan.content.get("residual_branching", {})
    found = []
    for split, replicates in (
        ("development", max(development, default=1)),
        ("evaluation", 0 if plan is None else plan.replicates),
    ):
        for name, declared in sorted(actions.items()) if replicates else ():
            least = min(replicates, CONTROL_REPLICATES) if declared["control"] else replicates
            estimators = [PLAIN]
            if not declared["control"] and (name in branching.get("actions", []) or branching.get("estimator") == SWRB):
                estimators.append(SWRB)
            done = wanted = 0
            for estimator in estimators:
                whole = Counter(
                    documents[doc]["stratum"]
                    for doc, count in there[name, estimator]
                    if count >= least and documents[doc]["split"] == split
                )
                for stratum, count in by_split[split].items():
                    each = count if split == "development" or plan is None else plan.documents_per_stratum
                    wanted, done = wanted + each, done + min(each, whole[stratum])
            found.append(Work(split, name, done, wanted))
    return found
