"""The commits of a store on a local disk: durable before they are acknowledged, in the order of ``durability``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from schema.store.commits import Commit
from schema.store.durability import sync_names
from schema.store.table_log import RELIED_ON, TableLog, said_of_commit
from schema.tables import TABLES


class LocalDisk:
    """The logs of a store's tables, as files of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.logs = {table: TableLog(folder / table) for table in TABLES}

    def prepare_commit(self, table: str, commit: Commit) -> dict[str, Any]:
        """Make durable what a commit names and relies on; return what it is to say of itself.

        Raises:
            OSError: The disk refuses.

        """
        sync_names(self._folder / table, (file.path for file in commit.files))
        seen = {}
        for other in RELIED_ON:
            if other != table and (version := self.logs[other].newest()) >= 0:
                self.logs[other].sync()
                seen[other] = version
        return said_of_commit(len(commit.files) + len(commit.transactions), seen)

    def make_durable(self, table: str) -> None:
        """Make every commit of a table durable, and put them together in a checkpoint when there are many.

        Raises:
            OSError: The disk refuses.
            DeltaError: The checkpoint cannot be written.

        """
        log = self.logs[table]
        log.sync()
        if log.needs_checkpoint():
            DeltaTable(str(self._folder / table)).create_checkpoint()
            log.sync_checkpoint()
