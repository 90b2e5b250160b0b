"""The comparison of a study file with its store, and the superseding of units of actions that changed.

A study may grow: more actions, documents and replicates are generated beside the stored ones. Everything else that
decides events is fixed with the first event. A changed action is refused until ``run --redo`` supersedes its units, a
changed plan until ``run --replan`` makes a later revision of it.

Nothing is deleted. A new row of ``actions`` supersedes the units of the action's earlier revisions, in all views.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.flows.generate.storing import stored_identities
from kvdrift.flows.pages.reports import reported_revisions
from kvdrift.flows.plan.frozen_plan import FrozenPlan, check_plan_agrees, find_plan, plan_differences, shown
from kvdrift.flows.plan.stored_documents import changed
from kvdrift.flows.run.study_run import StudyRun, forecast
from kvdrift.generator.actions import Action
from kvdrift.generator.identity import ActionIdentity, changes
from kvdrift.log.store import Store
from kvdrift.log.units.conditions import KEPT_COLUMNS, check_same_entries, unlike_units
from kvdrift.log.units.revisions import current_actions, newest_revisions
from kvdrift.schema.document import SPLITS
from kvdrift.schema.errors import InputError, PlanError, nearest
from kvdrift.schema.study import FINITE_STATE, HTTP, Study
from kvdrift.schema.tables import ACTIONS

# Columns of an action that decide its units; the other columns name the action's source.
_ACTION_COLUMNS = tuple(
    name for name in ACTIONS.columns
    if name not in {"study", "action", "position_mode", "control", "prespecified", "action_revision", "dropped"}
)  # fmt: skip


class Kind(StrEnum):
    """How a run treats a difference."""

    GROWTH = "growth"  # the run adds what the store lacks
    ACTION = "action"  # the run refuses the difference without --redo
    PLAN = "plan"  # the run refuses the difference without --replan
    SETTING = "setting"  # the run always refuses the difference


@dataclass(frozen=True)
class Difference:
    """One difference between a study file and its store."""

    kind: Kind  # How a run treats the difference
    what: str  # The key or thing that differs, as the study file names it
    stored: str  # The stored value, as text
    requested: str  # The study file's value, as text
    action: str | None = None  # The action that differs; None if the difference is not in an action
    units: int = 0  # How many stored units are concerned
    planned: bool = False  # Whether the difference is one from the frozen plan
    note: str = ""  # A further remark

    def __str__(self) -> str:
        concerned = f" ({self.units} units)" if self.units else ""
        held = "frozen" if self.planned else "stored"
        return f"{self.what}: {held} {self.stored}, requested {self.requested}{concerned}{self.note}"


def differences(run: StudyRun) -> list[Difference]:
    """Return the differences of a study file from its stored study, in the file's order; empty before a first run."""
    store = run.stored
    if store is None:
        return []
    rows = [row for row in store.read("studies").to_pylist() if row["study"] == run.study.name]
    if not rows:
        return []
    settings = list(_settings(run.study, rows))
    if settings:  # then the documents differ as well
        return settings
    if all(row["model"] != run.study.model.id for row in rows):
        return []  # a model added to the file
    return [*_documents(run), *_actions(run), *_plan(run)]


def _settings(study: Study, rows: list[dict[str, Any]]) -> Iterator[Difference]:
    """Yield differences in the settings that ``study_sha256`` covers."""
    rows_of_model = [row for row in rows if row["model"] == study.model.id]
    if not rows_of_model and study.several_models:
        rows_of_model = rows  # another model of the same file differs only in its model
    row = (rows_of_model or rows)[0]
    if row["study_sha256"] == study.sha256 or study.agrees_with(row["settings"]):
        return
    present, before = (json.loads(text) for text in (study.settings, row["settings"]))
    present["documents"] = _in_order_of(before["documents"], present["documents"])
    requested, stored = _leaves(present), _leaves(before)
    names = [name for name in dict.fromkeys([*stored, *requested]) if stored.get(name) != requested.get(name)]
    if study.several_models and not any(row["model"] == study.model.id for row in rows):
        names = [name for name in names if not name.startswith("model.")]
        if not names:
            return
    for name in names:
        yield Difference(Kind.SETTING, name, shown(stored.get(name)), shown(requested.get(name)))
    if not names:
        what = "documents, device, dtype or revision"
        yield Difference(Kind.SETTING, what, row["study_sha256"][:12], study.sha256[:12])


