"""Compare stored moments of documents with the moments that the views compute from steps."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from log.store import Store
from schema.errors import KvdriftError
from sql.catalog import open_views
from sql.contracts import contract
from sql.view_texts import MATERIALIZED
from verification.findings import Fault, Verified, number_of

_TOLERANCE = 1e-12  # several threads add in another order than the one that computed what is stored


def check_moments(store: Store, versions: Mapping[str, int]) -> Verified:
    """Check that all stored moments equal those computed from steps."""
    stored_rows = store.row_count("document_moments")
    rows = number_of(stored_rows, "row")
    if not stored_rows:
        return Verified("document_moments", rows, "none is in use")
    faults = []
    try:
        threads = os.cpu_count() or 1
        with (
            open_views(store, versions, threads=threads) as stored,
            open_views(store, versions, threads=threads, materialized=False) as computed,
        ):
            for view in MATERIALIZED:
                faults += _differences(view, stored.rows(view), computed.rows(view))
    except KvdriftError as error:
        faults.append(Fault("document_moments", f"they cannot be compared with steps ({error})"))
    return Verified("document_moments", rows, "as computed from steps", tuple(faults))


def _differences(view: str, stored: pa.Table, computed: pa.Table) -> list[Fault]:
    """Return a fault for the first row whose stored values differ from computed ones; rows are sorted by key."""
    if stored.num_rows != computed.num_rows:
        return [Fault(f"view {view}", f"has {stored.num_rows} stored rows, must have {computed.num_rows}")]
    for name in computed.column_names:
        there, expected = (table.column(name).combine_chunks() for table in (stored, computed))
        if pa.types.is_floating(expected.type):
            values, wanted = (array.to_numpy(zero_copy_only=False) for array in (there, expected))
            wrong = np.flatnonzero(~np.isclose(values, wanted, rtol=0, atol=_TOLERANCE, equal_nan=True))
        else:
            wrong = np.arange(0) if there.equals(expected) else np.arange(1)
        if wrong.size:
            row = int(wrong[0])
            key = ", ".join(f"{column}={computed[column][row].as_py()}" for column in contract(view).grain)
            value, right = there[row].as_py(), expected[row].as_py()
            return [Fault(f"view {view} ({key})", f"{name} is stored as {value!r}, must be {right!r}")]
    return []
