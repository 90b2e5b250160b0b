"""What is visible in one table at one version, and which columns its files have."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.schema import Field as DeltaField

from schema.store.parquet_files import StoredFile
from schema.tables import TABLES

# Application ids of a commit that rewrites files: its own version, and the one whose rows it has.
_REWRITTEN, _REWRITTEN_FROM = "kvdrift.rewritten", "kvdrift.rewritten-from"

ADDED_AFTER = "kvdrift.added_after"  # metadata of a column that an upgrade added: the last table version without it


class Snapshot:
    """One table at one version: what is visible there.

    A table that the store is too old to have is empty, at the version 0 at which it will be made.
    """

    def __init__(self, table: str, loaded: DeltaTable | None) -> None:
        self.table = table
        self.version = 0 if loaded is None else int(loaded.version())
        self._delta = loaded

    @property
    def id(self) -> str | None:
        """What the table was given when it was made, which tells it from all others; None of one that is not there."""
        return None if self._delta is None else str(self._delta.metadata().id)

    @property
    def data_version(self) -> int:
        """The version that had these rows first: this one, unless nothing but files was rewritten since."""
        if self.transaction_version(_REWRITTEN) != self.version:
            return self.version
        return self.transaction_version(_REWRITTEN_FROM) or 0

    def marks_of_rewriting(self) -> dict[str, int]:
        """Return the application transactions of a commit right after this version that rewrites files and no row."""
        return {_REWRITTEN: self.version + 1, _REWRITTEN_FROM: self.data_version}

    def paths(self) -> list[str]:
        """Return the relative paths of the visible files, sorted."""
        return sorted(self._added("path"))

    def files(self) -> list[StoredFile]:
        """Return the visible files with the sizes and rows that the log has, sorted by path."""
        added = zip(*(self._added(name) for name in ("path", "size_bytes", "num_records")), strict=True)
        return sorted((StoredFile(*values) for values in added), key=lambda file: file.path)

    def count_rows(self) -> int:
        """Count the visible rows; reads the log alone."""
        return sum(self._added("num_records"))

    def transaction_version(self, app_id: str) -> int | None:
        """Return the version of an application's last transaction; None before the first."""
        found = None if self._delta is None else self._delta.transaction_version(app_id)
        return None if found is None else int(found)

    @property
    def delta(self) -> DeltaTable:
        """The table in delta-rs.

        Raises:
            LookupError: The store is too old to have the table.

        """
        if self._delta is None:
            raise LookupError(self.table)
        return self._delta

    def last_versions_without(self) -> dict[str, int]:
        """Return the columns that some visible files lack, with the last version up to this one without each."""
        if self._delta is None:
            return {}
        stored = {field.name: field.metadata for field in self._delta.schema().fields}
        last = {
            name: int(stored[name].get(ADDED_AFTER, -1)) if name in stored else self.version
            for name in TABLES[self.table].columns
        }
        return {name: version for name, version in last.items() if version >= 0}

    def _added(self, name: str) -> list[Any]:
        values: list[Any] = [] if self._files is None else self._files.column(name).to_pylist()
        return values

    @functools.cached_property
    def _files(self) -> pa.Table | None:
        if self._delta is None:
            return None
        return pa.table(self._delta.get_add_actions()).select(["path", "size_bytes", "num_records"])


def lacking_columns(table: str, loaded: DeltaTable) -> list[str]:
    """List the declared columns that a table does not have."""
    stored = {field.name for field in loaded.schema().fields}
    return [name for name in TABLES[table].columns if name not in stored]


def added_columns(table: str, loaded: DeltaTable, names: Sequence[str]) -> list[DeltaField]:
    """Declare the columns that an upgrade adds; they are nullable, since older files have no values for them."""
    added = {ADDED_AFTER: str(loaded.version())}
    fields = [TABLES[table].schema.field(name) for name in names]
    nullable = [field.with_nullable(nullable=True).with_metadata({**field.metadata, **added}) for field in fields]
    return Schema.from_arrow(pa.schema(nullable)).fields
