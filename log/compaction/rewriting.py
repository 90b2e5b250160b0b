"""What a store offers to those who change its files and no row of it."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from log.appends import is_compacted
from log.compaction.derived import unaligned_packs
from log.compaction.packs import UNIT_KEY, Pack, Packed, pack_events, packs_of, plan_packs, plan_tiers
from log.compaction.rows import compact_rows, gather_rows
from log.compaction.vacuum import delete_replaced
from log.delta.folder import DeltaFolder
from schema.errors import InputError


class Rewriting:
    """A store's tables as files, which may be put together, deleted once they are replaced, and taken apart again."""

    def __init__(self, folder: DeltaFolder) -> None:
        self._folder = folder

    def plan_packs(self) -> list[Pack]:
        """Find out which files of ``events`` are worth putting together, sorted by the keys of their units.

        Raises:
            InputError: Another program has rewritten the table, or it is damaged.

        """
        units = self._folder.read(self._folder.load("units"), [*UNIT_KEY, "path"])
        units = units.sort_by([(name, "ascending") for name in UNIT_KEY])
        return plan_packs(self._folder, {path: place for place, path in enumerate(units["path"].to_pylist())})

    def packs_of(self, paths: Collection[str], rows: int) -> list[Pack]:
        """Make packs of some files of ``events``, of so many rows at most.

        Raises:
            InputError: The table is damaged.

        """
        return packs_of(self._folder, paths, rows)

    def plan_tiers(self, most: int, rows: int) -> list[Pack]:
        """Find out which files of ``events``, of one size and derived, are more than ``most``; packs have ``rows``.

        Raises:
            InputError: Another program has rewritten the table, or it is damaged.

        """
        return plan_tiers(self._folder, most, rows)

    def pack_events(self, pack: Pack) -> Packed:
        """Put the files of a pack together by one commit; see ``log.compaction.packs``.

        Raises:
            InputError: The store cannot be written.

        """
        return pack_events(self._folder, pack)

    def unaligned_packs(self) -> dict[str, tuple[str, ...]]:
        """Find the compacted files of ``events`` that derived tables do not have under the same path.

        Returns:
            These tables, by the file's path, sorted.

        """
        return unaligned_packs(self._folder)

    def compact_rows(self, table: str) -> bool:
        """Put the small files of a table together that is not derived from events; tell whether it had several.

        Raises:
            InputError: A file is damaged, or the store cannot be written.

        """
        return compact_rows(self._folder, table)

    def gather_rows(self, table: str, most: int, rows: int) -> bool:
        """Put the files of such a table together of which there are more than ``most`` of one size; tell of any.

        Those of half of ``rows`` and more are left as they are.

        Raises:
            InputError: A file is damaged, or the store cannot be written.

        """
        return gather_rows(self._folder, table, most, rows)

    def delete_replaced(self, table: str, before: datetime) -> tuple[int, int]:
        """Delete the files of a table that compactions replaced before a time; return how many, and bytes.

        Raises:
            InputError: The files cannot be deleted.
            OperationError: The store cannot be written.

        """
        return delete_replaced(self._folder, table, before)

    def withdraw_pack(self, path: str) -> None:
        """Take a compacted file of ``events`` out of view, whose units are to be adopted again one by one.

        Raises:
            InputError: It is none.

        """
        if not is_compacted(path):
            raise InputError(f"events/{path} is no compacted file: its rows cannot be made again")
        self._folder.remove("events", {path})
