"""Documents of a store of an older version, whose units were derived and have no moments.

Views compute their moments from steps until a derivation makes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import duckdb
import numpy as np
import pyarrow as pa

from kvdrift.log.store import Store
from kvdrift.log.units.numbers import numbers_of
from kvdrift.log.units.unit import SPAN
from kvdrift.schema.tables import GROUP_KEY

_KEY: Final = ", ".join(GROUP_KEY)


def waiting_documents(store: Store, versions: Mapping[str, int]) -> pa.Table:
    """Return the documents and actions whose moments must be computed: the distinct values of ``GROUP_KEY``."""
    lacking = store.underived(versions)
    numbers = np.setdiff1d(lacking["unit_moments"], lacking["trajectories"])
    if not len(numbers):
        return pa.table({name: pa.array([], pa.string()) for name in GROUP_KEY})
    units = store.read("units", versions["units"], (*SPAN, "unit"))
    return units.filter(np.isin(numbers_of(units), numbers)).group_by(GROUP_KEY).aggregate([])


def with_computed(
    connection: duckdb.DuckDBPyConnection, waiting: pa.Table, sources: Mapping[str, Sequence[str]]
) -> Mapping[str, Sequence[str]]:
    """Return sources of ``unit_moments`` that have computed rows of the waiting documents, in place of stored rows."""
    if not waiting.num_rows:
        return sources
    connection.register("waiting_rows", waiting)
    connection.execute(f"insert into stored.waiting select {_KEY} from waiting_rows")  # noqa: S608 - names of ours
    connection.unregister("waiting_rows")
    kept = {f"(from {source} anti join stored.waiting using ({_KEY}))": lacks for source, lacks in sources.items()}
    return kept | {"internal.computed_moments": ()}
