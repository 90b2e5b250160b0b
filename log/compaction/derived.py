"""Which files of events lack rows in the tables that are derived from them.

A derived file has the path of its events file. Where one of the two was compacted and the other not yet, or is looked
at as it was before, their files are other ones of the same units; then the units in the files are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from log.appends import DERIVED, derived_tables, estimator_of, is_compacted, is_foreign
from log.commits import Commit, transactions
from log.compaction.members import originals
from log.delta.folder import DeltaFolder
from log.delta.snapshot import Snapshot
from log.parquet_files import StoredFile
from schema.errors import InputError

_DERIVED = tuple(table for tables in DERIVED.values() for table in tables)
_GUARD = "kvdrift.derived"  # the application id that all commits of a derived table share


def lacking_tables(
    folder: DeltaFolder, events: Snapshot, derived_versions: Mapping[str, int]
) -> dict[str, tuple[str, ...]]:
    """Find the files of events that are not derived.

    Args:
        folder: The store's tables.
        events: The version of ``events`` that is looked at.
        derived_versions: Versions of derived tables; of those that are not named, the latest.

    Returns:
        The tables that a file's rows are not in, by the file's path, sorted.

    Raises:
        InputError: One of the tables was rewritten by another program; its files do not tell what they were made from.
        DamagedStoreError: A table is derived from events that are not there.

    """
    paths = own_paths(folder, events)
    by_estimator = {estimator: {path for path in paths if estimator_of(path) == estimator} for estimator in DERIVED}
    found: dict[str, tuple[str, ...]] = {}
    for estimator, tables in DERIVED.items():
        for table in tables:
            derived = folder.load(table, derived_versions.get(table))
            for path in _lacking(folder, table, by_estimator[estimator], set(own_paths(folder, derived))):
                found[path] = (*found.get(path, ()), table)
    return dict(sorted(found.items()))


def check_derived(folder: DeltaFolder, events: Snapshot, derived_versions: Mapping[str, int]) -> None:
    """Check that every derived file is of events that are there; arguments are those of ``lacking_tables``.

    Raises:
        DamagedStoreError: Some are of events that are lost.

    """
    wanted = {path for path in events.paths() if not is_foreign(path)}
    for table in _DERIVED:
        derived = folder.load(table, derived_versions.get(table)).paths()
        _lacking(folder, table, wanted, {path for path in derived if not is_foreign(path)})


def unaligned_packs(folder: DeltaFolder) -> dict[str, tuple[str, ...]]:
    """Find the compacted files of events that derived tables have in other files, or do not have.

    Returns:
        These tables, by the path of the events file, sorted.

    """
    visible = {table: set(folder.load(table).paths()) for table in _DERIVED}
    packs = sorted(filter(is_compacted, folder.load("events").paths()))
    lacking = {path: tuple(table for table in derived_tables(path) if path not in visible[table]) for path in packs}
    return {path: tables for path, tables in lacking.items() if tables}


def own_paths(folder: DeltaFolder, loaded: Snapshot) -> list[str]:
    """Return the visible files of ``events`` or a derived table, none of which another program has rewritten.

    Raises:
        InputError: One of them is not ours.

    """
    paths = loaded.paths()
    if foreign := next(filter(is_foreign, paths), None):
        what = f"table '{loaded.table}' was compacted by another program ({foreign})"
        raise InputError(f"{folder.location}: {what}: derive into a new store, and use kvdrift compact")
    return paths


def _lacking(folder: DeltaFolder, table: str, wanted: set[str], derived: set[str]) -> set[str]:
    lacking, ahead = wanted - derived, derived - wanted
    if not ahead:
        return lacking
    there, looked_for = originals(folder, table, ahead), originals(folder, table, lacking)
    if lost := there - looked_for:  # these events may have come since the version that is looked at
        latest = set(folder.load("events").paths()) - wanted
        lost -= latest
        if lost:
            lost -= originals(folder, table, filter(is_compacted, latest))
        if lost:
            more = f" and {len(lost) - 1} more files" if len(lost) > 1 else ""
            raise folder.damaged(f"'{table}' has rows of {min(lost)}{more}, which 'events' has lost")
    return {path for path in lacking if not originals(folder, table, [path]) <= there}


def commit_derived(folder: DeltaFolder, table: str, files: Iterable[StoredFile], marks: Mapping[str, int]) -> int:
    """Make derived files visible by one commit, in place of those that have some of their rows.

    Left out are files that are visible, and those of units that are in a compacted file of events by now.

    Args:
        folder: The store's tables.
        table: The derived table.
        files: Files in place, by the paths of their events files.
        marks: Events version by application id, which the commit carries unless an earlier one has a later version.

    Returns:
        The number of files that were not visible before.

    """
    given = {file.path: file for file in files}

    def attempt(loaded: Snapshot) -> Commit | None:
        visible = set(loaded.paths())
        new = [file for path, file in given.items() if path not in visible]
        replaced, marks_of_files = set[str](), dict[str, int]()
        if any(map(is_compacted, (*visible, *given))):
            events = set(folder.load("events").paths())
            new = [file for file in new if file.path in events]
            own = originals(folder, table, (file.path for file in new if is_compacted(file.path)))
            packs = {path: originals(folder, table, [path]) for path in visible - events if is_compacted(path)}
            replaced = (own & visible) | {path for path, held in packs.items() if held <= own}
            if originals(folder, table, (file.path for file in new)) == originals(folder, table, replaced):
                marks_of_files = loaded.marks_of_rewriting()
        if not new:
            return None
        covered = {app: max(version, loaded.transaction_version(app) or 0) for app, version in marks.items()}
        ids = {**covered, **marks_of_files, _GUARD: 0}
        return Commit(new, transactions(ids.items()), sorted(replaced))

    return folder.commit(table, attempt, alone=True)
