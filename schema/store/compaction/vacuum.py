"""Files that a compaction replaced: deleted some time later, and with them the versions that had them."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from pathlib import Path

from schema.store.commits import Commit, transactions
from schema.store.delta import READABLE_SINCE, DeltaFolder
from schema.store.snapshot import Snapshot
from schema.store.table_log import TableLog


def delete_replaced(folder: DeltaFolder, table: str, before: datetime) -> tuple[int, int]:
    """Delete the files of a local table that were replaced before a time, after a commit that says so.

    Args:
        folder: The store's tables.
        table: The table.
        before: The time; files that were replaced since then stay.

    Returns:
        How many files were deleted, and their size in bytes.

    Raises:
        InputError: The files cannot be deleted.
        OperationError: The log cannot be written.

    """
    root = Path(folder.location, table)
    version, replaced = TableLog(root).replaced(before)
    visible = set(folder.load(table).paths())
    files = [root / path for path in sorted(replaced - visible) if (root / path).is_file()]
    if not files:
        return 0, 0

    def attempt(loaded: Snapshot) -> Commit:
        return Commit([], transactions([*loaded.marks_of_rewriting().items(), (READABLE_SINCE, version)]))

    folder.commit(table, attempt, alone=True)
    size = sum(file.stat().st_size for file in files)
    for file in files:
        file.unlink()
        with suppress(OSError):  # others are in the folder, or are about to be
            for parent in file.relative_to(root).parents:
                (root / parent).rmdir()
    return len(files), size