def _in_order_of(stored: list[Any], requested: list[Any]) -> list[Any]:
    """Order the requested document sections; each one that is also in ``stored`` gets the place that it has there."""
    others = [section for section in requested if section not in stored]
    placed = [
        section if section in requested else others.pop(0) for section in stored if section in requested or others
    ]
    return placed + others


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    """Return the values in nested JSON, keyed by their places in a study file, such as ``documents[0].source``."""
    if isinstance(value, dict):
        items = [(f"{name}.{key}" if name else key, inner) for key, inner in value.items()]
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        items = [(f"{name}[{at}]", inner) for at, inner in enumerate(value)]
    else:
        return {name: value}
    return {place: leaf for key, inner in items for place, leaf in _leaves(inner, key).items()}


def _documents(run: StudyRun) -> Iterator[Difference]:
    """Yield differences in documents: more or fewer in a stratum; changed prompts, answers and clusters."""
    study, store = run.study, run.store
    rows = store.documents(study.name, study.model.id).to_pylist()
    prompts = {row["doc"]: row["prompt_sha256"] for row in rows}
    stored = Counter((row["stratum"], row["split"]) for row in rows)
    plan = find_plan(store, study.name, study.model.id)
    for stratum, split in ((section.stratum_name, split) for section in study.documents for split in SPLITS):
        requested = run.material.documents[split][stratum]
        what, there = f"{split} documents of {stratum}", stored[stratum, split]
        if len(requested) != there:
            grows = len(requested) > there and (plan is None or split != "development")
            note = _kept_documents(plan, run) if plan is not None and grows else ""
            kind = Kind.GROWTH if grows else Kind.SETTING
            yield Difference(kind, what, str(there), str(len(requested)), note=note)
        known = [] if stratum in run.material.nominal else requested
        changed = [d for d in known if d.doc in prompts and prompts[d.doc] != d.prompt_sha256]
        if changed:
            first = changed[0]
            before, now = (_hash(sha256) for sha256 in (prompts[first.doc], first.prompt_sha256))
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            yield Difference(Kind.SETTING, f"prompt of document '{first.doc}'{more}", before, now)
    yield from _corrections(run, {row["doc"]: row for row in rows})


def _corrections(run: StudyRun, rows: Mapping[str, dict[str, Any]]) -> Iterator[Difference]:
    """Yield a difference each for answers, scoring and clusters, if the source changed them in stored documents."""
    corrections = defaultdict[str, list[tuple[str, Any, Any]]](list)
    for document in (document for document in run.material.every_document if document.doc in rows):
        for name, (before, now) in changed(document, rows[document.doc]).items():
            if name == "cluster" or document.stratum not in run.material.nominal:  # nominal documents have no answers
                corrections[name].append((document.doc, before, now))
    for name, ((doc, before, now), *others) in corrections.items():
        more = f" and {len(others)} more" if others else ""
        note = "; estimated again" if name == "cluster" else "; scored again from stored events"
        yield Difference(Kind.GROWTH, f"{name} of document '{doc}'{more}", _value(before), _value(now), note=note)


def _value(value: Any) -> str:
    return " | ".join(value) or "none" if isinstance(value, list) else shown(value)


