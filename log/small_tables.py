"""Append rows to the small tables of the store, each key once."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.log.delta.commits import Commit, transactions
from kvdrift.log.delta.folder import DeltaFolder
from kvdrift.log.delta.versions import Snapshot
from kvdrift.schema.errors import InputError
from kvdrift.schema.tables import TABLES

KEYED = (
    "documents", "actions", "studies", "identities", "plans", "looks", "results", "calibration", "exact_values",
    "scores", "tokens",
)  # fmt: skip
_ROWS_APP_ID = "kvdrift.rows"


def append_new_rows(folder: DeltaFolder, table: str, rows: pa.Table) -> int:
    """Append those rows whose keys a small table (one of ``KEYED``) lacks; return how many.

    The rows have the declared schema. Nulls in key columns count as equal to each other.

    Raises:
        InputError: Two rows of one key, given or stored, have different values. Then nothing is appended.
    """
    new = rows

    def attempt(loaded: Snapshot) -> Commit | None:
        nonlocal new
        new = _missing(folder, loaded, table, rows)
        if not new.num_rows:
            return None
        file = folder.put_rows(table, new)
        return Commit([file], transactions([(_ROWS_APP_ID, loaded.version + 1)]))

    folder.commit(table, attempt)
    return int(new.num_rows)


def _missing(folder: DeltaFolder, loaded: Snapshot, table: str, rows: pa.Table) -> pa.Table:
    """Return the rows whose keys the table lacks; raise InputError if rows of one key have different values."""
    key = list(TABLES[table].key)
    stored = folder.read(loaded, key)
    for name in key:  # each remaining row shares every key column with some given row
        stored = stored.filter(pc.is_in(stored[name], value_set=pc.unique(rows[name])))
    if not stored.num_rows and rows.group_by(key).aggregate([]).num_rows == rows.num_rows:
        return rows  # the usual case: thousands of new estimates in one call
    known = {_key(table, row): row for row in folder.read(loaded, TABLES[table].columns).to_pylist()}
    new = []
    for row in rows.to_pylist():
        there = known.setdefault(_key(table, row), row)
        if there is row:
            new.append(row)
        else:
            _check_same(table, there, row)
    return pa.Table.from_pylist(new, schema=rows.schema)


def _key(table: str, row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in TABLES[table].key)


def _check_same(table: str, stored: dict[str, Any], row: dict[str, Any]) -> None:
    for name, value in row.items():
        both_nan = value != value and stored[name] != stored[name]  # noqa: PLR0124
        if stored[name] != value and not both_nan:
            named = ", ".join(f"{column}={row[column]}" for column in TABLES[table].key)
            raise InputError(f"{table} ({named}): {name} is {value!r}, but the store has {stored[name]!r}")
