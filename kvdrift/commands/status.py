"""``kvdrift status``: what a store holds and what is left to do in it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvdrift.options import StoreArgument
from schema.errors import printable

if TYPE_CHECKING:
    import pyarrow as pa

    from flows.frozen_plan import FrozenPlan
    from schema.store.compaction.counts import Holdings, Place
    from schema.store.store import Store

Row = dict[str, Any]


def status(
    store: StoreArgument,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on showing what moves, until the study is finished or interrupted.")
    ] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between looks with --watch.")] = 2.0,
) -> None:
    """Show what a store holds, what is left to generate, derive, estimate and write, and the command that does it.

    With --watch: units done of those planned, rate, time left, and the divergence so far, which is preliminary. It
    reads only, beside whatever writes the store.
    """
    from schema.store.store import Store

    if watch:
        from flows.analysis.live import LiveStore
        from kvdrift.live.display import show_live

        live = LiveStore(Store.open(store))
        show_live((live.look() for _ in itertools.count()), interval)
        return
    for line in status_lines(Store.open(store)):
        typer.echo(printable(line))


def status_lines(store: Store) -> Iterator[str]:
    """Describe a store, and each study and model in it."""
    version = store.version("events")
    underived = store.unit_paths_in(store.pending_segments(version))
    actions = store.read("actions")  # first: a revision is declared before its units are there
    held, places = store.unit_counts(), store.document_counts()
    left = _underived(store, underived) if underived else Counter()
    there = sorted({(place.study, place.model) for place in places})
    current = _current(held, actions)
    yield f"store: {store.location}"
    yield f"events: version {version}, {_count_units(current)} units; {len(underived)} still to derive"
    for study, model in there:
        yield f"study {study}, model {model}:"
        own = Counter({place: count for place, count in places.items() if place[:2] == (study, model)})
        of_all, of_current = (
            Counter({item: count for item, count in counts.items() if item[0][:2] == (study, model)})
            for counts in (held, current)
        )
        several = len({other for name, other in there if name == study}) > 1
        yield from _study_lines(
            store, study, model, actions, own, of_all, of_current, left[study, model], several=several
        )


def _study_lines(
    store: Store,
    study: str,
    model: str,
    stored: pa.Table,
    places: Counter[Place],
    held: Holdings,
    current: Holdings,
    left: int,
    *,
    several: bool,
) -> Iterator[str]:
    from flows.analysis.answers import answers_are_current
    from flows.analysis.current import estimated_version
    from flows.frozen_plan import find_plan
    from flows.looks import LooksTaken, look_line, wanted_by_stratum
    from flows.pages import report_folder, report_is_current
    from flows.scores import Scoring
    from schema.store.revisions import current_actions

    plan, version = find_plan(store, study, model), store.data_version("events")
    ours = any((row["study"], row["model"]) == (study, model) for row in store.read("studies").to_pylist())
    taken = None if plan is None else LooksTaken.in_store(store, plan)
    by_now = None if plan is None else wanted_by_stratum(plan, taken)
    yield from _split_lines(places, current, by_now)
    revision = f"revision {plan.revision}, " if plan is not None and plan.revision else ""
    seen = "; seen" if plan is not None and plan.seen else ""
    yield (
        "  plan: none yet" if plan is None else
        f"  plan: {plan.sha256[:12]}, {revision}frozen {plan.frozen_at:%Y-%m-%d %H:%M} UTC, K = {plan.replicates}, "
        f"N = {plan.documents_per_stratum} documents of each stratum{seen}"
    )  # fmt: skip
    actions = current_actions(stored, study)
    if taken is not None:
        yield f"  sequential: {look_line(taken)}"
    pending = _pending(actions, places, current, plan, by_now or {}) if ours else []
    for line in pending:
        yield f"  pending: {line}"
    if ours and not pending:
        evaluation = "" if plan else "; what the evaluation takes is not known before the plan"
        yield f"  pending: nothing by the documents, actions and plan that the store has{evaluation}"
    units = _count_units(current)
    yield f"  derived: {units - left} of {units} units"
    scoring = Scoring.stored(store, study, model)
    if answered := len(scoring.answered):
        unscored = scoring.unscored.num_rows
        lacking = f"; {unscored} units still to score (kvdrift analyze)" if unscored else ", all units scored"
        yield f"  answers: known of {answered} documents{lacking}"
    estimated = estimated_version(store, study, model)
    yield (
        f"  estimates: none yet{' under this plan' if revision else ''}" if estimated is None else
        f"  estimates: from events version {estimated} ({'current' if estimated == version else f'now {version}'})"
    )  # fmt: skip
    if any(row["action_revision"] or row["dropped"] for row in stored.to_pylist() if row["study"] == study):
        yield from _superseded(held, actions)
    if unknown := sum(one.unknown * count for (_, own), count in current.items() for one in own):
        yield f"  identity: unknown of {unknown} units, of an earlier version of kvdrift or another generator"
    generate = ours and (bool(pending) or plan is None or (taken is not None and not taken.stopped))
    if generate:
        command = f"kvdrift run STUDY.toml --store {store.location}"
    elif left or estimated != version or not answers_are_current(store, study, model, scoring):
        command = f"kvdrift {'derive' if left else 'analyze'} {store.location}"
    elif not report_is_current(store, report_folder(store, study, model if several else None)):
        command = f"kvdrift report {store.location}"
    else:
        command = "nothing to do; kvdrift run STUDY.toml --dry-run compares the study file"
    yield f"  next: {command}"


def _split_lines(places: Counter[Place], current: Holdings, by_now: Mapping[str, int] | None) -> Iterator[str]:
    """How many documents of each split are generated."""
    documents, generated, units = Counter[str | None](), Counter[str | None](), Counter[str | None]()
    for place, count in places.items():
        documents[place.split] += count
    for (place, own), count in current.items():
        generated[place.split] += count
        units[place.split] += count * sum(one.units for one in own)
    for split, there in sorted(documents.items(), key=str):
        wanted = there if split != "evaluation" or by_now is None else sum(by_now.values())
        yield f"  {split}: {generated[split]} of {wanted} documents generated, {units[split]} units"


def _pending(
    actions: Mapping[str, Row],
    places: Counter[Place],
    current: Holdings,
    plan: FrozenPlan | None,
    by_now: Mapping[str, int],
) -> list[str]:
    """What the present actions lack, by split and action."""
    from flows.planning.work import Cell, planned_work

    covered = Counter[Cell]()
    for ((_, _, split, stratum), own), count in current.items():
        if split and stratum:
            for one in own:
                covered[one.action, one.estimator, split, stratum, one.replicates] += count
    known = {one.action for _, own in current for one in own}
    wanted = {(split, stratum): count for (_, _, split, stratum), count in places.items() if split and stratum}
    lines = []
    for work in planned_work(actions, wanted, covered, plan, by_now):
        if lacking := work.wanted - work.done:
            reason = (
                "missing" if work.action in known else "redone" if actions[work.action]["action_revision"] else "new"
            )
            lines.append(f"{work.split} of {work.action}, {lacking} units ({reason})")
    return lines


def _current(held: Holdings, actions: pa.Table) -> Holdings:
    """Leave superseded units out, and documents that have no others."""
    from schema.store.revisions import current_revision

    is_current, found = current_revision(actions), Counter[Any]()
    for (place, own), count in held.items():
        if kept := tuple(one for one in own if is_current((place.study, one.action, one.action_revision))):
            found[place, kept] += count
    return found


def _count_units(held: Holdings) -> int:
    return sum(one.units * count for (_, own), count in held.items() for one in own)


def _underived(store: Store, paths: set[str]) -> Counter[tuple[str, str]]:
    """Count the current units at some paths by study and model."""
    import pyarrow as pa
    import pyarrow.compute as pc

    units = store.units(columns=("study", "model", "path"), coded=True)
    units = units.filter(pc.is_in(units["path"], pa.array(paths, pa.string())))
    return Counter(zip(units["study"].to_pylist(), units["model"].to_pylist(), strict=True))


def _superseded(held: Holdings, actions: Mapping[str, Row]) -> Iterator[str]:
    """The revisions whose units no view shows."""
    revisions = Counter[tuple[str, int]]()
    for (_, own), count in held.items():
        for one in own:
            revisions[one.action, one.action_revision] += count * one.units
    for (name, revision), count in sorted(revisions.items()):
        if name not in actions or revision < actions[name]["action_revision"]:
            why = f"revision {actions[name]['action_revision']} is current" if name in actions else "dropped"
            yield f"  superseded: {name}, revision {revision}, {count} units ({why})"
