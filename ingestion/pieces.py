"""Put replicates together whose rows are spread over several files, in any order, with repeated rows.

A piece is the rows that one file holds of one replicate, at any of its positions 1..H. A row that repeats an earlier
row, with equal key and values, is counted once. If a row contradicts an earlier row, or two rows of a file contradict
each other, this file's rows of the replicate are set aside, and the earlier rows stay.

A replicate is whole when it has all positions 1..H. A whole replicate goes into ``events``. The rows of other
replicates wait in the store's folder ``pieces``. For each file that brought such rows the folder has one file, named by
the digest of the content of the file that brought them.

The folder thus also tells which files were taken, under whatever name. A file none of whose rows wait leaves an empty
file there. A file with findings is not remembered, so that each ingestion reports its findings again. Rows go into
``events`` first, and the file is remembered afterwards. If the process is killed in between, the next ingestion takes
the file again and finds that its rows are stored.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ingestion.event_rows import VALUES, EventRows
from log.delta.durability import make_folder, replace_durably
from schema.errors import DamagedStoreError, InputError, first_line
from schema.location import is_local
from schema.rows import Flags, Ints, repeats, run_begins
from schema.tables import EVENTS, GROUP_KEY, PAIR_COLUMNS

STORED, WAITING, NEW = 0, 1, 2
"""The origin of a row: table ``events``, the rows that wait, or the file that is being taken."""

SCHEMA = pa.schema([EVENTS.schema.field(name) for name in PAIR_COLUMNS])
_READ_BYTES = 1 << 20

Group = tuple[str, str, str, str]  # study, model, doc, action


@dataclass(frozen=True)
class Merged:
    """The rows of a file and earlier rows of the same replicates, divided by what happens to them."""

    whole: EventRows  # all rows of the replicates that have become whole, in key order
    waiting: EventRows  # the file's new rows of replicates that still lack positions
    conflicting: EventRows  # the file's rows that are set aside
    conflict: Flags  # [rows of ``conflicting``] whether the row contradicts another row
    collapsed: int  # the number of the file's rows that repeat an earlier row


def merge(rows: EventRows, origin: Ints, horizon: Ints) -> Merged:
    """Merge a file's rows of some replicates with all earlier rows of these replicates.

    All positions are in 1..H, with ``horizon`` H of each group; ``origin`` is ``STORED``, ``WAITING`` or ``NEW``.
    """
    order = np.lexsort((origin, rows.t, rows.replicate, rows.group))
    rows, origin = rows.take(order), origin[order]
    values = [field.name for field in fields(EventRows) if field.name not in {"group", "replicate", "t", "flaws"}]
    again, differs = repeats([rows.group, rows.replicate, rows.t], [getattr(rows, name) for name in values])
    pair_begins = run_begins(rows.group, rows.replicate)
    pair = np.cumsum(pair_begins) - 1
    new = origin == NEW
    apart = np.bincount(pair, weights=differs)[pair] > 0
    aside = apart & new
    kept = ~again & ~aside
    complete = np.bincount(pair, weights=kept)[pair] == horizon[rows.group]
    stored = np.bincount(pair, weights=origin == STORED)[pair] > 0
    return Merged(
        whole=rows.take(kept & complete & ~stored),
        waiting=rows.take(kept & ~complete & new),
        conflicting=rows.take(aside),
        conflict=differs[aside],
        collapsed=int(np.sum(new & ~aside & again)),
    )


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    found = hashlib.sha256()
    try:
        with path.open("rb") as source:
            while data := source.read(_READ_BYTES):
                found.update(data)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or first_line(error)})") from None
    return found.hexdigest()


@contextmanager
def alone(location: str) -> Iterator[None]:
    """Lock a store against other ingestions of pieces; the lock ends with the process."""
    if not is_local(location):
        raise InputError(f"{location}: pieces of replicates need a store on a local disk; ingest whole replicates")
    make_folder(Path(location, "pieces"))
    with Path(location, "pieces", ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"{location}: another 'kvdrift ingest' puts pieces together here; end it, or wait for it"
            ) from None
        yield


class Pieces:
    """The folder ``pieces`` of a store on a local disk, for one ingestion at a time."""

    def __init__(self, location: str) -> None:
        """Read which replicates wait, and which files hold their rows."""
        self._folder = Path(location, "pieces")
        self._taken = {path.stem for path in self._folder.glob("*.parquet")}
        self._waiting: dict[str, set[tuple[Group, int]]] = {}  # replicates with rows in a file, by its digest
        for digest in sorted(self._taken):
            if held := _replicates_of(self._read(digest, [*GROUP_KEY, "replicate"])):
                self._waiting[digest] = held

    @property
    def replicates(self) -> set[tuple[Group, int]]:
        """The replicates that wait for more positions."""
        return set().union(*self._waiting.values())

    def has_taken(self, digest: str) -> bool:
        """Tell whether a file with this digest was taken before without a finding."""
        return digest in self._taken

    def of_groups(self, groups: Sequence[Group]) -> Iterator[pa.Table]:
        """Yield the waiting rows of some groups, one table for each file of the folder."""
        wanted = set(groups)
        docs = pa.array(sorted({group[2] for group in groups}), pa.string())
        for digest, held in sorted(self._waiting.items()):
            if any(group in wanted for group, _ in held):
                yield self._read(digest, list(PAIR_COLUMNS), where=pc.field("doc").isin(docs))

    @contextmanager
    def taking(self, digest: str) -> Iterator[Taking]:
        """Take the file with this digest: the folder keeps all its waiting rows, or none if an error is raised."""
        with Taking(self._folder, digest) as taking:
            yield taking
            for name in taking.finish():
                self._taken.add(name)
            if taking.held:
                self._waiting[taking.name] = taking.held

    def done(self, replicates: Iterable[tuple[Group, int]]) -> None:
        """Forget the waiting rows of replicates that ``events`` has now; empty the files none of whose rows wait."""
        whole = set(replicates)
        for name in [name for name, held in self._waiting.items() if held & whole]:
            self._waiting[name] -= whole
            if self._waiting[name]:
                continue
            del self._waiting[name]
            if name.isalnum():
                with Taking(self._folder, name) as emptied:
                    emptied.finish()
            else:  # its file had findings and is not remembered
                (self._folder / f"{name}.parquet").unlink()

    def _read(self, digest: str, columns: list[str], where: pc.Expression | None = None) -> pa.Table:
        path = self._folder / f"{digest}.parquet"
        try:
            return pq.read_table(path, columns=columns, filters=where, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            moved = f"move it away, and ingest again the file whose SHA-256 begins with {digest[:12]}"
            raise DamagedStoreError(f"{path}: cannot be read ({first_line(error)}): {moved}") from None


class Taking:
    """A file while it is taken: writes its waiting rows, and its rows that are set aside, into the folder.

    The waiting rows are kept under ``name``, with the replicates ``held``. A file without a finding is ``settled``, so
    that it is remembered.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        self._folder, self._digest = folder, digest
        self.name = digest
        self.held = set[tuple[Group, int]]()
        self.settled = True
        self._parts = ExitStack()
        self._waiting: pq.ParquetWriter | None = None
        self._aside: pq.ParquetWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()
        for path in self._folder.rglob(f".{self._digest}.part"):
            path.unlink()

    def wait(self, rows: pa.Table) -> None:
        """Add rows of replicates that lack positions."""
        if self._waiting is None:
            self._waiting = self._open(self._folder)
        self._waiting.write_table(rows)
        self.held |= _replicates_of(rows)

    def set_aside(self, rows: pa.Table) -> Path:
        """Add rows of replicates with a contradiction, and return the path of the file that keeps the rows."""
        folder = self._folder / "aside"
        if self._aside is None:
            make_folder(folder)
            self._aside = self._open(folder)
        self._aside.write_table(rows)
        return folder / f"{self._digest}.parquet"

    def finish(self) -> list[str]:
        """Move the written files into place, and return the names of the folder's new files of waiting rows.

        If the file is not settled, its waiting rows get another name than its digest.
        """
        if not self.settled:
            number = next(n for n in itertools.count() if not (self._folder / f"{self._digest}-{n}.parquet").exists())
            self.name = f"{self._digest}-{number}"
        if self._waiting is None and self.settled:
            self._waiting = self._open(self._folder)  # an empty file says that the content was taken
        waiting, aside = self._waiting is not None, self._aside is not None
        self._parts.close()
        part = f".{self._digest}.part"
        if aside:
            replace_durably(self._folder / "aside" / part, self._folder / "aside" / f"{self._digest}.parquet")
        if waiting:
            replace_durably(self._folder / part, self._folder / f"{self.name}.parquet")
        return [self.name] if waiting else []

    def _open(self, folder: Path) -> pq.ParquetWriter:
        path = folder / f".{self._digest}.part"
        return self._parts.enter_context(pq.ParquetWriter(path, SCHEMA, compression="zstd", write_page_checksum=True))


