"""What units must share so that they can be pooled: the conditions of a study, and the entries of a kept set.

Trajectories of different horizons, seeds or models must not be pooled, so all current units of one study and model
share these conditions. A commit of units is refused if a condition differs from that of stored units or of the study's
row in ``studies``. Sampling has no column in ``units``: the row of ``studies`` has it, and a second row with other
values is refused (``kvdrift.log.small_tables``).

The units of one document, action, revision and estimator are called a kept set: all of them must keep and read the same
prompt entries. The identity of an action includes source and parameters. Other influences, such as the environment, a
file or a hash seed, show only in the columns ``kept_sha256`` and ``read_checksums`` of units.

A null is unknown and is never compared, since other generators do not state all of these values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import pyarrow as pa

from kvdrift.log.units.revisions import current_revision
from kvdrift.schema.errors import UnlikeUnitsError
from kvdrift.schema.tables import GROUP_KEY

CONDITIONS: Final = ("horizon", "seed", "weights_sha256", "tokenizer_sha256", "numerics", "eos_tokens")
"""The columns of ``units`` in which current units of a study and model must not differ."""

DECLARED: Final = ("study", "model", "horizon", "seed")
"""The columns of ``studies`` that name a study and model, and the conditions that are compared with its units."""

_ACTION: Final = ("study", "model", "action", "action_revision")
COMPARED: Final = (*_ACTION, *CONDITIONS)

Facts = frozenset[tuple[Any, ...]]
"""Distinct values of some units in the columns ``COMPARED``."""


def facts_of(units: pa.Table) -> Facts:
    """Return the distinct values of units in the columns ``COMPARED``."""
    return frozenset(zip(*(units[name].to_pylist() for name in COMPARED), strict=True))


def facts_of_records(records: Iterable[Mapping[str, Any]]) -> Facts:
    """Return the distinct values of records of units in the columns ``COMPARED``."""
    return frozenset(tuple(record[name] for name in COMPARED) for record in records)


def unlike_conditions(facts: Iterable[tuple[Any, ...]], studies: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each study, model and condition in which units differ, or differ from the study's row.

    ``studies`` are rows of that table with the columns ``DECLARED``.
    """
    known = {
        (row["study"], row["model"], name): (row[name], "its row in studies")
        for row in studies
        for name in DECLARED[2:]
    }
    reported = set[tuple[str, str, str]]()
    for fact in sorted(facts, key=lambda fact: tuple(map(str, fact))):
        study, model, action, revision, *values = fact
        whose = f"action '{action}'" + (f" of revision {revision}" if revision else "")
        for name, value in zip(CONDITIONS, values, strict=True):
            if value is None:
                continue
            other, where = known.setdefault((study, model, name), (value, whose))
            if other is not None and other != value and (study, model, name) not in reported:
                reported.add((study, model, name))
                yield (
                    f"study '{study}', model '{model}': {name} is {value} in {whose} and {other} in {where}; "
                    f"all current units of a study and model must have the same {name}"
                )


def check_conditions(facts: Iterable[tuple[Any, ...]], studies: Iterable[Mapping[str, Any]]) -> None:
    """Raise UnlikeUnitsError if ``unlike_conditions`` yields a line."""
    if (line := next(unlike_conditions(facts, studies), None)) is not None:
        raise UnlikeUnitsError(line)


def known(facts: Facts) -> set[tuple[str, str, str]]:
    """Return the (study, model, condition) of each condition that is known, not null, in some of the facts."""
    return {
        (*fact[:2], name)
        for fact in facts
        for name, value in zip(CONDITIONS, fact[4:], strict=True)
        if value is not None
    }


def current_facts(facts: Facts, actions: pa.Table) -> Facts:
    """Return the facts of units of current revisions; ``actions`` are all rows of table ``actions``."""
    is_current = current_revision(actions)
    return frozenset(fact for fact in facts if is_current((fact[0], fact[2], fact[3])))


KEPT_HASHES: Final = {"kept_sha256": "keep different entries", "read_checksums": "read different entries"}
"""The columns that are equal within a kept set, each with what a message says about units that differ there."""

SAME: Final = (*GROUP_KEY, "action_revision", "estimator")
"""The columns that name a kept set."""

KEPT_COLUMNS: Final = (*SAME, "first_replicate", "replicates", *KEPT_HASHES)
"""The columns of ``units`` that ``unlike_units`` needs."""


def unlike_units(units: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each column in which units of one document, action, revision and estimator differ.

    The columns are those of ``KEPT_HASHES``; ``units`` have the columns ``KEPT_COLUMNS``.
    """
    sets: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for unit in units:
        sets[_set_of(unit)].append(unit)
    for _, members in sorted(sets.items()):
        for column, differs in KEPT_HASHES.items():
            known = [unit for unit in members if unit[column] is not None]
            known.sort(key=lambda unit: unit["first_replicate"])
            other = next((unit for unit in known if unit[column] != known[0][column]), None)
            if other is not None:
                yield _line(column, differs, known[0], other)


def check_same_entries(units: Iterable[Mapping[str, Any]], stored: Iterable[Mapping[str, Any]] = ()) -> None:
    """Raise UnlikeUnitsError if units of one document, action, revision and estimator keep or read different entries.

    All rows have the columns ``KEPT_COLUMNS``. A row of ``stored`` counts only if some row of ``units`` has the same
    document, action, revision and estimator.
    """
    new = list(units)
    sets = {_set_of(unit) for unit in new}
    line = next(unlike_units([*(unit for unit in stored if _set_of(unit) in sets), *new]), None)
    if line is not None:
        raise UnlikeUnitsError(line)


def _set_of(unit: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(unit[name] for name in SAME)


def _line(column: str, differs: str, first_unit: Mapping[str, Any], second_unit: Mapping[str, Any]) -> str:
    units = (first_unit, second_unit)
    layers = max(len(unit[column]) for unit in units)
    hashes = [[*unit[column], *["none"] * (layers - len(unit[column]))] for unit in units]
    layer, first, second = next((n, a, b) for n, (a, b) in enumerate(zip(*hashes, strict=True)) if a != b)
    ranges = [f"[{unit['first_replicate']}, {unit['first_replicate'] + unit['replicates']})" for unit in units]
    study, doc, action = (first_unit[name] for name in ("study", "doc", "action"))
    return (
        f"action '{action}', document '{doc}' of study '{study}': replicates {ranges[0]} and {ranges[1]} {differs} "
        f"(layer {layer}: {column} {first[:12]} and {second[:12]}), so the entries depend on something besides the "
        "action's source and parameters, such as the environment, a file, a hash seed or the machine; "
        f"kvdrift run STUDY.toml --redo {action} generates its units anew"
    )
