"""The superseding of an action's units: by new units of the same study, or by none.

Nothing is deleted. A new row of ``actions`` makes the units of earlier revisions superseded at once, in all views.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.flows.generate.stored_material import stored_identities
from kvdrift.flows.pages.reports import reported_revisions
from kvdrift.flows.plan.frozen_plan import find_plan
from kvdrift.flows.run.forecast import forecast
from kvdrift.flows.run.study_run import StudyRun
from kvdrift.generator.actions import Action
from kvdrift.generator.identity import changes
from kvdrift.log.store import Store
from kvdrift.log.units.conditions import KEPT_COLUMNS, unlike_units
from kvdrift.log.units.revisions import current_actions, newest_revisions
from kvdrift.schema.errors import InputError, PlanError, nearest
from kvdrift.schema.tables import ACTIONS


def redo_actions(runs: Sequence[StudyRun], names: Sequence[str]) -> None:
    """Begin a new revision of actions, unless the present revision has the same identity and was not reported yet.

    So the same call after a kill goes on with the revision that it began, and a line says so. An action that the store
    lacks is left to the run.
    """
    rows = begun_revisions(runs, names)
    begun = {(row["study"], row["action"]) for row in rows}
    stored = runs[0].store.read("actions")
    for run in {run.study.name: run for run in runs}.values():
        there = current_actions(stored, run.study.name)
        for name in dict.fromkeys(names):
            if name in there and (run.study.name, name) not in begun:
                revision = there[name]["action_revision"]
                run.say(
                    f"--redo {name}: revision {revision} was begun and has no reported result yet, so it is continued"
                )
    runs[0].store.append_rows("actions", pa.Table.from_pylist(rows, schema=ACTIONS.schema))


def begun_revisions(runs: Sequence[StudyRun], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of ``actions`` that ``redo_actions`` would append."""
    actions = {action.name: action for action in runs[0].material.actions}
    for name in names:
        if name not in actions:
            raise InputError(f"--redo {name}: no such action in the study file; {nearest(name, actions)}")
    studies = dict.fromkeys(run.study.name for run in runs)
    return [row for study in studies for row in _begun([run for run in runs if run.study.name == study], names)]


def _begun(runs: Sequence[StudyRun], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of one study, whose runs are one for each model."""
    study, actions = runs[0].study.name, {action.name: action for action in runs[0].material.actions}
    store = runs[0].store
    stored = store.read("actions")
    there, newest = current_actions(stored, study), newest_revisions(stored)
    rows = []
    for name in dict.fromkeys(names):
        if name not in there:
            continue
        asked = actions[name].row(study, prespecified=there[name]["prespecified"], revision=newest[study, name])
        if asked == there[name] and newest[study, name] and _can_go_on(runs, actions[name], newest[study, name]):
            continue
        rows.append(asked | {"action_revision": newest[study, name] + 1})
    return rows


def _can_go_on(runs: Sequence[StudyRun], action: Action, revision: int) -> bool:
    """Tell whether a revision was begun with the present identity and its result was not reported yet.

    A revision whose units keep unlike entries cannot go on.
    """
    for run in runs:
        units = run.store.units(run.study.name, run.study.model.id, KEPT_COLUMNS)
        if any(unlike_units(units.filter(pc.equal(units["action"], action.name)).to_pylist())):
            return False
        stored = stored_identities(run.store, run.study.name, run.study.model.id).get((action.name, revision))
        if stored is not None and changes(stored, run.identity(action)):
            return False
    return not all(_is_reported(run, action, revision) for run in runs)


def _is_reported(run: StudyRun, action: Action, revision: int) -> bool:
    """Tell whether a page with a revision's estimates was written; for a control, whether all is finished."""
    return reported_revisions(run.page.parent).get(action.name, -1) >= revision or forecast(run).finished


def drop_action(store: Store, name: str, study: str | None = None) -> int:
    """Drop an action: its units stay in the log, and no view shows them; return how many are superseded.

    The study is needed if several studies have an action of this name.
    """
    stored = store.read("actions")
    studies = sorted({row["study"] for row in stored.to_pylist()} if study is None else {study})
    having = {one: rows[name] for one in studies if name in (rows := current_actions(stored, one))}
    if not having:
        known = sorted({action for one in studies for action in current_actions(stored, one)})
        raise InputError(f"{store.location}: no action '{name}'; {nearest(name, known)}")
    if len(having) > 1:
        raise InputError(f"action '{name}' is in the studies {', '.join(having)}: name one with --study")
    ((own, row),) = having.items()
    if row["control"]:
        raise PlanError(f"action '{name}' is the full-retention control, which every study has")
    units = store.units(own)
    for model in sorted(set(units["model"].to_pylist())):
        plan = find_plan(store, own, model)
        if plan is not None and name in plan.actions:
            raise PlanError(
                f"action '{name}' is in the frozen plan of study '{own}', and what was planned is reported; "
                f"kvdrift run STUDY.toml --redo {name} generates it anew"
            )
    dropped = row | {"action_revision": row["action_revision"] + 1, "dropped": True}
    store.append_rows("actions", pa.Table.from_pylist([dropped], schema=ACTIONS.schema))
    return len(units.filter(pc.equal(units["action"], name)))