def _kept_documents(plan: FrozenPlan, run: StudyRun) -> str:
    """Return the note that the plan keeps its N although there are more documents; empty if N may grow."""
    requested = run.study.plan.documents
    if run.replan or (requested != "auto" and requested > plan.documents_per_stratum):
        return ""
    more = "kvdrift run STUDY.toml --replan plans anew" if requested == "auto" else "a larger plan.documents takes more"
    return f"; the plan keeps N = {plan.documents_per_stratum}, {more}"


def _actions(run: StudyRun) -> Iterator[Difference]:
    """Yield differences in actions: those that are new, changed, or no longer in the study file."""
    study, store = run.study, run.store
    stored = current_actions(store.read("actions"), study.name)
    units = Counter(store.units(study.name, study.model.id)["action"].to_pylist())
    known = stored_identities(store, study.name, study.model.id)
    for action in run.material.actions:
        row, requested = stored.pop(action.name, None), action.row(study.name, prespecified=True)
        if row is None:
            yield Difference(Kind.GROWTH, f"action '{action.name}'", "none", "to be generated", action.name)
            continue
        changed = [name for name in _ACTION_COLUMNS if row[name] != requested[name]]
        for name in changed:
            what = f"{name} of action '{action.name}'"
            yield Difference(
                Kind.ACTION, what, shown(row[name]), shown(requested[name]), action.name, units[action.name]
            )
        identity = known.get((action.name, row["action_revision"]))
        if identity is not None:
            yield from _identity(run, action, identity, units[action.name], parameters_changed=bool(changed))
    for name in stored:
        text = f"kvdrift drop {store.location} --action {name}"
        yield Difference(Kind.SETTING, f"action '{name}'", "there", f"none ({text} drops it)", None, units[name])


def _plan(run: StudyRun) -> Iterator[Difference]:
    plan = find_plan(run.store, run.study.name, run.study.model.id)
    for difference in [] if plan is None else plan_differences(plan, run.study):
        kind = Kind.GROWTH if difference.grows else Kind.PLAN if difference.replanned else Kind.SETTING
        yield Difference(kind, difference.what, difference.before, shown(difference.requested), planned=True)


def _identity(
    run: StudyRun, action: Action, stored: ActionIdentity, units: int, *, parameters_changed: bool
) -> Iterator[Difference]:
    """Yield differences in an action's identity.

    If ``parameters_changed``, the selector's hash is left out: it changes with the parameters, and ``_actions`` reports
    these.
    """
    finite = run.study.model.kind == FINITE_STATE
    named = {
        "weights_sha256": "reference distributions"
        if finite
        else "the reference's server"
        if run.study.model.engine == HTTP
        else "model files (weights and configuration)",
        "tokenizer_sha256": "tokenizer",
        "selector_sha256": "distributions"
        if finite
        else action.words
        if action.settings is not None
        else f"source of {action.words}",
        "numerics": "numerics",
        "eos_tokens": "tokens that end a text",
    }
    present = run.identity(action)
    for name in changes(stored, present):
        if name != "selector_sha256" or not parameters_changed:
            text = _hash if name.endswith("sha256") else shown
            before, now = (text(identified.columns[name]) for identified in (stored, present))
            yield Difference(Kind.ACTION, f"{named[name]} of action '{action.name}'", before, now, action.name, units)


def _hash(sha256: str | None) -> str:
    return "unknown" if sha256 is None else f"{sha256[:12]}…"


