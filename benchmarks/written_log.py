"""Write commits of Delta Lake tables by hand: the same lines as delta-rs, in a fiftieth of the time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from log.delta.parquet_files import DataFiles, StoredFile
from log.delta.table_log import CHECKPOINT_EVERY
from log.store import Unit
from log.units.records import as_rows
from log.units.unit import conform_unit, group_of
from schema.locking import in_turn


class HandWrittenStore:
    """A store of a single writer, which appends units without checks of what the store has.

    Args:
        folder: The store.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._versions = {"events": 0, "units": 0}

    def append_units(self, units: list[Unit]) -> None:
        """Make new units visible."""
        made = [conform_unit(unit) for unit in units]
        guards = [(group_of(record), record["first_replicate"] + record["replicates"]) for record, _ in made]
        self._commit("events", self._put("events", pa.concat_tables([events for _, events in made])), guards)
        self._commit("units", self._put("units", as_rows([record for record, _ in made])), guards)

    def _put(self, table: str, rows: pa.Table) -> StoredFile:
        return DataFiles(self._folder).put_rows(table, rows)

    def _commit(self, table: str, file: StoredFile, transactions: list[tuple[str, int]]) -> None:
        """Commit in turn with other writers, and write a checkpoint as often as a store does."""
        last, folder = self._versions[table], self._folder / table
        with in_turn(folder / "_delta_log", lambda: last):
            self._versions[table] = made = write_commit(folder, last + 1, [file], transactions)
        if made // CHECKPOINT_EVERY > last // CHECKPOINT_EVERY:
            DeltaTable(folder).create_checkpoint()


def write_commit(
    table_folder: Path, version: int, files: Iterable[StoredFile], transactions: Iterable[tuple[str, int]]
) -> int:
    """Make files visible at a version, or at the first later version that no other writer has taken.

    Args:
        table_folder: The table.
        version: The version.
        files: Files that are in the table's folder.
        transactions: Application transactions, as (id, version), which the next checkpoint forgets.

    Returns:
        The version that was made.
    """
    fixed = {"partitionValues": {}, "modificationTime": 0, "dataChange": True}
    actions: list[dict[str, Any]] = [{"commitInfo": {"operation": "WRITE"}}]
    actions += [{"txn": {"appId": name, "version": at, "lastUpdated": 1}} for name, at in transactions]
    for file in files:
        stats = json.dumps({"numRecords": file.rows})
        actions.append({"add": {"path": file.path, "size": file.size, "stats": stats, **fixed}})
    aside = table_folder / "_delta_log" / ".by-hand"
    aside.write_text("".join(json.dumps(action) + "\n" for action in actions))
    while True:
        try:
            aside.with_name(f"{version:020d}.json").hardlink_to(aside)
        except FileExistsError:
            version += 1
        else:
            aside.unlink()
            return version
