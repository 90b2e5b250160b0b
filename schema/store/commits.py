"""One commit: the files that it makes visible, and the transactions that guard it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deltalake import Transaction
from deltalake.transaction import AddAction

from schema.store.parquet_files import StoredFile


@dataclass(frozen=True)
class Commit:
    """What one commit makes visible, and the application transactions that guard it."""

    files: Sequence[StoredFile]
    transactions: list[Transaction]


def transactions(versions: Iterable[tuple[str, int]]) -> list[Transaction]:
    """Make application transactions of (application id, version) pairs; of pairs with equal ids the last one counts."""
    return [Transaction(app_id, version) for app_id, version in dict(versions).items()]


def added_file(file: StoredFile) -> AddAction:
    """Make the action that makes a file visible."""
    now = int(time.time() * 1000)
    return AddAction(file.path, file.size, {}, now, data_change=True, stats=json.dumps({"numRecords": file.rows}))
