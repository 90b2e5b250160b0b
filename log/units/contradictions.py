"""Units that the store has with other events: named, set aside, and not acknowledged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvdrift.log.units.unit import in_order, unit_name
from kvdrift.schema.errors import InputError
from kvdrift.schema.location import filesystem_of, join
from kvdrift.schema.tables import PAIR_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvdrift.log.readable_store import ReadableStore

FOLDER = "set-aside/contradictions"
"""The folder of a store with the events of units that contradicted the store, a Parquet file for each unit."""

_COMPARED = (*PAIR_COLUMNS[PAIR_COLUMNS.index("replicate") :], "kind", "weight")


class ContradictionError(InputError):
    """The store has units with other events than those that were given."""

    def __init__(self, line: str, units: Sequence[tuple[Mapping[str, Any], pa.Table]] = ()) -> None:
        """Take the records and events of the units, which stay behind if the error goes to another process."""
        super().__init__(line)
        self.units = units

    @classmethod
    def of(cls, units: Sequence[tuple[Mapping[str, Any], pa.Table]], difference: str) -> Self:
        """Return the error about units of which the first differs so."""
        return cls(f"unit {unit_name(units[0][0])}: {difference}", units)


def set_aside(store: ReadableStore, error: ContradictionError) -> ContradictionError:
    """Write the events of contradicting units to the store's folder ``FOLDER``; return the error that says so."""
    filesystem, folder = filesystem_of(join(store.location, FOLDER))
    filesystem.create_dir(folder)
    for record, events in error.units:
        sink = pa.BufferOutputStream()
        pq.write_table(events, sink, compression="zstd")
        name = f"{record['events_sha256'][:24]}.parquet"
        with filesystem.open_output_stream(f"{folder}/.{name}") as file:
            file.write(sink.getvalue())
        filesystem.move(f"{folder}/.{name}", f"{folder}/{name}")
    (record, events), *others = error.units
    more = f", and {len(others)} more units likewise" if others else ""
    aside = f"the given events are set aside in {join(store.location, FOLDER)}"
    return ContradictionError.of(error.units, f"{_difference(store, record, events)}{more}; {aside}")


def _difference(store: ReadableStore, record: Mapping[str, Any], given: pa.Table) -> str:
    """Return the first value in which the given events of a unit differ from the stored events."""
    reader = store.rows_of_units("events")
    stored = in_order(reader.read([record["unit"]], [record["doc"]], [*_COMPARED, "unit"], given.num_rows))
    if stored.num_rows != given.num_rows:
        return f"{given.num_rows:,} events are given, but the store has {stored.num_rows:,}"
    given = in_order(given)
    for name in _COMPARED:
        one, other = given[name], stored[name].cast(given[name].type)
        differ = pc.fill_null(pc.not_equal(one, other), fill_value=False).to_numpy(zero_copy_only=False)
        if differ.any():
            row = int(np.argmax(differ))
            at = f"replicate {given['replicate'][row].as_py()}, t {given['t'][row].as_py()}"
            return f"{name} is {one[row].as_py()!r} at {at}, but the store has {other[row].as_py()!r}"
    return "its events differ from those in the store"
