"""``kvdrift status``: a store's content, and the work left to do in it, as lines, JSON or OpenMetrics text.

Every metric is a gauge without a timestamp. The text is then also valid in Prometheus' older text format, for
which ``# UNIT`` and ``# EOF`` are comments: node_exporter's textfile collector reads that format alone, and refuses
samples with times.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvdrift.options import JsonOption, StoreArgument
from kvdrift.schema.errors import InputError, printable

if TYPE_CHECKING:
    import pyarrow as pa

    from kvdrift.flows.estimate.scores import Scoring
    from kvdrift.flows.plan.frozen_plan import FrozenPlan
    from kvdrift.log.counts import Counts, Holdings
    from kvdrift.log.last_times import LastTimes
    from kvdrift.log.store import Store
    from kvdrift.schema.rows import Wide

Row = dict[str, Any]

MANY_FILES = 2000  # files of events from which opening the views takes twice as long as with few

Labels = Mapping[str, str]
_SINCE = "in seconds since 1970"
_GAUGES = {
    "kvdrift_last_run_timestamp_seconds": f"When the study was last run, {_SINCE}.",
    "kvdrift_last_estimate_timestamp_seconds": f"When estimates were last stored, {_SINCE}.",
    "kvdrift_last_check_timestamp_seconds": f"When the store was last verified, {_SINCE}.",
    "kvdrift_check_faults": "Faults of the last check of the store.",
    "kvdrift_units": "Current units of the study.",
    "kvdrift_underived_units": "Current units of the study that are not derived.",
    "kvdrift_pending_units": "Units of the study that are still to be generated.",
    "kvdrift_documents": "Documents of the study, by split.",
    "kvdrift_generated_documents": "Documents of the study that have units, by split.",
    "kvdrift_waiting_replicates": "Replicates that lack positions and are in no estimate.",
    "kvdrift_table_bytes": "Bytes in the folder of a table, with its log and replaced files.",
    "kvdrift_table_files": "Files in the folder of a table, with its log and replaced files.",
    "kvdrift_store_bytes": "Bytes of everything in the store.",
    "kvdrift_store_files": "Files of everything in the store.",
}


def status(
    store: StoreArgument,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Keep showing progress until all studies are finished, or until interrupted."),
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two reads of the store with --watch.")
    ] = 2.0,
    as_json: JsonOption = False,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Print numbers and times for a monitor, as OpenMetrics text.")
    ] = False,
) -> None:
    """Show a store's content, the work left to generate, derive, estimate and write, and the next command.

    With --watch: done and planned units, rate, time left, and the divergence so far, which is preliminary. The command
    only reads, and does not disturb writers of the store.

    Examples:
        kvdrift status stores/quickstart
        kvdrift status stores/quickstart --watch
        kvdrift status stores/quickstart --metrics
    """
    from kvdrift.log.store import Store

    if as_json and metrics:
        raise InputError("--json and --metrics: two forms of the same status; give one of the two")
    if watch and (as_json or metrics):
        raise InputError(f"--{'json' if as_json else 'metrics'}: prints the status once; leave --watch out")
    if watch:
        from kvdrift.flows.pages.live import LiveStore
        from kvdrift.live import show_live

        live = LiveStore(Store.open(store))
        show_live((live.snapshots() for _ in itertools.count()), interval)
        return
    if as_json:
        typer.echo(json.dumps(store_status(Store.open(store)), ensure_ascii=False))
        return
    if metrics:
        typer.echo(metrics_text(store_status(Store.open(store))), nl=False)
        return
    for line in status_lines(Store.open(store)):
        typer.echo(printable(line))


def status_lines(store: Store) -> Iterator[str]:
    """Describe a store, and each study and model in it."""
    from kvdrift.log.studies import Waiting

    held = store_status(store)
    yield f"store: {held['store']}"
    yield f"events: version {held['events_version']}, {held['units']} units; {held['underived']} still to derive"
    if held["event_files"] >= MANY_FILES:
        yield f"files: {held['event_files']} of events; kvdrift compact {store.location} makes the store open faster"
    known = held["check_faults"]
    faults = "" if known is None else f", {known:,} {'fault' if known == 1 else 'faults'}"
    yield f"verified: {_when(held['last_check'])}{faults}"
    for left in held["waiting"]:
        count = Waiting(left["replicates"], left["documents"])
        yield f"waiting: {count} of study {left['study']}, model {left['model']}, in no estimate before they are whole"
    for study in held["studies"]:
        yield f"study {study['study']}, model {study['model']}:"
        yield from _study_lines(study)


def store_status(store: Store) -> Row:
    """Return a store's content and the work left, for the store and for each study and model in it, as plain values."""
    from kvdrift.flows.estimate.scores import Scoring
    from kvdrift.log.last_times import last_times
    from kvdrift.log.studies import count_waiting, store_size

    times, waiting = last_times(store.location), count_waiting(store)
    version = store.version("events")
    underived = store.all_underived()
    actions = store.read("actions")
    counts = store.counts(actions)
    left = _underived(store, underived) if len(underived) else Counter()
    there = sorted({(place.study, place.model) for place in counts.documents})
    studies = []
    for study, model in there:
        scoring = Scoring(store, study, model, counts)
        several = len({other for name, other in there if name == study}) > 1
        study_counts = counts.of_study(study, model)
        status = _study_status(store, study, model, actions, study_counts, scoring, left[study, model], several=several)
        status |= last_of_study(store, study, model, times)
        status["waiting_replicates"] = waiting[study, model].replicates if (study, model) in waiting else 0
        studies.append(status)
    return {
        "store": store.location, "events_version": version, "event_files": len(store.paths("events", version)),
        "units": _count_units(counts.current), "underived": len(underived), "size": store_size(store.location),
        "last_run": max((row["last_run"] for row in studies if row["last_run"]), default=None),
        "last_estimate": max((row["last_estimate"] for row in studies if row["last_estimate"]), default=None),
        "last_check": iso(times.check), "check_faults": times.faults,
        "waiting": [
            {"study": study, "model": model, "replicates": count.replicates, "documents": count.documents}
            for (study, model), count in waiting.items()
        ],
        "studies": studies,
    }  # fmt: skip


