"""A program that uses a store while listings of its logs lack a file, as can happen while other writers commit.

The program needs the library ``library.c`` preloaded. Its argument is a folder. For each use it prints the number of
listings that lacked a file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from faults.disk.failing import hide, hiding
from fixtures.stored_units import make_unit

from kvdrift.log.delta.commits import Commit, guards
from kvdrift.log.delta.folder import DeltaFolder
from kvdrift.log.delta.table_log import TableLog
from kvdrift.log.delta.versions import Snapshot
from kvdrift.log.store import Store
from kvdrift.log.units.unit import conform_unit
from kvdrift.schema import locking

LISTINGS = 3  # of a use; each of them lacks the file once


def missed(listings: int) -> int:
    """Return how many of the listings lacked the hidden name, and stop hiding it."""
    left = hiding()
    hide("", 0)
    return listings - left


def commit_amid_others(location: Path, doc: str, others: list[str], listings: int) -> int:
    """Commit a unit's file made for a version before other commits; later listings lack the second of these."""
    folder, writer = DeltaFolder(location), Store.open(location)
    _, events = conform_unit(make_unit(doc))
    file = folder.put_rows("events", events)

    def attempt(loaded: Snapshot) -> Commit | None:
        if others:
            for other in others:
                writer.append_units([make_unit(other)])
            others.clear()
            hide(f"{loaded.version + 2:020d}.json", listings)
        if file.path in loaded.paths():
            return None
        return Commit([file], guards([(file.path, 1)]))

    return folder.commit("events", attempt)


def main(folder: Path) -> None:
    """Open a store, and commit beside another writer."""
    os.fsync = lambda _: None  # no power is cut here
    locking.STUCK = 0.05  # others commit amid a commit's own turn, whose end they would wait for
    writer, docs = Store.create(folder), [f"d{number}" for number in range(6)]
    for doc in docs:
        writer.append_units([make_unit(doc)])
    hide("00000000000000000004.json", 1)
    assert TableLog(folder / "events").faults() == {}
    sys.stdout.write(f"faults {missed(1)}\n")

    hide("00000000000000000004.json", 1)
    assert Store.open(folder).version("events") == 6
    sys.stdout.write(f"open {missed(1)}\n")

    for listings in range(1, LISTINGS + 1):
        new = [f"e{listings}-{number}" for number in range(4)]
        assert commit_amid_others(folder, new[0], [*new[1:]], listings) == 1
        sys.stdout.write(f"commit {missed(listings)}\n")
        docs += new
    kept = sorted(Store.create(folder).read("units", columns=["doc"])["doc"].to_pylist())
    assert kept == sorted(docs), kept


if __name__ == "__main__":
    main(Path(sys.argv[1]))
