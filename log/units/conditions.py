"""The conditions of a study: values that all current units of one study and model share.

Trajectories of different horizons, seeds or models must not be pooled. A commit of units is refused if a condition
differs from that of stored units or of the study's row in ``studies``. Sampling has no column in ``units``: the row of
``studies`` has it, and a second row with other values is refused (``kvdrift.log.small_tables``). A null is unknown and
is never compared, since other generators do not say all of these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

import pyarrow as pa

from kvdrift.log.units.revisions import current_revision
from kvdrift.schema.errors import UnlikeUnitsError

CONDITIONS: Final = ("horizon", "seed", "weights_sha256", "tokenizer_sha256", "numerics", "eos_tokens")
"""The columns of ``units`` in which current units of a study and model must not differ."""

DECLARED: Final = ("study", "model", "horizon", "seed")
"""The columns of ``studies`` that are compared."""

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
    said = set[tuple[str, str, str]]()
    for fact in sorted(facts, key=lambda fact: tuple(map(str, fact))):
        study, model, action, revision, *values = fact
        whose = f"action '{action}'" + (f" of revision {revision}" if revision else "")
        for name, value in zip(CONDITIONS, values, strict=True):
            if value is None:
                continue
            other, where = known.setdefault((study, model, name), (value, whose))
            if other is not None and other != value and (study, model, name) not in said:
                said.add((study, model, name))
                yield (
                    f"study '{study}', model '{model}': {name} is {value} in {whose} and {other} in {where}; "
                    "all current units of a study and model must have one"
                )


def check_conditions(facts: Iterable[tuple[Any, ...]], studies: Iterable[Mapping[str, Any]]) -> None:
    """Raise UnlikeUnitsError if ``unlike_conditions`` yields a line."""
    if (line := next(unlike_conditions(facts, studies), None)) is not None:
        raise UnlikeUnitsError(line)


def known(facts: Facts) -> set[tuple[str, str, str]]:
    """Return the study, model and name of each condition that some facts say."""
    return {
        (*fact[:2], name)
        for fact in facts
        for name, value in zip(CONDITIONS, fact[4:], strict=True)
        if value is not None
    }


def current_facts(facts: Facts, actions: pa.Table) -> Facts:
    """Return the facts of units that no revision supersedes; ``actions`` are all rows of that table."""
    is_current = current_revision(actions)
    return frozenset(fact for fact in facts if is_current((fact[0], fact[2], fact[3])))


def of_studies(facts: Facts, pairs: Collection[tuple[str, str]]) -> Facts:
    """Return the facts of some studies and models."""
    return frozenset(fact for fact in facts if fact[:2] in pairs)
