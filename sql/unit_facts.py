"""Facts about units that are needed before views are opened, as arrays that stay in memory while a store grows."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from log.units.kept_sets import ALIKE, SAME
from log.units.numbers import numbers_of
from log.units.rows import COUNTED, UnitCounts
from log.units.unit import SPAN
from schema.rows import Flags, Hashes, Wide, row_hashes
from schema.tables import GROUP_KEY, UNITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from log.readable_store import ReadableStore

MOMENTS_OF: Final = (*GROUP_KEY, "action_revision")
"""The key of a document's moments: the document under a revision of an action."""

_DIGITS: Final = 15  # of the digest of a unit's events, in hexadecimal: 60 bits


class _Facts:
    """Base of dataclasses of arrays whose last dimension is [units]."""

    @classmethod
    def all(cls, parts: Sequence[Self]) -> Self:
        """Concatenate the units of several files."""
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # the classes below are dataclasses
        return cls(*(np.concatenate([getattr(part, name) for part in parts], axis=-1) for name in names))


@dataclass(frozen=True)
class KeptFacts(_Facts):
    """The kept sets of units and their entries: arrays [units], and [2, units] with a row per column of ``ALIKE``."""

    number: Wide
    kept_set: Hashes
    kept: Hashes
    is_known: Flags

    @classmethod
    def of(cls, units: pa.Table) -> KeptFacts:
        """Return the facts of rows of table ``units``."""
        return cls(
            numbers_of(units),
            row_hashes(units[name] for name in SAME),
            np.stack([row_hashes([units[name]]) for name in ALIKE]),
            np.stack([pc.is_valid(units[name]).to_numpy() for name in ALIKE]),
        )

    def unlike(self) -> Wide:
        """Return the numbers of all units of kept sets in which units differ, superseded units included."""
        found = np.zeros(len(self.number), dtype=np.bool_)
        order = np.argsort(self.kept_set)
        for kept, known in zip(self.kept, self.is_known, strict=True):
            own = order[known[order]]
            sets, kept_there = self.kept_set[own], kept[own]
            differ = (sets[1:] == sets[:-1]) & (kept_there[1:] != kept_there[:-1])  # of neighbours: some do
            if differ.any():
                found |= np.isin(self.kept_set, sets[1:][differ])
        return self.number[found]


@dataclass(frozen=True)
class MomentFacts(_Facts):
    """The facts of units that determine which moments are current; all arrays are [units]."""

    number: Wide
    plain: Flags
    event_rows: Wide
    events_digest: Wide  # 0 if it is not known
    moments_of: Hashes  # of the values in ``MOMENTS_OF``

    @classmethod
    def of(cls, units: pa.Table) -> MomentFacts:
        """Return the facts of rows of table ``units``."""
        counts = UnitCounts.of(units)
        digests = pc.utf8_slice_codeunits(units["events_sha256"].cast(pa.string()).fill_null("0"), 0, _DIGITS)
        return cls(
            counts.number,
            ~counts.swrb,
            counts.event_rows,
            np.array([int(digits, 16) for digits in digests.to_pylist()], dtype=np.int64),
            row_hashes(units[name] for name in MOMENTS_OF),
        )


def kept_facts(store: ReadableStore, version: int) -> KeptFacts:
    """Return the kept facts of all units at a version of ``units``; only files new since the last call are read.

    Raises:
        InputError: A file is damaged.

    """
    names = [*dict.fromkeys(("unit", *SPAN, *ALIKE))]
    parts = store.of_files("units", names, KeptFacts.of, version)
    return KeptFacts.all(parts or [KeptFacts.of(UNITS.schema.empty_table().select(names))])


def moment_facts(store: ReadableStore, version: int) -> MomentFacts:
    """Return the moment facts of all units at a version of ``units``; only files new since the last call are read."""
    names = [*dict.fromkeys((*COUNTED, *SPAN, "events_sha256"))]
    parts = store.of_files("units", names, MomentFacts.of, version)
    return MomentFacts.all(parts or [MomentFacts.of(UNITS.schema.empty_table().select(names))])
