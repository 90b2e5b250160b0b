"""The rows of a table that came since one looked last, for whoever counts what comes to a store that grows."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from log.appends import is_compacted
from log.compaction.members import originals
from log.delta.folder import DeltaFolder
from schema.errors import InputError


class NewRows:
    """A table that is looked at again and again; a look costs what its new files hold."""

    def __init__(self, folder: DeltaFolder, table: str, columns: Sequence[str]) -> None:
        self._folder, self._table, self._columns = folder, table, columns
        self._seen = set[str]()  # paths of visible files

    def read(self) -> tuple[pa.Table, bool]:
        """Read the rows that came since the last call.

        Returns:
            Rows in the columns that were asked for; and whether they are all rows of the table, and those that were
            returned before are to be forgotten.

        Raises:
            InputError: A file is missing or damaged.

        """
        loaded = self._folder.load(self._table)
        paths = set(loaded.paths())
        new = self._unknown(paths)
        anew = new is None or not self._seen
        rows = self._folder.read(loaded, self._columns, paths=sorted(paths if new is None else new))
        self._seen = paths
        return rows, anew

    def _unknown(self, paths: set[str]) -> set[str] | None:
        """Find the files whose rows were not looked at; None where a file has some that were and some that were not."""
        new, gone = paths - self._seen, self._seen - paths
        if not gone:
            return new
        try:
            known = originals(self._folder, self._table, gone)
        except InputError:  # it was deleted
            return None
        unknown = set[str]()
        for path in new:
            held = originals(self._folder, self._table, [path]) if is_compacted(path) else {path}
            if not held & known:
                unknown.add(path)
            elif not held <= known:
                return None
            known -= held
        return None if known else unknown
