"""Commit derived rows, each unit once, and hide derived rows again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.log.delta.commits import Commit, transactions
from kvdrift.schema.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kvdrift.log.delta.folder import DeltaFolder
    from kvdrift.log.delta.parquet_files import StoredFile
    from kvdrift.log.delta.snapshot import Snapshot
    from kvdrift.log.units.rows import UnitRows

_GUARD = "kvdrift.derived"  # the application id that all commits of a derived table share


@dataclass(frozen=True)
class DerivedFile:
    """A file of derived rows that is written, but not committed.

    It has all rows of the units with these numbers.
    """

    file: StoredFile
    units: tuple[int, ...]


def commit_derived(
    folder: DeltaFolder, rows: UnitRows, table: str, files: Sequence[DerivedFile], marks: Mapping[str, int]
) -> int:
    """Make derived rows visible by one commit, without those of units that the table has; return how many are new.

    ``marks`` are events versions by application id; the commit records each unless an earlier commit has a later
    version.
    """
    new = 0

    def attempt(loaded: Snapshot) -> Commit | None:
        nonlocal new
        given = {number for one in files for number in one.units}
        there = rows.there(loaded, given)
        new = len(given) - len(there)
        if not new:
            return None
        left = [_without(folder, table, one, there) for one in files if not there.issuperset(one.units)]
        covered = {app: max(version, loaded.transaction_version(app) or 0) for app, version in marks.items()}
        return Commit(left, transactions({**covered, _GUARD: 0}.items()))

    folder.commit(table, attempt, alone=True)
    return new


def _without(folder: DeltaFolder, table: str, derived: DerivedFile, there: Collection[int]) -> StoredFile:
    """Return the file without the rows of units that another derivation has committed meanwhile."""
    units = set(there) & set(derived.units)
    return _rewritten(folder, table, folder.read_file(table, derived.file.path), units) if units else derived.file


def withdraw_units(folder: DeltaFolder, rows: UnitRows, table: str, numbers: Collection[int]) -> int:
    """Hide the rows of some units, -1 meaning rows without a unit; return how many files had such rows."""
    replaced: list[str] = []

    def attempt(loaded: Snapshot) -> Commit | None:
        replaced[:] = rows.files_with(loaded, numbers)
        columns = TABLES[table].columns
        kept = [_rewritten(folder, table, folder.read(loaded, columns, paths=[path]), numbers) for path in replaced]
        return Commit([file for file in kept if file.rows], [], replaced) if replaced else None

    folder.commit(table, attempt, alone=True)
    return len(replaced)


def _rewritten(folder: DeltaFolder, table: str, rows: pa.Table, numbers: Collection[int]) -> StoredFile:
    gone = pc.is_in(rows["unit"].fill_null(-1), pa.array(sorted(numbers), pa.int64()))
    return folder.put_rows(table, rows.filter(pc.invert(gone)))
