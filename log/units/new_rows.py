"""Read the rows added to a table since the last call, for readers of a store that grows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from log.delta.folder import DeltaFolder


class NewRows:
    """A table with units that is read again and again; a call costs only the new files."""

    def __init__(self, folder: DeltaFolder, table: str, columns: Sequence[str]) -> None:
        self._folder, self._table, self._columns = folder, table, columns
        self._paths = set[str]()  # of files that were read
        self._units = np.zeros(0, dtype=np.int64)  # whose rows were returned
        self._count = 0  # of rows that were returned

    def read(self) -> tuple[pa.Table, bool]:
        """Read the rows added since the last call.

        Returns:
            The rows in the columns asked for; and whether they are all rows of the table, so that rows returned earlier
                must be forgotten.

        Raises:
            InputError: A file is missing or damaged.

        """
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
