"""The storage and cost of each action, from its units."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvdrift.report.reading.source import ViewRow
from kvdrift.schema.tables import PLAIN, SWRB

_RESIDENT = 4  # index of the resident bytes; the parts before add up to the prompt's cache


@dataclass(frozen=True)
class Storage:
    """The storage and cost of one action, from its units; a policy's bytes are the most that it ever holds."""

    kept_entries: list[int | None]  # one value per document
    replicates: list[int]  # coupled pairs of each document that has any
    branchings: list[int]  # replicates of residual branching of each document that has any
    resident: dict[str, tuple[int | None, ...]]  # bytes by document: payload, scales, index, metadata, resident
    # bytes by document that each replicate adds to the prompt's cache; None if unknown
    per_replicate: dict[str, float | None]
    seconds: float | None  # prefill and decoding of all units
    kernel_evaluations: int | None  # of all units
    weight_bytes: int | None = None  # of the weight files of its side; None if unknown
    # mean part of the payload that no action can evict, over documents; None if unknown
    fixed_bytes: float | None = None

    def mean_bytes(self, part: int) -> float | None:
        """Return the mean over documents of a part: 0 payload, 1 scales, 2 index, 3 metadata, 4 resident."""
        return mean(parts[part] for parts in self.resident.values())

    @property
    def prompt_cache(self) -> dict[str, int | None]:
        """Bytes of the prompt's cache by document, shared by all replicates: the sum of the parts but ``resident``."""
        return {doc: None if parts[0] is None else total(parts[:_RESIDENT]) for doc, parts in self.resident.items()}

    @property
    def mean_prompt_cache(self) -> float | None:
        """Mean bytes of the prompt's cache over documents."""
        return mean(self.prompt_cache.values())


def read_storage(units: list[ViewRow]) -> dict[str, Storage]:
    """Return what each action of some units keeps and costs."""
    by_action: dict[str, dict[str, list[ViewRow]]] = defaultdict(lambda: defaultdict(list))
    for unit in units:
        by_action[unit["action"]][unit["doc"]].append(unit)
    stored = {}
    for action, documents in by_action.items():
        rows = [row for ranges in documents.values() for row in ranges]
        stored[action] = Storage(
            kept_entries=[ranges[0]["kept_entries"] for ranges in documents.values()],
            replicates=_replicates(documents, PLAIN),
            branchings=_replicates(documents, SWRB),
            resident={doc: _resident(ranges[0]) for doc, ranges in documents.items()},
            per_replicate={doc: _added_by_one(ranges[0]) for doc, ranges in documents.items()},
            seconds=total(row[name] for row in rows for name in ("prefill_seconds", "decode_seconds")),
            kernel_evaluations=total(row["kernel_evaluations"] for row in rows),
            weight_bytes=max((row["weight_bytes"] for row in rows if row["weight_bytes"] is not None), default=None),
            fixed_bytes=mean(ranges[0]["fixed_bytes"] for ranges in documents.values()),
        )
    return stored


def _replicates(documents: dict[str, list[ViewRow]], estimator: str) -> list[int]:
    """Return the number of an estimator's replicates, for each document that has any."""
    counts = [sum(row["replicates"] for row in units if row["estimator"] == estimator) for units in documents.values()]
    return [total for total in counts if total]


def _added_by_one(unit: ViewRow) -> float | None:
    """Return the bytes that each of a unit's replicates adds to the prompt's cache; None if unknown."""
    payload, scales, index, metadata, resident = _resident(unit)
    if resident is None or payload is None or not unit["replicates"]:
        return None
    return float((resident - total((payload, scales, index, metadata))) / unit["replicates"])


def _resident(unit: ViewRow) -> tuple[int | None, ...]:
    """Return a unit's bytes by part; the last part is the resident total, with its streams."""
    scales = unit["scale_bytes"] or 0  # null in units from before scales were stored
    return (unit["payload_bytes"], scales, *(unit[f"{part}_bytes"] for part in ("index", "metadata", "resident")))


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None if no value is known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def total(values: Iterable[Any]) -> Any:
    """Return the sum of the known values; None if no value is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