def _study_status(
    store: Store,
    study: str,
    model: str,
    stored: pa.Table,
    counts: Counts,
    scoring: Scoring,
    left: int,
    *,
    several: bool,
) -> Row:
    from kvdrift.flows.estimate.scores import answers_are_current, estimated_version
    from kvdrift.flows.pages.reports import report_folder, report_is_current
    from kvdrift.flows.plan.frozen_plan import InterimLooksTaken, find_plan, interim_look_line, wanted_by_stratum
    from kvdrift.log.units.revisions import current_actions

    plan, version = find_plan(store, study, model), store.data_version("events")
    ours = any((row["study"], row["model"]) == (study, model) for row in store.read("studies").to_pylist())
    taken = None if plan is None else InterimLooksTaken.in_store(store, plan)
    by_now = None if plan is None else wanted_by_stratum(plan, taken)
    actions = current_actions(stored, study)
    pending = _pending(actions, counts, plan, by_now or {}) if ours else None
    units, estimated = _count_units(counts.current), estimated_version(store, study, model)
    revised = any(row["action_revision"] or row["dropped"] for row in stored.to_pylist() if row["study"] == study)
    pending_here = [work for work in pending or () if work["reason"] != "of another generator"]
    if ours and (pending_here or plan is None or (taken is not None and not taken.stopped)):
        command = f"kvdrift run STUDY.toml --store {store.location}"
    elif left or estimated != version or not answers_are_current(store, study, model, scoring):
        command = f"kvdrift {'derive' if left else 'analyze'} {store.location}"
    elif not report_is_current(store, report_folder(store, study, model if several else None)):
        command = f"kvdrift report {store.location}"
    else:
        command = None
    return {
        "study": study,
        "model": model,
        "splits": _splits(counts, by_now),
        "plan": None if plan is None else {
            "sha256": plan.sha256, "revision": plan.revision, "frozen_at": f"{plan.frozen_at:%Y-%m-%dT%H:%MZ}",
            "replicates": plan.replicates, "documents_per_stratum": plan.documents_per_stratum, "seen": plan.seen,
        },
        "sequential": None if taken is None else interim_look_line(taken),
        "pending": pending,
        "units": units,
        "derived_units": units - left,
        "answers": {"documents": scoring.documents, "unscored_pairs": scoring.unscored_pairs.total()}
        if scoring.documents else None,
        "estimates": None if estimated is None else {"events_version": estimated, "current_version": version},
        "superseded": [*_superseded(counts.units, actions)] if revised else [],
        "units_of_unknown_identity": sum(held.unknown * count for (_, held), count in counts.current.items()),
        "next": command,
    }  # fmt: skip


