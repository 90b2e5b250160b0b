"""Find which stored moments of documents are current: computed from exactly the units that are derived now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from log.units.revisions import current_units
from schema.rows import Flags, Hashes, Wide, row_hashes, run_begins
from schema.tables import GROUP_KEY
from sql.unit_facts import MOMENTS_OF, moment_facts
from sql.view_texts import WAITING, moments_definition

if TYPE_CHECKING:
    from collections.abc import Mapping

    import duckdb

    from log.store import Store

_NUMBERS: Final = ("moments_version", "units_digest", "definition")


@dataclass(frozen=True)
class StoredMoments:
    """Says which documents have stored moments, and of which documents the views compute the moments.

    Attributes:
        stored: Whether the views of moments use stored rows.
        waiting: The documents and actions whose moments the views compute, one row each, sorted, with the columns of
            ``GROUP_KEY``, ``units_digest`` and ``steps``. None if all moments are computed.

    """

    stored: bool
    waiting: pa.Table | None = None

    @property
    def waits(self) -> bool:
        """Whether some documents have stored moments and others have none."""
        return self.stored and self.waiting is not None and self.waiting.num_rows > 0

    def insert_waiting(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Insert the documents and actions whose moments are computed into the table ``WAITING``."""
        if self.waits:
            connection.register("waiting_rows", self.waiting)
            names = ", ".join(GROUP_KEY)
            connection.execute(f"insert into {WAITING} select {names} from waiting_rows")  # noqa: S608 - names of ours
            connection.unregister("waiting_rows")


NO_MOMENTS: Final = StoredMoments(stored=False)
"""The views compute all moments from steps."""


def stored_moments(store: Store, versions: Mapping[str, int]) -> StoredMoments:
    """Find out which stored moments are current.

    A stored row is current if it was computed by the current definition of moments from exactly the units that are
    derived now.

    Args:
        store: The store.
        versions: Delta version by table name, of all tables.

    """
    if not store.paths("document_moments", versions["document_moments"]):
        return NO_MOMENTS
    waiting = waiting_documents(store, versions)
    return StoredMoments(stored=True, waiting=waiting)


def waiting_documents(store: Store, versions: Mapping[str, int]) -> pa.Table:
    """Return the documents and actions that have no current stored moments.

    Returns:
        Rows with the columns of ``StoredMoments.waiting``.

    """
    units = moment_facts(store, versions["units"])
    derived = units.plain & ~np.isin(units.number, store.underived(versions)["trajectories"])
    of, number = units.moments_of[derived], units.number[derived]
    order = np.argsort(of)
    begins = np.flatnonzero(run_begins(of[order])) if len(of) else order
    digest = np.bitwise_xor.reduceat((number ^ units.events_digest[derived])[order], begins) if len(of) else number
    steps = np.add.reduceat(units.event_rows[derived][order], begins) if len(of) else number
    first, of = number[order][begins], of[order][begins]
    waits = ~_present(store, versions, of, digest)

    rows = store.unit_rows(first[waits], MOMENTS_OF, versions["units"])
    rows = current_units(rows, store.read("actions", versions["actions"]))
    at = np.searchsorted(of, row_hashes(rows[name] for name in MOMENTS_OF))
    rows = rows.select(list(GROUP_KEY)).append_column("units_digest", pa.array(digest[at], pa.int64()))
    rows = rows.append_column("steps", pa.array(steps[at], pa.int64()))
    return rows.sort_by([(name, "ascending") for name in GROUP_KEY])


def _present(store: Store, versions: Mapping[str, int], of: Hashes, digest: Wide) -> Flags:
    """Tell which of some documents and actions have current stored moments, given the digests of their units."""
    files = store.of_files("document_moments", (*MOMENTS_OF, *_NUMBERS), _numbers, versions["document_moments"])
    if not files:
        return np.zeros(len(of), dtype=np.bool_)
    stored, version, units, definition = map(np.concatenate, zip(*files, strict=True))
    order = np.lexsort((version, stored))
    end = np.searchsorted(stored[order], of, side="right")
    newest = order[end - 1]  # of the last row where there is none, which is no row of theirs
    present: Flags = (stored[newest] == of) & (units[newest] == digest) & (definition[newest] == moments_number())
    return present


def _numbers(moments: pa.Table) -> tuple[Hashes, Wide, Wide, Wide]:
    # What older schema versions did not say is null, and is that of no units.
    version, digest, definition = (moments[name].fill_null(-1).to_numpy() for name in _NUMBERS)
    return row_hashes(moments[name] for name in MOMENTS_OF), version, digest, definition


def moments_number() -> int:
    """Return a number that identifies how moments are computed: the first 60 bits of ``moments_definition``."""
    return int(moments_definition()[:15], 16)
