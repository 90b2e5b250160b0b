"""Check that rows of small tables agree with other tables.

Rows that other rows name must exist, a plan must come before its evaluation, a revision of an action must have one
identity, and current units of a study must be such that they can be pooled. Scores themselves cannot be checked without
the tokenizer. Prompts are read one file at a time, since they may be long.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from kvdrift.log.checked_files import CheckedFiles
from kvdrift.log.store import Store
from kvdrift.log.units import conditions
from kvdrift.log.units.conditions import unlike_units
from kvdrift.log.units.revisions import current_revision
from kvdrift.log.units.unit import unit_name
from kvdrift.schema.document import SCORINGS
from kvdrift.schema.errors import UNREADABLE
from kvdrift.schema.frozen_text import frozen_sha256
from kvdrift.schema.tables import GROUP_KEY, IDENTITIES, PLAIN, PROMPTS, TABLES
from kvdrift.verification.files import (
    Fault,
    SmallTable,
    UnitRecord,
    Verified,
    number_of,
    read_files,
    row_name,
    whole_rows,
)
from kvdrift.verification.units import units_at

_NAMED = 3  # units that one fault names
_GROUP = (*GROUP_KEY, "action_revision")
_DOCUMENT = ("study", "model", "doc", "document_revision")
_CITING = ("study", "model", "events_version", "plan_sha256", "status")
_Ranges = Mapping[tuple[Any, ...], list[tuple[int, int, int]]]  # first replicate, one past the last, horizon


def check_owners(records: Mapping[int, UnitRecord], documents: pa.Table, actions: pa.Table) -> Verified:
    """Check that the document and the action of every unit have rows; without them no view shows the unit's events."""
    faults = []
    for table, rows in (("documents", documents), ("actions", actions)):
        key = tuple(name for name in TABLES[table].key if name != "document_revision")
        known = set(zip(*(rows[name].to_pylist() for name in key), strict=True))
        lacking: dict[tuple[Any, ...], list[UnitRecord]] = {}
        for record in records.values():
            named = tuple(record[name] for name in key)
            if named not in known:
                lacking.setdefault(named, []).append(record)
        for named, units in lacking.items():
            name = row_name(table, dict(zip(key, named, strict=True)))
            faults.append(Fault(name, f"the row is missing, must be there for {_listed(units)}"))
    return Verified(
        "owners", number_of(len(records), "unit"), "of documents and actions that have their rows", tuple(faults)
    )


def check_plans(
    store: Store, plans: SmallTable, records: Mapping[int, UnitRecord], documents: pa.Table, events_version: int
) -> Verified:
    """Check that plans match their hashes, lack no revision, and precede their evaluation or are marked ``seen``.

    The documents that a plan froze must exist with the same prompts.

    At the events version of a plan's first revision, no evaluation document may have had a unit. A later revision must
    be marked ``seen`` if an evaluation document had a unit at its events version.

    ``records`` are the rows of units by number, at the version ``events_version``.
    """
    faults, notes = list(plans.check.faults), list[str]()
    columns = (documents[name].to_pylist() for name in ("study", "model", "doc", "split"))
    evaluation = {tuple(key) for *key, split in zip(*columns, strict=True) if split == "evaluation"}
    revisions = {(plan["study"], plan["model"], plan["plan_revision"]) for plan in plans.rows.to_pylist()}
    hashed = (documents[name].to_pylist() for name in ("study", "model", "doc", "prompt_sha256"))
    prompts = {tuple(key): sha256 for *key, sha256 in zip(*hashed, strict=True)}
    for plan in plans.rows.to_pylist():
        name = row_name("plans", {key: plan[key] for key in TABLES["plans"].key})
        sha256 = frozen_sha256(plan["plan"])
        if sha256 != plan["plan_sha256"]:
            faults.append(
                Fault(name, f"plan has SHA-256 {sha256}, must have {plan['plan_sha256']} as plan_sha256 says")
            )
        faults += [Fault(name, what) for what in _broken_revision(plan, revisions)]
        faults += [Fault(name, what) for what in _other_documents(plan, prompts)]
        made_from = plan["events_version"]
        if wrong := _unknown_version(made_from, events_version):
            faults.append(Fault(name, wrong))
            continue
        try:
            there = units_at(store, made_from)
        except UNREADABLE:
            notes.append(
                f"{name}: whether it came before its evaluation is not checked, since files of events version "
                f"{made_from} are missing"
            )
            continue
        early = [
            records[number] for number in there & records.keys()
            if (records[number]["study"], records[number]["model"]) == (plan["study"], plan["model"])
            and tuple(records[number][part] for part in ("study", "model", "doc")) in evaluation
        ]  # fmt: skip
        if early and not plan["plan_revision"]:
            what = f"events_version is {made_from}, must be one without evaluation units: it has {_listed(early)}"
            faults.append(Fault(name, what))
        elif early and not _is_seen(plan):
            faults.append(Fault(name, f"it is not marked seen, must be: it was made after {_listed(early)}"))
    holds = "hashed right, and frozen before the evaluation or marked seen"
    return Verified("plans", number_of(plans.rows.num_rows, "plan"), holds, tuple(faults), tuple(notes))