def check_agrees(run: StudyRun, redo: Collection[str] = ()) -> list[Difference]:
    """Refuse a run if its study file contradicts the stored study; additions are allowed, and are returned.

    Actions to ``redo`` may have changed.
    """
    if (store := run.stored) is not None:
        units = store.units(run.study.name, run.study.model.id, KEPT_COLUMNS).to_pylist()
        check_same_entries(unit for unit in units if unit["action"] not in redo)
    every = differences(run)
    growth = [difference for difference in every if difference.kind is Kind.GROWTH]
    accepted = [Kind.GROWTH, *([Kind.PLAN] if run.replan else [])]
    refused = [
        difference
        for difference in every
        if difference.kind not in accepted and (difference.action is None or difference.action not in redo)
    ]
    if not refused:
        return growth
    if all(difference.planned for difference in refused):
        plan = find_plan(run.store, run.study.name, run.study.model.id)
        if plan is not None:
            check_plan_agrees(plan, run.study)
    listed = "; ".join(map(str, refused))
    if all(difference.kind in {Kind.ACTION, Kind.PLAN} for difference in refused):
        redone = dict.fromkeys(difference.action for difference in refused if difference.kind is Kind.ACTION)
        planned = any(difference.kind is Kind.PLAN for difference in refused)
        options = " ".join([*(f"--redo {action}" for action in redone), *(["--replan"] if planned else [])])
        does = "generates these units again and plans anew" if planned else "generates these units again"
        accept = f"kvdrift run {options} {does}; to keep them, restore the study file"
    else:
        accept = "give the changed study a new name, or use another --store"
    raise PlanError(f"study '{run.study.name}' differs from its store: {listed}; {accept}")


def redo_actions(runs: Sequence[StudyRun], names: Sequence[str]) -> None:
    """Begin a new revision of each named action, unless an unfinished redo has begun one with its present identity.

    So after a run was killed, the same call goes on with the revision that the run began, and prints a line about that.
    An action that the store lacks is skipped, since the run generates it.
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
    """Return the rows of ``actions`` that begin revisions in one study; ``runs`` has a run for each of its models."""
    study, actions = runs[0].study.name, {action.name: action for action in runs[0].material.actions}
    store = runs[0].store
    stored = store.read("actions")
    there, newest = current_actions(stored, study), newest_revisions(stored)
    rows = []
    for name in dict.fromkeys(names):
        if name not in there:
            continue
        requested = actions[name].row(study, prespecified=there[name]["prespecified"], revision=newest[study, name])
        if requested == there[name] and newest[study, name] and _can_go_on(runs, actions[name], newest[study, name]):
            continue
        rows.append(requested | {"action_revision": newest[study, name] + 1})
    return rows


def _can_go_on(runs: Sequence[StudyRun], action: Action, revision: int) -> bool:
    """Return whether a revision was begun with the present identity and its result was not reported yet.

    The result is also False if units of one document and estimator keep or read different entries.
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
    """Return whether a page with a revision's estimates was written; for a control, whether the study is finished."""
    return reported_revisions(run.page.parent).get(action.name, -1) >= revision or forecast(run).finished


def drop_action(store: Store, name: str, study: str | None = None) -> int:
    """Drop an action: its units stay in the log, and no view shows them; return how many are superseded.

    ``study`` must be given if several studies have an action of this name.
    """
    stored = store.read("actions")
    studies = sorted({row["study"] for row in stored.to_pylist()} if study is None else {study})
    having = {study: rows[name] for study in studies if name in (rows := current_actions(stored, study))}
    if not having:
        known = sorted({action for study in studies for action in current_actions(stored, study)})
        raise InputError(f"{store.location}: no action '{name}'; {nearest(name, known)}")
    if len(having) > 1:
        raise InputError(f"action '{name}' is in the studies {', '.join(having)}: name one with --study")
    ((owner, row),) = having.items()
    if row["control"]:
        raise PlanError(f"action '{name}' is the full-retention control, which every study needs; it cannot be dropped")
    units = store.units(owner)
    for model in sorted(set(units["model"].to_pylist())):
        plan = find_plan(store, owner, model)
        if plan is not None and name in plan.actions:
            raise PlanError(
                f"action '{name}' is in the frozen plan of study '{owner}', and a planned action must be reported; "
                f"kvdrift run STUDY.toml --redo {name} generates it anew"
            )
    dropped = row | {"action_revision": row["action_revision"] + 1, "dropped": True}
    store.append_rows("actions", pa.Table.from_pylist([dropped], schema=ACTIONS.schema))
    return len(units.filter(pc.equal(units["action"], name)))
