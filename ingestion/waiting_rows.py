"""The folder ``pieces`` of a store: rows of replicates that lack positions, and the files that were taken.

For each file that brought such rows the folder has one Parquet file, named by the SHA-256 of the content of the file
that brought them. The folder thus also tells which files were taken, under whatever name: a file none of whose rows
wait leaves an empty file there. A file with findings is not remembered, so that each ingestion reports its findings
again. Rows that contradict others are set aside in the folder ``aside``, and are never read again.
"""

from __future__ import annotations

import fcntl
import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvdrift.ingestion.event_rows import VALUES, EventRows, converted
from kvdrift.log.delta.durability import make_folder, replace_durably
from kvdrift.schema.errors import DamagedStoreError, InputError, first_line
from kvdrift.schema.location import is_local
from kvdrift.schema.tables import EVENTS, GROUP_KEY, PAIR_COLUMNS

_SCHEMA = pa.schema([EVENTS.schema.field(name) for name in PAIR_COLUMNS])

Group = tuple[str, str, str, str]  # study, model, doc, action
Replicate = tuple[Group, int]


@contextmanager
def alone(location: str) -> Iterator[None]:
    """Lock the folder of a store against other ingestions of pieces; the lock ends with the process."""
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


class WaitingRows:
    """The waiting rows of a store on a local disk, for one ingestion at a time."""

    def __init__(self, location: str) -> None:
        """Read which replicates wait, and which files hold their rows."""
        self._folder = Path(location, "pieces")
        self._held = {
            path.stem: _replicates_of(_read(path, [*GROUP_KEY, "replicate"])) for path in self._folder.glob("*.parquet")
        }

    @property
    def replicates(self) -> set[Replicate]:
        """The replicates that lack positions."""
        return set().union(*self._held.values())

    def has_taken(self, digest: str) -> bool:
        """Tell whether a file with this digest was taken before without a finding."""
        return digest in self._held

    def of_groups(self, groups: Collection[Group]) -> Iterator[tuple[str, pa.Table]]:
        """Yield the name of each file that holds rows of some groups, and its rows of their documents."""
        docs = pa.array(sorted({group[2] for group in groups}), pa.string())
        for name, held in sorted(self._held.items()):
            if any(group in groups for group, _ in held):
                yield name, _read(self._path(name), PAIR_COLUMNS, where=pc.field("doc").isin(docs))

    @contextmanager
    def taking(self, name: str) -> Iterator[Taking]:
        """Keep the rows that a file brings, named by its digest: all of them, or none if an error is raised."""
        taking = Taking(self._folder, name)
        try:
            yield taking
            if taking.finish():
                self._held[taking.name] = taking.held
        finally:
            taking.close()

    def set_aside(self, name: str, rows: pa.Table) -> Path:
        """Set rows of a file of waiting rows aside, and return the path of the file that keeps them."""
        with self.taking(_free(self._folder / "aside", name)) as taking:
            taking.settled = False
            return taking.set_aside(rows)

    def forget(self, replicates: Collection[Replicate]) -> None:
        """Forget the rows of some replicates; empty the files none of whose rows wait."""
        for name in [name for name, held in self._held.items() if not held.isdisjoint(replicates)]:
            self._held[name] -= set(replicates)
            if self._held[name]:
                continue
            if name.isalnum():
                with self.taking(name):
                    pass
            else:  # its file had findings and is not remembered
                del self._held[name]
                self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.parquet"


class Taking:
    """Writes the rows that a file brings: those that wait, and those that are set aside.

    The waiting rows of the replicates ``held`` are kept under ``name``. A file without a finding is ``settled``, and is
    remembered.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        self._folder, self._aside, self.name = folder, folder / "aside", digest
        self._part = f".{digest}.part"
        self.held = set[Replicate]()
        self.settled = True
        self._writers: dict[Path, pq.ParquetWriter] = {}

    def wait(self, rows: pa.Table) -> None:
        """Add rows of replicates that lack positions."""
        self._write(self._folder, rows)
        self.held |= _replicates_of(rows)

    def set_aside(self, rows: pa.Table) -> Path:
        """Add rows that contradict others, and return the path of the file that keeps them."""
        self._write(self._aside, rows)
        return self._aside / f"{self.name}.parquet"

    def finish(self) -> bool:
        """Move the written files into place, and tell whether one of them has waiting rows or is to be remembered."""
        if self.settled and self._folder not in self._writers:
            self._write(self._folder, _SCHEMA.empty_table())
        for writer in self._writers.values():
            writer.close()
        if self._aside in self._writers:
            replace_durably(self._aside / self._part, self._aside / f"{self.name}.parquet")
        if self._folder not in self._writers:
            return False
        if not self.settled:
            self.name = _free(self._folder, self.name)
        replace_durably(self._folder / self._part, self._folder / f"{self.name}.parquet")
        return True

    def close(self) -> None:
        """Remove what is not in its place."""
        for folder, writer in self._writers.items():
            writer.close()
            (folder / self._part).unlink(missing_ok=True)

    def _write(self, folder: Path, rows: pa.Table) -> None:
        if folder not in self._writers:
            make_folder(folder)
            path = folder / self._part
            self._writers[folder] = pq.ParquetWriter(path, _SCHEMA, compression="zstd", write_page_checksum=True)
        self._writers[folder].write_table(rows)


def _free(folder: Path, name: str) -> str:
    """Return the first of the names "name-0", "name-1", … that no file of a folder has."""
    names = (f"{name}-{number}" for number in itertools.count())
    return next(name for name in names if not (folder / f"{name}.parquet").exists())


def _read(path: Path, columns: Sequence[str], where: pc.Expression | None = None) -> pa.Table:
    try:
        return pq.read_table(path, columns=list(columns), filters=where, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        moved = f"move it away, and ingest again the file whose SHA-256 begins with {path.stem[:12]}"
        raise DamagedStoreError(f"{path}: cannot be read ({first_line(error)}): {moved}") from None


def _replicates_of(rows: pa.Table) -> set[Replicate]:
    keys = rows.group_by([*GROUP_KEY, "replicate"]).aggregate([])
    return {((study, model, doc, action), replicate) for study, model, doc, action, replicate in _rows(keys)}


def _rows(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table as tuples."""
    return zip(*(column.to_pylist() for column in table.columns), strict=True)


def rows_of(table: pa.Table, names: Sequence[Group]) -> EventRows:
    """Return the rows of some groups, numbered by their place in ``names``, from a table of waiting rows."""
    places: dict[tuple[Any, ...], int] = {name: place for place, name in enumerate(names)}
    group = np.fromiter((places.get(name, -1) for name in _rows(table.select(GROUP_KEY))), np.int32, table.num_rows)
    return converted(table, group).take(group >= 0)


def table_of(rows: EventRows, names: Sequence[Group]) -> pa.Table:
    """Return rows as a table of waiting rows; ``names`` gives the names of each group number."""
    columns = [
        pa.DictionaryArray.from_arrays(pa.array(rows.group), pa.array([group[place] for group in names], pa.string()))
        for place in range(len(GROUP_KEY))
    ]
    return pa.Table.from_arrays(
        [*columns, *(pa.array(getattr(rows, name)) for name in VALUES)], names=[*GROUP_KEY, *VALUES]
    ).cast(_SCHEMA)
