"""The small tables of the store: rows with keys, appended once."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from schema.errors import InputError
from schema.store.commits import Commit, transactions
from schema.store.delta import DeltaFolder
from schema.store.parquet_files import StoredFile, content_digest, encode_parquet
from schema.store.snapshot import Snapshot
from schema.tables import TABLES

KEYED = ("documents", "actions", "studies", "identities", "plans", "results", "calibration", "exact_values")
_ROWS_APP_ID = "kvdrift.rows"


def append_new_rows(folder: DeltaFolder, table: str, rows: pa.Table) -> int:
    """Append the rows whose keys a small table, one of ``KEYED``, does not have yet; return how many.

    The rows are of the declared schema. Nulls in key columns count as equal to each other.

    Raises:
        InputError: The table has a row of the same key and other values; then nothing is appended.

    """
    new: list[dict[str, Any]] = []

    def attempt(loaded: Snapshot) -> Commit | None:
        nonlocal new
        known = {_key(table, row): row for row in folder.read(loaded, TABLES[table].columns).to_pylist()}
        new = []
        for row in rows.to_pylist():
            there = known.setdefault(_key(table, row), row)
            if there is row:
                new.append(row)
            else:
                _check_same(table, there, row)
        if not new:
            return None
        data = encode_parquet(pa.Table.from_pylist(new, schema=rows.schema))
        file = StoredFile(f"{content_digest(data)}.parquet", len(data), len(new))
        folder.put(table, file.path, data)
        return Commit([file], transactions([(_ROWS_APP_ID, loaded.version + 1)]))

    folder.commit(table, attempt)
    return len(new)


def _key(table: str, row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in TABLES[table].key)


def _check_same(table: str, stored: dict[str, Any], given: dict[str, Any]) -> None:
    for name, value in given.items():
        both_nan = value != value and stored[name] != stored[name]  # noqa: PLR0124
        if stored[name] != value and not both_nan:
            named = ", ".join(f"{column}={given[column]}" for column in TABLES[table].key)
            raise InputError(f"{table} ({named}): {name} is {value!r}, but the store has {stored[name]!r}")
