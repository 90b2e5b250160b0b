"""Which units other writers have appended since this one has read all rows of ``units``.

Commits of units carry an application id for each (study, model, doc, action, revision, estimator) that they extend. So
the log files that came since tell a writer whether any of these is one of its own, and it need not read the rows: with
a thousand writers, rows of others come by the thousand between two commits of one.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, NamedTuple

from log.delta.durability import side_by_side

if TYPE_CHECKING:
    from collections.abc import Collection

    from log.delta.folder import DeltaFolder
    from log.delta.snapshot import Snapshot


class Base(NamedTuple):
    """What was read in full: rows of ``units``, and events that are as old or newer."""

    units: Snapshot
    events: Snapshot


class Touched:
    """The application ids of commits since a base; safe for threads."""

    def __init__(self, folder: DeltaFolder) -> None:
        self._folder = folder
        self._base: Base | None = None
        self._seen: dict[str, int] = {}  # version by table
        self._ids = set[str]()
        self._at_work = threading.Lock()

    def begin(self, base: Base) -> None:
        """Remember what was read in full, and follow later commits from there."""
        with self._at_work:
            self._base, self._ids = base, set()
            self._seen = {snapshot.table: snapshot.version for snapshot in base}

    def base_of(self, groups: Collection[str], now: Collection[Snapshot]) -> Base | None:
        """Return the base if it has all that later versions have of some groups; if not, there is no base any more."""
        with self._at_work:
            if self._base is not None and not (all(map(self._follow, now)) and self._ids.isdisjoint(groups)):
                self._base = None
            return self._base

    def _follow(self, now: Snapshot) -> bool:
        """Look at the commits of a table up to a version; tell whether all of them only appended units."""
        since = self._seen[now.table]
        found = side_by_side(lambda version: self._ids_of(now.table, version), range(since + 1, now.version + 1))
        self._seen[now.table] = max(now.version, since)
        self._ids.update(*(ids for ids in found if ids is not None))
        return None not in found

    def _ids_of(self, table: str, version: int) -> set[str] | None:
        """Return a commit's application ids; None if it does anything but append units, or its file is gone."""
        lines = self._folder.log_lines(table, version)
        if not lines or any(line.startswith((b'{"remove"', b'{"metaData"')) for line in lines):
            return None
        ids = {json.loads(line)["txn"]["appId"] for line in lines if line.startswith(b'{"txn"')}
        return ids or None
