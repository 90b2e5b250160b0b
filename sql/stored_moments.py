"""Which stored moments of documents are the present ones: those computed from just the units that are derived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from log.units.revisions import current_units
from schema.tables import GROUP_KEY, PLAIN
from sql.view_texts import WAITING, moments_definition

if TYPE_CHECKING:
    from collections.abc import Mapping

    from log.store import Store

_UNIT: Final = (*GROUP_KEY, "action_revision", "estimator", "unit", "event_rows", "events_sha256")
_MOMENTS: Final = (*GROUP_KEY, "action_revision", "moments_version", "units_digest", "definition")

_WAITING_ROWS: Final = """
    with
    digests as (
        select *, cast('0x' || left(coalesce(events_sha256, '0'), 15) as bigint) as events_digest
        from units
    ),
    derived as (
        select
            study, model, doc, action, action_revision, bit_xor(xor(unit, events_digest)) as units_digest,
            sum(event_rows) as steps
        from digests
        group by all
    ),
    newest as (
        select *
        from moments
        qualify moments_version = max(moments_version) over (partition by study, model, doc, action, action_revision)
    )
    select study, model, doc, action, units_digest, cast(steps as bigint) as steps
    from derived
    left join newest as own using (study, model, doc, action, action_revision, units_digest)
    where own.definition is distinct from $definition
    order by study, model, doc, action
"""


@dataclass(frozen=True)
class StoredMoments:
    """What the views of moments take from the store.

    Attributes:
        stored: Whether they take stored rows.
        waiting: The documents and actions whose moments they compute, sorted: a row for each, with the columns of
            ``GROUP_KEY``, ``units_digest`` and ``steps``. None if nothing is looked up.

    """

    stored: bool
    waiting: pa.Table | None = None

    @property
    def waits(self) -> bool:
        """Whether there are stored rows, and documents beside them whose moments are computed."""
        return self.stored and self.waiting is not None and self.waiting.num_rows > 0

    def insert_waiting(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Put the documents and actions whose moments are computed into the table that the views look at."""
        if self.waits:
            connection.register("waiting_rows", self.waiting)
            names = ", ".join(GROUP_KEY)
            connection.execute(f"insert into {WAITING} select {names} from waiting_rows")  # noqa: S608 - names of ours
            connection.unregister("waiting_rows")


NO_MOMENTS: Final = StoredMoments(stored=False)
"""Everything is computed."""


def stored_moments(store: Store, versions: Mapping[str, int]) -> StoredMoments:
    """Find out which stored moments are present ones.

    A stored row is present if it was computed by what computes moments now, from just the units that are derived.

    Args:
        store: The store.
        versions: Delta version by table name, of all tables.

    """
    if not store.paths("document_moments", versions["document_moments"]):
        return NO_MOMENTS
    waiting = waiting_documents(store, versions)
    return StoredMoments(stored=True, waiting=waiting)


def waiting_documents(store: Store, versions: Mapping[str, int]) -> pa.Table:
    """Find the documents and actions whose stored moments, if any, are not the present ones.

    Returns:
        Rows as ``StoredMoments.waiting`` has them.

    """
    units = store.read("units", versions["units"], _UNIT)
    units = current_units(units, store.read("actions", versions["actions"]))
    underived = pa.array(store.underived(versions)["trajectories"], pa.int64())
    units = units.filter(pc.equal(units["estimator"], PLAIN))
    units = units.filter(pc.invert(pc.is_in(units["unit"], underived)))
    moments = store.read("document_moments", versions["document_moments"], _MOMENTS)
    definition = {"definition": moments_number()}
    with duckdb.connect(":memory:", config={"threads": 1}) as connection:
        connection.register("units", units)
        connection.register("moments", moments)
        return connection.sql(_WAITING_ROWS, params=definition).to_arrow_table()


def moments_number() -> int:
    """Return what tells how moments are computed: the first 60 bits of ``moments_definition``."""
    return int(moments_definition()[:15], 16)
