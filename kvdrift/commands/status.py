"""``kvdrift status``: what a store holds and what is left to do in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvdrift.options import StoreArgument
from schema.errors import printable

if TYPE_CHECKING:
    import pyarrow as pa

    from flows.frozen_plan import FrozenPlan
    from schema.store.store import Store

Row = dict[str, Any]
_OF_UNITS = ("study", "model", "doc", "action", "estimator", "replicates", "weights_sha256")
_UNKNOWN = "unknown"  # the split of a unit whose document has no row


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
    units = store.units(columns=(*_OF_UNITS, "path") if underived else _OF_UNITS, coded=True)
    yield f"store: {store.location}"
    yield f"events: version {version}, {len(units)} units; {len(underived)} still to derive"
    documents = store.read("documents", columns=["study", "model", "doc", "split", "stratum"])
    there = sorted((row["study"], row["model"]) for row in _counts(documents, "study", "model"))
    for study, model in there:
        yield f"study {study}, model {model}:"
        own, listed = (_rows(table, study=study, model=model) for table in (units, documents))
        several = len({other for name, other in there if name == study}) > 1
        yield from _study_lines(store, study, model, listed, own, underived, several=several)


def _study_lines(
    store: Store, study: str, model: str, documents: pa.Table, units: pa.Table, underived: set[str], *, several: bool
) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.compute as pc

    from flows.analysis.current import estimated_version
    from flows.frozen_plan import find_plan
    from flows.pages import report_folder, report_is_current
    from schema.store.revisions import current_actions

    plan, version = find_plan(store, study, model), store.data_version("events")
    ours = any((row["study"], row["model"]) == (study, model) for row in store.read("studies").to_pylist())
    summed = _summed(units, documents)
    by_split = summed.group_by("split").aggregate([("doc", "count_distinct"), ("count_all", "sum")])
    generated = {row["split"] or _UNKNOWN: row for row in by_split.to_pylist()}
    for row in sorted(_counts(documents, "split"), key=lambda row: str(row["split"])):
        split = row["split"]
        wanted = row["count_all"] if split != "evaluation" or plan is None else plan.documents
        of_split = generated.get(split, {"doc_count_distinct": 0, "count_all_sum": 0})
        yield (
            f"  {split}: {of_split['doc_count_distinct']} of {wanted} documents generated, "
            f"{of_split['count_all_sum']} units"
        )
    revision = f"revision {plan.revision}, " if plan is not None and plan.revision else ""
    seen = "; seen" if plan is not None and plan.seen else ""
    yield (
        "  plan: none yet" if plan is None else
        f"  plan: {plan.sha256[:12]}, {revision}frozen {plan.frozen_at:%Y-%m-%d %H:%M} UTC, K = {plan.replicates}, "
        f"N = {plan.documents_per_stratum} documents of each stratum{seen}"
    )  # fmt: skip
    stored = store.read("actions")
    actions = current_actions(stored, study)
    pending = _pending(actions, documents, summed, plan) if ours else []
    for line in pending:
        yield f"  pending: {line}"
    if ours and not pending:
        evaluation = "" if plan else "; what the evaluation takes is not known before the plan"
        yield f"  pending: nothing by the documents, actions and plan that the store has{evaluation}"
    left = pc.sum(pc.is_in(units["path"], pa.array(underived, pa.string()))).as_py() or 0 if underived else 0
    yield f"  derived: {len(units) - left} of {len(units)} units"
    estimated = estimated_version(store, study, model)
    yield (
        f"  estimates: none yet{' under this plan' if revision else ''}" if estimated is None else
        f"  estimates: from events version {estimated} ({'current' if estimated == version else f'now {version}'})"
    )  # fmt: skip
    if any(row["action_revision"] or row["dropped"] for row in stored.to_pylist() if row["study"] == study):
        yield from _superseded(store, study, model, actions)
    if unknown := units["weights_sha256"].null_count:
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


def _pending(actions: dict[str, Row], documents: pa.Table, summed: pa.Table, plan: FrozenPlan | None) -> list[str]:
    """What the present actions lack, by split and action."""
    import pyarrow.compute as pc

    from flows.planning.work import planned_work

    known = set(pc.unique(summed["action"]).to_pylist())
    cell = ("action", "estimator", "split", "stratum", "replicates_sum")
    covered = {tuple(row[name] for name in cell): row["count_all"] for row in _counts(summed, *cell) if row["split"]}
    places = {(row["split"], row["stratum"]): row["count_all"] for row in _counts(documents, "split", "stratum")}
    lines = []
    for work in planned_work(actions, places, covered, plan):
        if lacking := work.wanted - work.done:
            reason = (
                "missing" if work.action in known else "redone" if actions[work.action]["action_revision"] else "new"
            )
            lines.append(f"{work.split} of {work.action}, {lacking} units ({reason})")
    return lines


def _summed(units: pa.Table, documents: pa.Table) -> pa.Table:
    """Units and replicates of each document, action and estimator, with the document's split and stratum.

    These are null without a row of the document. What texts are compared for is done once a text, not once a unit.
    """
    import pyarrow.compute as pc

    counted: list[Any] = [("replicates", "sum"), ([], "count_all")]
    summed = units.group_by(["doc", "action", "estimator"]).aggregate(counted)
    docs = summed["doc"].combine_chunks()
    found = pc.index_in(docs.dictionary, value_set=documents["doc"].combine_chunks())
    for name in ("split", "stratum"):
        values = documents[name].combine_chunks().dictionary_encode()
        summed = summed.append_column(name, values.take(found).take(docs.indices))
    return summed


def _rows(table: pa.Table, **equal: str) -> pa.Table:
    """The rows whose columns have given values."""
    import pyarrow.compute as pc

    for name, value in equal.items():
        same = pc.equal(table[name], value)
        if not pc.all(same, skip_nulls=False).as_py():
            table = table.filter(same)
    return table


def _counts(table: pa.Table, *names: str) -> list[Row]:
    """How often each combination of values of some columns is there (``count_all``)."""
    rows: list[Row] = table.group_by(list(names)).aggregate([([], "count_all")]).to_pylist()
    return rows


def _superseded(store: Store, study: str, model: str, actions: dict[str, Row]) -> Iterator[str]:
    """The revisions whose units no view shows."""
    rows = _rows(store.read("units", columns=["study", "model", "action", "action_revision"]), study=study, model=model)
    revisions = {
        (row["action"], row["action_revision"]): row["count_all"] for row in _counts(rows, "action", "action_revision")
    }
    for (name, revision), count in sorted(revisions.items()):
        if name not in actions or revision < actions[name]["action_revision"]:
            why = f"revision {actions[name]['action_revision']} is current" if name in actions else "dropped"
            yield f"  superseded: {name}, revision {revision}, {count} units ({why})"
