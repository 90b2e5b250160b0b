"""Files that a compaction replaced: deleted some time later, and with them the versions that had them."""

from __future__ import annotations

from datetime import datetime

from log.commits import Commit, replaced_files, transactions
from log.delta.folder import DeltaFolder
from log.delta.reading import READABLE_SINCE
from log.delta.snapshot import Snapshot
from schema.location import join


def delete_replaced(folder: DeltaFolder, table: str, before: datetime) -> tuple[int, int]:
    """Delete the files of a table that were replaced before a time, after a commit that says so.

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
    version, replaced = replaced_files(join(folder.location, table), before)
    sizes = folder.sizes(table, replaced.difference(folder.load(table).paths()))
    if not sizes:
        return 0, 0

    def attempt(loaded: Snapshot) -> Commit:
        return Commit([], transactions([*loaded.marks_of_rewriting().items(), (READABLE_SINCE, version)]))

    folder.commit(table, attempt, alone=True)
    folder.delete(table, sizes)
    return len(sizes), sum(sizes.values())
