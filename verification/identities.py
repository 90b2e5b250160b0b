"""Check identities: one identity for each revision, and one model behind all current actions of a study.

Also check that units of a document, action, revision and estimator keep and read the same entries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from kvdrift.log.units import conditions
from kvdrift.log.units.kept_sets import unlike_units
from kvdrift.log.units.revisions import current_actions, current_revision
from kvdrift.schema.tables import IDENTITIES
from kvdrift.verification.files import Fault, SmallTable, UnitRecord, Verified, number_of, row_name

_KEY = IDENTITIES.key
_COLUMNS = tuple(name for name in IDENTITIES.columns if name not in _KEY)
_OF_MODEL = tuple(name for name in _COLUMNS if name != "selector_sha256")  # what actions of a model have in common

Key = tuple[Any, ...]


def check_identities(table: SmallTable, records: Mapping[int, UnitRecord], actions: pa.Table) -> Verified:
    """Check that units have their revision's identity, and a model's actions come from one model.

    A revision without an identity has units of another generator.
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
            faults.append(Fault(_name(key), "the row is missing, must be there: units say what made them"))
    faults += _unlike_models(rows, actions)
    return Verified("identities", number_of(len(rows), "row"), "one to a revision, and as the units say", tuple(faults))


def check_conditions(records: Mapping[int, UnitRecord], studies: pa.Table, actions: pa.Table) -> Verified:
    """Check that current units of a study and model have one horizon, seed and model, those of the study's row."""
    facts = conditions.current_facts(conditions.facts_of_records(records.values()), actions)
    faults = tuple(Fault("units", line) for line in conditions.unlike_conditions(facts, studies.to_pylist()))
    of = f"{len({fact[:2] for fact in facts}):,} of studies and models"
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
    return Verified("kept sets", number_of(len(units), "unit"), "one to a document, action and revision", faults)


def _other_units(key: Key, identities: Mapping[Key, list[UnitRecord]], expected: Mapping[str, Any]) -> list[Fault]:
    """Return faults of the units whose identity differs from the row of their revision."""
    found = []
    for identity, records in identities.items():
        for name, value in zip(_COLUMNS, identity, strict=True):
            if value != expected[name]:
                first = f"the first of document '{records[0]['doc']}'"
                what = f"{name} is {value!r} in {number_of(len(records), 'unit')} ({first}), must be {expected[name]!r}"
                found.append(Fault(_name(key), what))
    return found


def _unlike_models(rows: Mapping[Key, Mapping[str, Any]], actions: pa.Table) -> list[Fault]:
    """Return faults of current actions of one study and model whose units come from different models."""
    studies = {study: current_actions(actions, study) for study, *_ in rows}
    models: dict[Key, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows.values():
        current = studies[row["study"]].get(row["action"])
        if current is not None and current["action_revision"] == row["action_revision"]:
            models[row["study"], row["model"]].append(row)
    found = []
    for (study, model), current_rows in models.items():
        for name in _OF_MODEL:
            first = current_rows[0]
            for row in current_rows[1:]:
                if row[name] != first[name]:
                    where = row_name("identities", {"study": study, "model": model})
                    pair = f"{first[name]!r} of action '{first['action']}' and {row[name]!r} of '{row['action']}'"
                    found.append(
                        Fault(where, f"{name} is {pair}, must be one: kvdrift run --redo generates them again")
                    )
                    break
    return found


def _name(key: Key) -> str:
    return row_name("identities", dict(zip(_KEY, key, strict=True)))