def _when(at: str | None) -> str:
    return "no record" if at is None else f"{at[:16].replace('T', ' ')} UTC"


def _study_lines(study: Row) -> Iterator[str]:
    yield f"  last run: {_when(study['last_run'])}; last estimates: {_when(study['last_estimate'])}"
    for split in study["splits"]:
        generated = f"{split['generated']} of {split['documents']} documents generated"
        yield f"  {split['split']}: {generated}, {split['units']} units"
    plan, pending, answers = study["plan"], study["pending"], study["answers"]
    revised = plan is not None and plan["revision"]
    if plan is None:
        yield "  plan: none yet"
    else:
        revision, seen = f"revision {revised}, " if revised else "", "; seen" if plan["seen"] else ""
        frozen = plan["frozen_at"].replace("T", " ").removesuffix("Z")
        yield (
            f"  plan: {plan['sha256'][:12]}, {revision}frozen {frozen} UTC, K = {plan['replicates']}, "
            f"N = {plan['documents_per_stratum']} documents of each stratum{seen}"
        )
    if study["sequential"] is not None:
        yield f"  sequential: {study['sequential']}"
    for work in pending or ():
        yield f"  pending: {work['split']} of {work['action']}, {work['units']} units ({work['reason']})"
    if pending == []:
        evaluation = "" if plan else "; the work of the evaluation is not known before the plan"
        yield f"  pending: nothing, according to the documents, actions and plan in the store{evaluation}"
    yield f"  derived: {study['derived_units']} of {study['units']} units"
    if answers is not None:
        unscored = answers["unscored_pairs"]
        lacking = f"; {unscored} coupled pairs still to score (kvdrift analyze)" if unscored else ", all pairs scored"
        yield f"  answers: known of {answers['documents']} documents{lacking}"
    if study["estimates"] is None:
        yield f"  estimates: none yet{' under this plan' if revised else ''}"
    else:
        made_from, now = study["estimates"]["events_version"], study["estimates"]["current_version"]
        yield f"  estimates: from events version {made_from} ({'current' if made_from == now else f'now {now}'})"
    for old in study["superseded"]:
        yield f"  superseded: {old['action']}, revision {old['revision']}, {old['units']} units ({old['reason']})"
    if unknown := study["units_of_unknown_identity"]:
        yield f"  weights: {unknown} units of another generator do not say which weights made them"
    done = "nothing to do; kvdrift run STUDY.toml --dry-run compares the study file"
    yield f"  next: {study['next'] or done}"


def _splits(counts: Counts, by_now: Mapping[str, int] | None) -> list[Row]:
    """Return for each split how many documents it has, and how many documents and units are generated.

    With a plan, documents of the evaluation are those that the plan needs by now: ``by_now`` has their number by
    stratum.
    """
    documents, generated, units = Counter[str | None](), Counter[str | None](), Counter[str | None]()
    for place, count in counts.documents.items():
        documents[place.split] += count
    for place, count in counts.generated.items():
        generated[place.split] += count
    for (place, held), count in counts.current.items():
        units[place.split] += count * held.units
    wanted = {split: there if split != "evaluation" or by_now is None else sum(by_now.values())
              for split, there in documents.items()}  # fmt: skip
    return [
        {"split": split, "documents": wanted[split], "generated": generated[split], "units": units[split]}
        for split in sorted(documents, key=str)
    ]


def _pending(
    actions: Mapping[str, Row], counts: Counts, plan: FrozenPlan | None, by_now: Mapping[str, int]
) -> list[Row]:
    """List how many units the present actions lack, with a row for each split and action.

    ``by_now`` has how many evaluation documents of each stratum the plan needs by now; it is empty without a plan.
    """
    from kvdrift.flows.plan.frozen_plan import units_done
    from kvdrift.schema.study import EXTERNAL

    known = {held.action for _, held in counts.current}
    rows = []
    for work in units_done(actions, counts, plan, by_now):
        if lacking := work.wanted - work.done:
            if actions[work.action]["selector"] == EXTERNAL:
                reason = "of another generator"
            elif work.action in known:
                reason = "missing"
            else:
                reason = "redone" if actions[work.action]["action_revision"] else "new"
            rows.append({"split": work.split, "action": work.action, "units": lacking, "reason": reason})
    return rows