def check_citations(table: SmallTable, plans: SmallTable, events_version: int) -> Verified:
    """Check that rows of ``looks``, ``results`` or ``calibration`` name existing events versions and plans.

    No row may have the status prespecified if its plan is marked ``seen``, since such a plan was made after evaluation
    units.
    """
    subject = table.check.subject
    plans_of: dict[tuple[str, str], dict[str, bool]] = defaultdict(
        dict
    )  # whether each plan is seen, by the plan's hash
    for plan in sorted(plans.rows.to_pylist(), key=lambda plan: plan["plan_revision"]):
        plans_of[plan["study"], plan["model"]][plan["plan_sha256"]] = _is_seen(plan)
    faults = list(table.check.faults)
    citing = [name for name in _CITING if name in table.rows.column_names]
    cited = table.rows.group_by(citing).aggregate([([], "count_all")])
    for row in cited.to_pylist():
        name = (
            f"{row_name(subject, {key: row[key] for key in ('study', 'model')})}, {number_of(row['count_all'], 'row')}"
        )
        if wrong := _unknown_version(row["events_version"], events_version):
            faults.append(Fault(name, wrong))
        known, cites = plans_of[row["study"], row["model"]], row["plan_sha256"]
        if plans.readable and cites is not None and cites not in known:
            must = f"must be {' or '.join(known)} as in plans" if known else "must be null: the study has no plan"
            faults.append(Fault(name, f"plan_sha256 is {cites}, {must}"))
        if known.get(cites) and row.get("status") == "prespecified":
            faults.append(Fault(name, f"status is 'prespecified', must be 'seen': plan {cites} is marked seen"))
    holds = "of events versions and plans that are stored"
    return Verified(subject, number_of(table.rows.num_rows, "row"), holds, tuple(faults))


def _broken_revision(plan: Mapping[str, Any], revisions: Collection[tuple[str, str, int]]) -> list[str]:
    """Return what is wrong with a plan's revision; ``revisions`` are the revisions of all plans."""
    revision, declared = plan["plan_revision"], _content(plan).get("revision", 0)
    wrong = [] if declared == revision else [f"plan_revision is {revision}, must be {declared} as its plan says"]
    if revision and (plan["study"], plan["model"], revision - 1) not in revisions:
        wrong.append(f"revision {revision - 1} is missing, must be there")
    return wrong


def _other_documents(plan: Mapping[str, Any], prompts: Mapping[tuple[Any, ...], str | None]) -> Iterator[str]:
    """Yield what is wrong with the documents that a plan froze; ``prompts`` are the hashes of the stored prompts."""
    strata = _content(plan).get("documents", {}).values()
    for row in (row for splits in strata for rows in splits.values() for row in rows):
        stored = prompts.get((plan["study"], plan["model"], row["doc"]))
        if stored != row["prompt_sha256"]:
            has = "none" if stored is None else stored
            yield f"document '{row['doc']}' has prompt_sha256 {has} in documents, must have {row['prompt_sha256']}"


