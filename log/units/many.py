"""Many units of coupled pairs at once: checked, numbered and hashed over arrays, as ``conform_unit`` does one by one.

Logs of other generators may have hundred thousands of units of a few events each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kvdrift.log.conform import conform
from kvdrift.log.units.unit import complete_record, unit_name, unit_number
from kvdrift.schema.errors import InputError
from kvdrift.schema.tables import EVENTS, GROUP_KEY, PAIR_COLUMNS

_VALUES: Final = tuple(name for name in PAIR_COLUMNS if name not in GROUP_KEY)

Columns = Mapping[str, npt.NDArray[Any]]


def pairs_sha256(values: Columns) -> str:
    """Return ``events_sha256`` of coupled pairs, whole replicates in key order, given by columns."""
    digest = hashlib.sha256()
    for name in _VALUES:
        column = values[name]
        digest.update(np.ascontiguousarray(column.view(np.uint8) if column.dtype == np.bool_ else column).tobytes())
    count = len(values["t"])
    digest.update(bytes(4 * count))  # kinds, of which the first is that of coupled pairs
    digest.update(np.full(count, np.nan).tobytes())  # weights
    return digest.hexdigest()


def conform_pairs(records: Sequence[Mapping[str, Any]], values: Columns) -> tuple[list[dict[str, Any]], pa.Table]:
    """Check units of coupled pairs; return their complete records, and their events with the units' numbers.

    Args:
        records: Rows of ``units``, without what the store fills in.
        values: The columns of events after the names, of the units one after the other, each as whole replicates in
            key order.

    Raises:
        InputError: A record is wrong, or the rows are not the units' own.
    """
    whole = [complete_record(record) for record in records]
    count = np.array([record["replicates"] for record in whole], np.int64)
    horizon = np.array([record["horizon"] for record in whole], np.int64)
    ends = np.cumsum(count * horizon)
    starts, rows = ends - count * horizon, int(ends[-1]) if whole else 0
    of_row = np.repeat(np.arange(len(whole)), count * horizon)
    within = np.arange(rows) - starts[of_row]
    first = np.array([record["first_replicate"] for record in whole], np.int64)
    wanted = {"replicate": first[of_row] + within // horizon[of_row], "t": within % horizon[of_row] + 1}
    for name, expected in wanted.items():
        if len(values[name]) != rows or (wrong := np.flatnonzero(values[name] != expected)).size:
            at = of_row[wrong[0]] if len(values[name]) == rows else 0
            raise InputError(f"events: {name} is not that of {unit_name(whole[at])} in each of its rows")
    said = pa.array(of_row)
    columns: dict[str, Any] = {
        name: pa.array([record[name] for record in whole], EVENTS.schema.field(name).type).take(said)
        for name in (*GROUP_KEY, "action_revision")
    }
    columns |= {name: pa.array(values[name], EVENTS.schema.field(name).type) for name in _VALUES}
    for record, start, end in zip(whole, starts.tolist(), ends.tolist(), strict=True):
        own = {name: values[name][start:end] for name in _VALUES}
        record |= {"unit": unit_number(record), "event_rows": end - start, "events_sha256": pairs_sha256(own)}
    columns["unit"] = pa.array([record["unit"] for record in whole], pa.int64()).take(said)
    return whole, conform(EVENTS, pa.table(columns))
