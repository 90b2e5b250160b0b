"""The comparison of a study file with its store: a line for each difference, and what to do about it.

A study may grow: more actions, documents and replicates are generated beside the stored ones. Everything else that
decides events is fixed with the first event. A changed action is refused until ``run --redo`` supersedes its units, a
changed plan until ``run --replan`` makes a later revision of it.
"""

from __future__ import annotations

from collections.abc import Collection

from kvdrift.flows.plan.agreement import check_plan_agrees
from kvdrift.flows.plan.frozen_plan import find_plan
from kvdrift.flows.run.differences import Difference, Kind, differences
from kvdrift.flows.run.study_run import StudyRun
from kvdrift.log.units.kept_sets import COMPARED, check_alike
from kvdrift.schema.errors import PlanError


def check_agrees(run: StudyRun, redo: Collection[str] = ()) -> list[Difference]:
    """Refuse a run if its study file contradicts the stored study; additions are allowed, and are returned.

    Actions to ``redo`` may have changed.
    """
    if (store := run.stored) is not None:
        units = store.units(run.study.name, run.study.model.id, COMPARED).to_pylist()
        check_alike(unit for unit in units if unit["action"] not in redo)
    every = differences(run)
    growth = [one for one in every if one.kind is Kind.GROWTH]
    accepted = [Kind.GROWTH, *([Kind.PLAN] if run.replan else [])]
    found = [one for one in every if one.kind not in accepted and (one.action is None or one.action not in redo)]
    if not found:
        return growth
    if all(one.planned for one in found):
        plan = find_plan(run.store, run.study.name, run.study.model.id)
        if plan is not None:
            check_plan_agrees(plan, run.study)
    listed = "; ".join(map(str, found))
    if all(one.kind in {Kind.ACTION, Kind.PLAN} for one in found):
        redone = dict.fromkeys(one.action for one in found if one.kind is Kind.ACTION)
        planned = any(one.kind is Kind.PLAN for one in found)
        options = " ".join([*(f"--redo {action}" for action in redone), *(["--replan"] if planned else [])])
        does = "generates them again and plans anew" if planned else "generates them again"
        accept = f"kvdrift run {options} {does}, restore the study file to keep them"
    else:
        accept = "give the changed study a new name, or use another --store"
    raise PlanError(f"study '{run.study.name}' differs from its store: {listed}; {accept}")