def _is_seen(plan: Mapping[str, Any]) -> bool:
    return bool(_content(plan).get("seen", False))


def _content(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan's JSON; {} if the plan is no JSON, which the check of its hash reports."""
    try:
        content = json.loads(plan["plan"])
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _unknown_version(version: int, latest: int) -> str | None:
    return None if 0 <= version <= latest else f"events_version is {version}, must be one of 0..{latest}"


def _listed(units: list[UnitRecord]) -> str:
    names = sorted(map(unit_name, units))
    named = ", ".join(f"unit {name}" for name in names[:_NAMED])
    return f"{named} and {len(units) - _NAMED} more" if len(units) > _NAMED else named


def check_scores(table: SmallTable, records: Mapping[int, UnitRecord], documents: pa.Table) -> Verified:
    """Check that every score belongs to a stored coupled pair of a document with answers, and is within its range."""
    ranges = defaultdict[tuple[Any, ...], list[tuple[int, int, int]]](list)
    for record in records.values():
        if record["estimator"] == PLAIN:
            first = record["first_replicate"]
            ranges[tuple(record[name] for name in _GROUP)].append(
                (first, first + record["replicates"], record["horizon"])
            )
    answered = {
        tuple(row[name] for name in _DOCUMENT)
        for row in documents.select([*_DOCUMENT, "answers"]).to_pylist()
        if row["answers"]
    }
    faults = list(table.check.faults)
    for row in table.rows.to_pylist():
        wrong = list(_wrong(row, ranges))
        if tuple(row[name] for name in _DOCUMENT) not in answered:
            wrong.append("its document has no answers in documents, must have some")
        name = row_name("scores", {key: row[key] for key in TABLES["scores"].key})
        faults += [Fault(name, what) for what in wrong]
    return Verified(
        "scores", number_of(table.rows.num_rows, "row"), "of pairs and answers that are stored", tuple(faults)
    )


def _wrong(row: Mapping[str, Any], ranges: _Ranges) -> Iterator[str]:
    replicate_ranges = ranges.get(tuple(row[name] for name in _GROUP), ())
    horizon = next((h for first, end, h in replicate_ranges if first <= row["replicate"] < end), None)
    if horizon is None:
        yield "its replicate is in no stored unit, must be in one"
    if row["scoring"] not in SCORINGS:
        yield f"scoring is '{row['scoring']}', must be {', '.join(SCORINGS[:-1])} or {SCORINGS[-1]}"
    for name in ("score_x", "score_y"):
        if not 0 <= row[name] <= 1:
            yield f"{name} is {row[name]}, must be within 0..1"
    first, last = row["span_first"], row["span_last"]
    if (row["score_x"] > 0) != (first is not None) or (first is None) != (last is None):
        yield f"the answer span is {first}..{last}, must be given exactly if score_x is above 0: it is {row['score_x']}"
    elif first is not None and not 1 <= first <= last <= (horizon or last):
        yield f"the answer span is {first}..{last}, must be within 1..{horizon or 'H'}"


def check_prompts(store: Store, version: int, memory: CheckedFiles, documents: pa.Table) -> Verified:
    """Check that all files of ``prompts`` are whole, and that no key occurs twice.

    The tokens of a prompt must have the SHA-256 that its document declares.
    """
    files = read_files(store, "prompts", version, memory)
    columns = (documents[name].to_pylist() for name in (*_DOCUMENT[:3], "prompt_sha256"))
    expected = {tuple(of): sha256 for *of, sha256 in zip(*columns, strict=True) if sha256 is not None}
    keys, faults = Counter[tuple[Any, ...]](), [*files.faults]
    for path in store.paths("prompts", version):
        rows = None if path in files.damaged else whole_rows(store, "prompts", path)
        for row in () if rows is None else rows.select([*PROMPTS.key, "tokens"]).to_pylist():
            key = {name: row[name] for name in PROMPTS.key}
            keys[tuple(key.values())] += 1
            wanted = expected.get(tuple(row[name] for name in _DOCUMENT[:3]))
            if row["tokens"] is None or wanted is None:
                continue
            sha256 = hashlib.sha256(np.array(row["tokens"], dtype="<i4").tobytes()).hexdigest()
            if sha256 != wanted:
                what = f"tokens have SHA-256 {sha256}, must have {wanted} as prompt_sha256 of the document says"
                faults.append(Fault(row_name("prompts", key), what))
    for values, count in keys.items():
        if count > 1:
            name = row_name("prompts", dict(zip(PROMPTS.key, values, strict=True)))
            faults.append(Fault(name, f"{count} rows have this key, must be 1"))
    looked_at = f"{number_of(files.read, 'file')}, {number_of(keys.total(), 'row')}"
    return Verified("prompts", looked_at, "whole, unique and of their documents", tuple(faults))


_KEY = IDENTITIES.key
_COLUMNS = tuple(name for name in IDENTITIES.columns if name not in _KEY)
Key = tuple[Any, ...]


def check_identities(table: SmallTable, records: Mapping[int, UnitRecord]) -> Verified:
    """Check that units have the identity of their action's revision.

    If a revision has no row in ``identities``, its units must be of another generator, which records no identity.
    """
    rows = {tuple(row[name] for name in _KEY): row for row in table.rows.to_pylist()}
    made: dict[Key, dict[Key, list[UnitRecord]]] = defaultdict(lambda: defaultdict(list))
    for record in records.values():
        made[tuple(record[name] for name in _KEY)][tuple(record[name] for name in _COLUMNS)].append(record)
    faults = list(table.check.faults)
    for key, identities in made.items():
        if key in rows:
            faults += _other_units(key, identities, rows[key])
        elif len(identities) > 1:
            faults.append(Fault(_name(key), f"its units have {len(identities)} identities, must be one"))
        elif table.readable and any(value is not None for identity in identities for value in identity):
            faults.append(Fault(_name(key), "the row is missing, must be there: its units record an identity"))
    return Verified("identities", number_of(len(rows), "row"), "one to a revision, and as the units say", tuple(faults))


def check_conditions(records: Mapping[int, UnitRecord], studies: pa.Table, actions: pa.Table) -> Verified:
    """Check that current units of a study and model name have the same weights, tokenizer, numerics and end tokens.

    They must also have the horizon and the seed of the study's row.
    """
    facts = conditions.current_facts(conditions.facts_of_records(records.values()), actions)
    faults = tuple(Fault("units", line) for line in conditions.unlike_conditions(facts, studies.to_pylist()))
    of = f"{number_of(len({fact[:2] for fact in facts}), 'pair')} of study and model"
    return Verified("conditions", of, "one horizon, seed and model in each", faults)


def check_kept_sets(records: Mapping[int, UnitRecord], actions: pa.Table) -> Verified:
    """Check that current units of a document, action, revision and estimator keep and read the same entries."""
    is_current = current_revision(actions)
    units = [
        record
        for record in records.values()
        if is_current((record["study"], record["action"], record["action_revision"]))
    ]
    faults = tuple(Fault("units", line) for line in unlike_units(units))
    return Verified("kept sets", number_of(len(units), "unit"), "with the same entries in each set", faults)


def _other_units(key: Key, identities: Mapping[Key, list[UnitRecord]], expected: Mapping[str, Any]) -> list[Fault]:
    faults = []
    for identity, records in identities.items():
        for name, value in zip(_COLUMNS, identity, strict=True):
            if value != expected[name]:
                first = f"the first of document '{records[0]['doc']}'"
                what = f"{name} is {value!r} in {number_of(len(records), 'unit')} ({first}), must be {expected[name]!r}"
                faults.append(Fault(_name(key), what))
    return faults


def _name(key: Key) -> str:
    return row_name("identities", dict(zip(_KEY, key, strict=True)))
