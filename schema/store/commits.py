"""One commit: the files that it makes visible, and the transactions that guard it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deltalake import Transaction
from deltalake.transaction import AddAction, RemoveAction

from schema.store.parquet_files import StoredFile

_LONG_AGO = 1  # milliseconds since 1970


@dataclass(frozen=True)
class Commit:
    """What one commit makes visible, what of the same rows it takes out of view, and what guards it.

    Attributes:
        transactions: Application transactions; a commit that was made since, with one of their ids, refuses this one.
        replaced: Paths of files whose rows are in ``files`` too; only the files change, and no data.

    """

    files: Sequence[StoredFile]
    transactions: list[Transaction]
    replaced: Sequence[str] = ()

    def actions(self) -> list[AddAction | RemoveAction]:
        """Return the changes of files as Delta has them."""
        now = int(time.time() * 1000)
        return [
            *(
                AddAction(
                    file.path, file.size, {}, now,
                    data_change=not self.replaced,
                    stats=json.dumps({"numRecords": file.rows}),
                )
                for file in self.files
            ),
            *map(removed_file, self.replaced),
        ]  # fmt: skip


def removed_file(path: str) -> RemoveAction:
    """Make the action that takes a file out of view.

    It is dated back, so that no checkpoint keeps it: every opening would read it for a week. The tables are
    append-only, which allows no other removal than one that says that no data changes.
    """
    return RemoveAction(path, data_change=False, deletion_timestamp=_LONG_AGO)


def transactions(versions: Iterable[tuple[str, int]]) -> list[Transaction]:
    """Make application transactions of (application id, version) pairs; of pairs with equal ids the last one counts."""
    return [Transaction(app_id, version) for app_id, version in dict(versions).items()]


def guards(versions: Iterable[tuple[str, int]]) -> list[Transaction]:
    """Make application transactions that refuse a commit at the same time, and that the next checkpoint forgets."""
    return [Transaction(app_id, version, last_updated=_LONG_AGO) for app_id, version in dict(versions).items()]