def _replicates_of(rows: pa.Table) -> set[tuple[Group, int]]:
    keys = rows.group_by([*GROUP_KEY, "replicate"]).aggregate([])
    names = (keys[name].to_pylist() for name in (*GROUP_KEY, "replicate"))
    return {
        ((study, model, doc, action), replicate) for study, model, doc, action, replicate in zip(*names, strict=True)
    }


def rows_of(table: pa.Table, places: dict[Group, int]) -> EventRows:
    """Return the rows of some groups from a table of waiting rows; ``places`` gives the number of each group."""
    names = zip(*(table[name].to_pylist() for name in GROUP_KEY), strict=True)
    group = np.fromiter((places.get(key, -1) for key in names), np.int32, table.num_rows)
    values = {name: table[name].to_numpy() for name in VALUES}
    return EventRows(group, flaws=np.zeros(table.num_rows, np.uint16), **values).take(group >= 0)


def table_of(rows: EventRows, names: Sequence[Group]) -> pa.Table:
    """Return rows as a table of waiting rows; ``names`` gives the names of each group number."""
    columns = [
        pa.DictionaryArray.from_arrays(pa.array(rows.group), pa.array([group[place] for group in names], pa.string()))
        for place in range(len(GROUP_KEY))
    ]
    return pa.Table.from_arrays(
        [*columns, *(pa.array(getattr(rows, name)) for name in VALUES)], names=[*GROUP_KEY, *VALUES]
    ).cast(SCHEMA)
