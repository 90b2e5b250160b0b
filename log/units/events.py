"""Read the rows of some units from all files of a table, or the rows added to a table since the last call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.log.units.unit import in_order
from kvdrift.schema.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvdrift.log.delta.folder import DeltaFolder
    from kvdrift.log.delta.parquet_files import StoredFile
    from kvdrift.log.delta.snapshot import Snapshot


_AT_ONCE = 256  # files that one scan looks into: Arrow holds their footers
_NEWEST = 8  # files that are looked into first: rows that are asked for are mostly those that came last


class RowsOfUnits:
    """Reads the rows of units from a table at one version; ``unreadable`` says why files were passed over.

    Files hold documents in order, and footers say which documents each part has. Reading some documents therefore skips
    the other parts.
    """

    def __init__(self, folder: DeltaFolder, table: Snapshot) -> None:
        self._folder, self._table = folder, table
        self.unreadable = dict[str, str]()

    def read(
        self, units: Collection[int], docs: Collection[str], columns: Sequence[str], count: int | None = None
    ) -> pa.Table:
        """Return the rows of some units of some documents, with page checksums verified and names as dictionaries.

        If the number of rows is known, ``count``, the newest files are read first, no more at once than can have the
        rows, and reading stops once all rows are found. Rows in unreadable files are missing.
        """
        names = [*dict.fromkeys((*columns, "unit"))]
        wanted = pa.array(sorted(units), pa.int64())
        files = [file for file in self._table.newest_files() if file.path not in self.unreadable]
        size, missing = (_AT_ONCE, math.inf) if count is None else (_NEWEST, count)
        found = [self._read([], docs, names)]
        while files and missing > 0:
            part, files, size = self._with_documents(files[:size], docs), files[size:], _AT_ONCE
            while part and missing > 0:
                number = _enough(part, missing)
                rows, part = self._part([file.path for file in part[:number]], docs, names), part[number:]
                found.append(rows.filter(pc.is_in(rows["unit"], wanted)))
                missing -= found[-1].num_rows
        return pa.concat_tables(found).unify_dictionaries().select(columns)

    def read_each(
        self, units: Sequence[int], docs: Collection[str], columns: Sequence[str], count: int
    ) -> list[pa.Table]:
        """Return the events of each unit, sorted by replicate, a scan before its branch, and position; see ``read``."""
        names = [*dict.fromkeys((*columns, "unit", "replicate", "kind", "t"))]
        rows = self.read(units, docs, names, count)
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

    def _with_documents(self, files: Sequence[StoredFile], docs: Collection[str]) -> list[StoredFile]:
        """Return the files that may have rows of some documents."""
        if not docs:
            return []
        paths = set(self._folder.files_with(self._table, "doc", sorted(docs), [file.path for file in files]))
        return [file for file in files if file.path in paths]

    def _read(self, paths: Sequence[str], docs: Collection[str], names: Sequence[str]) -> pa.Table:
        if not paths:
            return self._folder.read(self._table, names, paths=[], coded=True)
        doc, wanted = pc.field("doc"), sorted(docs)
        where = (doc >= wanted[0]) & (doc <= wanted[-1]) & doc.isin(wanted)  # bounds are held against row groups
        return self._folder.read(self._table, names, where=where, paths=paths, coded=True, compared=["doc"])


def _enough(files: Sequence[StoredFile], rows: float) -> int:
    """Return how many files, from the first on, have ``rows`` rows together; all files if a file's rows are unknown."""
    for number, file in enumerate(files, 1):
        if file.rows is None:
            break
        rows -= file.rows
        if rows <= 0:
            return number
    return len(files)


class NewRows:
    """A table with units that is read again and again; a call costs only the new files."""

    def __init__(self, folder: DeltaFolder, table: str, columns: Sequence[str]) -> None:
        self._folder, self._table, self._columns = folder, table, columns
        self._paths = set[str]()  # of files that were read
        self._units = np.zeros(0, dtype=np.int64)  # whose rows were returned
        self._count = 0  # of rows that were returned

    def read(self) -> tuple[pa.Table, bool]:
        """Return the rows added since the last call, and whether they are all rows, so that earlier rows are void."""
        loaded = self._folder.load(self._table)
        paths = set(loaded.paths())
        names = [*dict.fromkeys((*self._columns, "unit"))]
        rows = self._folder.read(loaded, names, paths=sorted(paths - self._paths))
        numbers = rows["unit"].fill_null(-1).to_numpy()
        # A file that took the place of others has their rows, too.
        rows = rows.filter(np.isin(numbers, self._units, invert=True)) if self._count else rows
        anew = not self._count
        if self._count + rows.num_rows != self._folder.count_rows(loaded):  # rows are gone, or have no unit
            rows, anew = self._folder.read(loaded, names), True
        if anew:
            self._units, self._count = np.zeros(0, dtype=np.int64), 0
        self._paths = paths
        self._units = np.union1d(self._units, pc.unique(rows["unit"].fill_null(-1)).to_numpy())
        self._count += rows.num_rows
        return rows.select(list(self._columns)), anew
