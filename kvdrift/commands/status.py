"""``kvdrift status``: what a store holds and what is left to do in it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from kvdrift.options import StoreArgument

if TYPE_CHECKING:
    from flows.frozen_plan import FrozenPlan
    from schema.store.store import Store

Row = dict[str, Any]
_COVERING = ("doc", "action", "estimator", "replicates")


def status(store: StoreArgument) -> None:
    """Show what a store holds, what is left to generate, derive, estimate and write, and the command that does it."""
    from schema.store.store import Store

    for line in status_lines(Store.open(store)):
        typer.echo(line)


def status_lines(store: Store) -> Iterator[str]:
    """Describe a store, and each study and model in it."""
    version = store.version("events")
    units = store.units().to_pylist()
    underived = set(store.pending_segments(version))
    yield f"store: {store.location}"
    yield f"events: version {version}, {len(units)} units; {len(underived)} still to derive"
    documents = store.read("documents", columns=["study", "model", "doc", "split", "stratum"]).to_pylist()
    for study, model in sorted({(row["study"], row["model"]) for row in documents}):
        yield f"study {study}, model {model}:"
        listed, there = (
            [row for row in rows if (row["study"], row["model"]) == (study, model)] for rows in (documents, units)
        )
        several = len({row["model"] for row in documents if row["study"] == study}) > 1
        yield from _study_lines(store, study, model, listed, there, underived, several=several)


def _study_lines(
    store: Store, study: str, model: str, documents: list[Row], units: list[Row], underived: set[str], *, several: bool
) -> Iterator[str]:
    from flows.analysis.current import estimated_version
    from flows.frozen_plan import find_plan
    from flows.pages import report_folder, report_is_current
    from schema.store.revisions import current_actions

    plan, version = find_plan(store, study, model), store.version("events")
    ours = any((row["study"], row["model"]) == (study, model) for row in store.read("studies").to_pylist())
    splits = {row["doc"]: row["split"] for row in documents}
    generated = Counter(splits.get(doc, "unknown") for doc in {row["doc"] for row in units})
    counts = Counter(splits.get(row["doc"], "unknown") for row in units)
    for split, total in sorted(Counter(splits.values()).items()):
        wanted = total if split != "evaluation" or plan is None else plan.documents
        yield f"  {split}: {generated[split]} of {wanted} documents generated, {counts[split]} units"
    revision = f"revision {plan.revision}, " if plan is not None and plan.revision else ""
    seen = "; seen" if plan is not None and plan.seen else ""
    yield (
        "  plan: none yet" if plan is None else
        f"  plan: {plan.sha256[:12]}, {revision}frozen {plan.frozen_at:%Y-%m-%d %H:%M} UTC, K = {plan.replicates}, "
        f"N = {plan.documents_per_stratum} documents of each stratum{seen}"
    )  # fmt: skip
    stored = store.read("actions")
    actions = current_actions(stored, study)
    pending = _pending(actions, documents, units, plan) if ours else []
    for line in pending:
        yield f"  pending: {line}"
    if ours and not pending:
        evaluation = "" if plan else "; what the evaluation takes is not known before the plan"
        yield f"  pending: nothing by the documents, actions and plan that the store has{evaluation}"
    left = sum(row["path"] in underived for row in units)
    yield f"  derived: {len(units) - left} of {len(units)} units"
    estimated = estimated_version(store, study, model)
    yield (
        f"  estimates: none yet{' under this plan' if revision else ''}" if estimated is None else
        f"  estimates: from events version {estimated} ({'current' if estimated == version else f'now {version}'})"
    )  # fmt: skip
    if any(row["action_revision"] or row["dropped"] for row in stored.to_pylist() if row["study"] == study):
        yield from _superseded(store, study, model, actions)
    if unknown := sum(row["weights_sha256"] is None for row in units):
        yield f"  identity: unknown of {unknown} units, of an earlier version of kvdrift or another generator"
    generate = ours and (bool(pending) or plan is None)
    if generate:
        command = f"kvdrift run STUDY.toml --store {store.location}"
    elif left or estimated != version:
        command = f"kvdrift {'derive' if left else 'analyze'} {store.location}"
    elif not report_is_current(store, report_folder(store, study, model if several else None)):
        command = f"kvdrift report {store.location}"
    else:
        command = "nothing to do; kvdrift run STUDY.toml --dry-run compares the study file"
    yield f"  next: {command}"


def _pending(actions: dict[str, Row], documents: list[Row], units: list[Row], plan: FrozenPlan | None) -> list[str]:
    """What the present actions lack, by split and action.

    How many replicates development documents are to have is in the study file alone: as many as the most have.
    """
    from schema.study import CONTROL_REPLICATES
    from schema.tables import PLAIN, SWRB

    covered: Counter[tuple[str, str, str]] = Counter()
    for row in units:
        doc, action, estimator, replicates = (row[name] for name in _COVERING)
        covered[doc, action, estimator] += replicates
    strata: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in documents:
        strata[row["split"]][row["stratum"]].append(row["doc"])
    developed = {doc for docs in strata["development"].values() for doc in docs}
    most = max((count for (doc, _, _), count in covered.items() if doc in developed), default=1)
    known = {action for _, action, _ in covered}
    branching = {} if plan is None else plan.content.get("residual_branching", {})
    lines = []
    for split, replicates in (("development", most), ("evaluation", 0 if plan is None else plan.replicates)):
        for name, action in sorted(actions.items()):
            wanted = min(replicates, CONTROL_REPLICATES) if action["control"] else replicates
            estimators = [PLAIN]
            if not action["control"] and (name in branching.get("actions", []) or branching.get("estimator") == SWRB):
                estimators.append(SWRB)
            lacking = 0
            for docs in strata[split].values():
                of_each = len(docs) if split == "development" or plan is None else plan.documents_per_stratum
                for estimator in estimators:
                    whole = sum(covered[doc, name, estimator] >= wanted for doc in docs)
                    lacking += max(0, of_each - whole)
            if lacking:
                reason = "missing" if name in known else "redone" if action["action_revision"] else "new"
                lines.append(f"{split} of {name}, {lacking} units ({reason})")
    return lines


def _superseded(store: Store, study: str, model: str, actions: dict[str, Row]) -> Iterator[str]:
    """The revisions whose units no view shows."""
    rows = store.read("units", columns=["study", "model", "action", "action_revision"]).to_pylist()
    revisions = Counter(
        (row["action"], row["action_revision"]) for row in rows if (row["study"], row["model"]) == (study, model)
    )
    for (name, revision), count in sorted(revisions.items()):
        if name not in actions or revision < actions[name]["action_revision"]:
            why = f"revision {actions[name]['action_revision']} is current" if name in actions else "dropped"
            yield f"  superseded: {name}, revision {revision}, {count} units ({why})"
