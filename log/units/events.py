"""Read the rows of some units from all files of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from log.units.numbers import keys_of, with_numbers
from log.units.unit import in_order
from schema.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from log.delta.folder import DeltaFolder
    from log.delta.snapshot import Snapshot

_AT_ONCE = 256  # files that one scan looks into: Arrow holds their footers
_NEWEST = 8  # files that are looked into first: rows that are asked for are mostly those that came last


class RowsOfUnits:
    """Reads the rows of units from a table at one version; unreadable files are passed over and named.

    Files hold documents in order, and footers say which documents each part has. Reading some documents therefore skips
    the other parts.

    Attributes:
        unreadable: The reason why a file cannot be read, by path.

    """

    def __init__(self, folder: DeltaFolder, table: Snapshot, spans: Callable[[], pa.Table]) -> None:
        """Take a table; ``spans`` reads the rows that ``with_numbers`` needs for rows of older schema versions."""
        self._folder, self._table, self._spans = folder, table, spans
        self.unreadable = dict[str, str]()

    def read(
        self, units: Collection[int], docs: Collection[str], columns: Sequence[str], count: int | None = None
    ) -> pa.Table:
        """Return the rows of some units, with page checksums verified.

        Args:
            units: Numbers of units.
            docs: The documents of these units.
            columns: Names of declared columns.
            count: The number of rows of the units, if known. The newest files are then read first, and reading stops
                once all rows are found. By default all files are read.

        Returns:
            The rows of the units in ``columns``, with names as dictionaries; rows in unreadable files are missing.

        """
        names = [*dict.fromkeys((*columns, *keys_of(self._table.table)))]
        wanted = pa.array(sorted(units), pa.int64())
        paths = [path for path in self._table.newest_paths() if path not in self.unreadable]
        size, found = _AT_ONCE if count is None else _NEWEST, [self._read([], docs, names)]
        while paths and (count is None or sum(rows.num_rows for rows in found) < count):
            rows, paths, size = self._part(paths[:size], docs, names), paths[size:], _AT_ONCE
            if rows["unit"].null_count:
                rows = with_numbers(self._table.table, rows, self._spans())
            found.append(rows.filter(pc.is_in(rows["unit"], wanted)))
        return pa.concat_tables(found).unify_dictionaries().select(columns)

    def read_each(self, units: Sequence[int], docs: Collection[str], columns: Sequence[str]) -> list[pa.Table]:
        """Read the events of some units, each sorted by replicate, a scan before its branch, and position.

        Arguments are those of ``read``.

        Returns:
            The rows of each unit, in ``columns``.

        """
        names = [*dict.fromkeys((*columns, "unit", "replicate", "kind", "t"))]
        rows = self.read(units, docs, names)
        for why in self.unreadable.values():
            raise InputError(why)
        return [in_order(rows.filter(pc.equal(rows["unit"], number))).select(columns) for number in units]

    def _part(self, paths: list[str], docs: Collection[str], names: Sequence[str]) -> pa.Table:
        try:
            return self._read(paths, docs, names)
        except InputError:
            found = [self._read([], docs, names)]
        for path in paths:
            try:
                found.append(self._read([path], docs, names))
            except InputError as error:
                self.unreadable[path] = str(error)
        return pa.concat_tables(found)

    def _read(self, paths: Sequence[str], docs: Collection[str], names: Sequence[str]) -> pa.Table:
        wanted = pa.array(sorted(docs), pa.string())
        if not len(wanted):
            return self._folder.read(self._table, names, paths=[], coded=True)
        doc = pc.field("doc")
        where = (doc >= wanted[0]) & (doc <= wanted[-1]) & doc.isin(wanted)  # bounds are held against footers
        return self._folder.read(self._table, names, where=where, paths=paths, coded=True, compared=["doc"])