def _count_units(units: Holdings) -> int:
    return sum(held.units * count for (_, held), count in units.items())


def _underived(store: Store, numbers: Wide) -> Counter[tuple[str, str]]:
    """Count the current units among ``numbers``, by study and model."""
    import pyarrow as pa
    import pyarrow.compute as pc

    units = store.units(columns=("study", "model", "unit"), coded=True)
    units = units.filter(pc.is_in(units["unit"], pa.array(numbers, pa.int64())))
    return Counter(zip(units["study"].to_pylist(), units["model"].to_pylist(), strict=True))


def _superseded(units: Holdings, actions: Mapping[str, Row]) -> Iterator[Row]:
    """List the superseded revisions, whose units no view shows."""
    revisions = Counter[tuple[str, int]]()
    for (_, held), count in units.items():
        revisions[held.action, held.action_revision] += count * held.units
    for (name, revision), count in sorted(revisions.items()):
        if name not in actions or revision < actions[name]["action_revision"]:
            why = f"revision {actions[name]['action_revision']} is current" if name in actions else "dropped"
            yield {"action": name, "revision": revision, "units": count, "reason": why}


def last_of_study(store: Store, study: str, model: str, times: LastTimes) -> dict[str, str | None]:
    """Return when a study was last run and estimated, as the fields ``last_run`` and ``last_estimate``."""
    from kvdrift.flows.estimate.scores import estimated_at

    run = times.runs.get((study, model))
    return {"last_run": iso(run), "last_estimate": iso(estimated_at(store, study, model, times))}


def iso(at: datetime | None) -> str | None:
    """Return a time as ISO 8601 in UTC, to the second; None stays None."""
    return None if at is None else f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def metrics_text(status: Mapping[str, Any]) -> str:
    """Return a store's status as OpenMetrics text; ``status`` has the fields of ``kvdrift status --json``.

    Every sample has the label ``store``. A value that is unknown or does not exist yet has no sample.
    """
    samples: dict[str, list[tuple[Labels, int]]] = {name: [] for name in _GAUGES}
    for name, labels, value in _samples(status):
        if value is not None:
            number = int(datetime.fromisoformat(value).timestamp()) if isinstance(value, str) else value
            samples[name].append(({"store": status["store"], **labels}, number))
    lines = []
    for name, meaning in _GAUGES.items():
        unit = next((unit for unit in ("seconds", "bytes") if name.endswith(f"_{unit}")), "")
        lines += [f"# TYPE {name} gauge", *([f"# UNIT {name} {unit}"] if unit else []), f"# HELP {name} {meaning}"]
        lines += [f"{name}{{{_labels(labels)}}} {value}" for labels, value in samples[name]]
    return "\n".join([*lines, "# EOF", ""])


def _samples(status: Mapping[str, Any]) -> Iterator[tuple[str, Labels, Any]]:
    yield "kvdrift_last_check_timestamp_seconds", {}, status["last_check"]
    yield "kvdrift_check_faults", {}, status["check_faults"]
    for study in status["studies"]:
        labels = {"study": study["study"], "model": study["model"]}
        yield "kvdrift_last_run_timestamp_seconds", labels, study["last_run"]
        yield "kvdrift_last_estimate_timestamp_seconds", labels, study["last_estimate"]
        yield "kvdrift_units", labels, study["units"]
        yield "kvdrift_underived_units", labels, study["units"] - study["derived_units"]
        pending = study["pending"]
        yield "kvdrift_pending_units", labels, None if pending is None else sum(work["units"] for work in pending)
        for split in study["splits"]:
            place = {**labels, "split": split["split"] or ""}
            yield "kvdrift_documents", place, split["documents"]
            yield "kvdrift_generated_documents", place, split["generated"]
        yield "kvdrift_waiting_replicates", labels, study["waiting_replicates"]
    for table, size in status["size"]["tables"].items():
        yield "kvdrift_table_bytes", {"table": table}, size["bytes"]
        yield "kvdrift_table_files", {"table": table}, size["files"]
    yield "kvdrift_store_bytes", {}, status["size"]["bytes"]
    yield "kvdrift_store_files", {}, status["size"]["files"]


def _labels(labels: Labels) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    """Escape a label's value; control characters, which no terminal should get, are written as Python writes them."""
    value = "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in value
    )
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
