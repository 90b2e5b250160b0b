"""Check kept sets: all units of a document, action, revision and estimator keep and read the same prompt entries.

The identity of an action includes source and parameters. Other influences, such as the environment, a file or a hash
seed, show only in the columns ``kept_sha256`` and ``read_checksums`` of units (definitions, "Identity and revisions").
A null in these columns is unknown and is never compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from kvdrift.schema.errors import UnlikeUnitsError
from kvdrift.schema.tables import GROUP_KEY

ALIKE: Final = {"kept_sha256": "keep unlike entries", "read_checksums": "read unlike entries"}
"""The columns that are equal within a kept set, each with the words about units that differ in the column."""

SAME: Final = (*GROUP_KEY, "action_revision", "estimator")
"""The columns that name a kept set."""

COMPARED: Final = (*SAME, "first_replicate", "replicates", *ALIKE)
"""The columns of ``units`` that ``unlike_units`` needs."""


def unlike_units(units: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each kept set and column in which units, with the columns ``COMPARED``, differ."""
    sets: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for unit in units:
        sets[_set_of(unit)].append(unit)
    for _, members in sorted(sets.items()):
        for column, differs in ALIKE.items():
            known = [unit for unit in members if unit[column] is not None]
            known.sort(key=lambda unit: unit["first_replicate"])
            other = next((unit for unit in known if unit[column] != known[0][column]), None)
            if other is not None:
                yield _line(column, differs, known[0], other)


def check_alike(units: Iterable[Mapping[str, Any]], stored: Iterable[Mapping[str, Any]] = ()) -> None:
    """Raise UnlikeUnitsError if units keep or read other entries than the other units of their kept sets.

    Rows have the columns ``COMPARED``; stored rows of other kept sets are ignored.
    """
    new = list(units)
    sets = {_set_of(unit) for unit in new}
    line = next(unlike_units([*(unit for unit in stored if _set_of(unit) in sets), *new]), None)
    if line is not None:
        raise UnlikeUnitsError(line)


def _set_of(unit: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(unit[name] for name in SAME)


def _line(column: str, differs: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    layers = max(len(one[column]), len(other[column]))
    hashes = [[*unit[column], *["none"] * (layers - len(unit[column]))] for unit in (one, other)]
    layer, first, second = next((n, a, b) for n, (a, b) in enumerate(zip(*hashes, strict=True)) if a != b)
    ranges = [f"[{unit['first_replicate']}, {unit['first_replicate'] + unit['replicates']})" for unit in (one, other)]
    action = one["action"]
    return (
        f"action '{action}', document '{one['doc']}' of study '{one['study']}': replicates {ranges[0]} and {ranges[1]} "
        f"{differs} (layer {layer}: {column} {first[:12]} and {second[:12]}), so something beside source and "
        "parameters decides, such as the environment, a file, a hash seed or the machine; "
        f"kvdrift run STUDY.toml --redo {action} generates its units anew"
    )
