"""Facts about units that are needed before views are opened, as arrays that stay in memory while a store grows."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from log.units.kept_sets import ALIKE, SAME
from log.units.numbers import numbers_of
from log.units.unit import SPAN
from schema.rows import Flags, Hashes, Wide, row_hashes
from schema.tables import UNITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from log.readable_store import ReadableStore


@dataclass(frozen=True)
class KeptFacts:
    """What units keep and read: arrays [units], and [2, units] with one row for each column of ``ALIKE``."""

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

    @classmethod
    def all(cls, parts: Sequence[KeptFacts]) -> KeptFacts:
        """Put the units of several files together."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts], axis=-1) for name in names))

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


def kept_facts(store: ReadableStore, version: int) -> KeptFacts:
    """Return the kept facts of all units at a version of ``units``; only files new since the last call are read.

    Raises:
        InputError: A file is damaged.

    """
    names = [*dict.fromkeys(("unit", *SPAN, *ALIKE))]
    parts = store.of_files("units", names, KeptFacts.of, version)
    return KeptFacts.all(parts or [KeptFacts.of(UNITS.schema.empty_table().select(names))])
