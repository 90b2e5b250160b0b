"""Find a store's studies, its replicates that wait for positions, and its files and bytes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq

from kvdrift.log.store import Store
from kvdrift.schema.errors import DamagedStoreError, InputError, first_line, nearest
from kvdrift.schema.location import filesystem_of, is_local
from kvdrift.schema.tables import EVENTS, GROUP_KEY, PLAIN, TABLES


def stored_studies(store: Store, study: str | None = None) -> list[tuple[str, str]]:
    """Return the (study, model) pairs of a store's documents, of all studies or of one.

    Raises:
        InputError: There are no documents, or none of the study.
    """
    rows = store.read("documents", columns=["study", "model"]).to_pylist()
    there = sorted({(row["study"], row["model"]) for row in rows})
    if not there:
        raise InputError(f"{store.location}: the store holds no study yet")
    chosen = [pair for pair in there if study in {None, pair[0]}]
    if not chosen:
        raise InputError(f"no study '{study}' in {store.location}; {nearest(str(study), {name for name, _ in there})}")
    return chosen


def chosen_study(store: Store, study: str | None = None, model: str | None = None) -> tuple[str, str]:
    """Return the name and model id of the study that ``--study`` and ``--model`` name; without them, of the only one.

    Raises:
        InputError: The store has no such study or model, or has several and the option is missing.
    """
    there = set(stored_studies(store))
    for option, place, requested in (("study", 0, study), ("model", 1, model)):
        known = {key[place] for key in there}
        if requested is not None and requested not in known:
            raise InputError(f"--{option} {requested}: not in {store.location}; {nearest(requested, known)}")
        if requested is None and len(known) > 1:
            raise InputError(f"{store.location}: --{option} is missing, must be one of {', '.join(sorted(known))}")
        there = {key for key in there if requested in {None, key[place]}}
    (chosen,) = there
    return chosen


def model_revisions(store: Store) -> dict[tuple[str, str], str | None]:
    """Return the model revision that each study names, by study and model; None for studies of other generators."""
    return {(row["study"], row["model"]): row["revision"] for row in store.read("studies").to_pylist()}


def store_size(location: str) -> dict[str, Any]:
    """Return the number of files and of bytes in a store, and in each table's folder, as plain values.

    A table's folder also has its log, and files that were replaced. Besides the tables, the store has pages, the
    catalogue, and any other file in its folder.
    """
    files, sizes = Counter[str](), Counter[str]()
    for table, size in _sizes_below(location):
        files[table] += 1
        sizes[table] += size
    tables = {table: {"files": files[table], "bytes": sizes[table]} for table in TABLES}
    return {"files": files.total(), "bytes": sizes.total(), "tables": tables}


def _sizes_below(location: str) -> Iterator[tuple[str, int]]:
    """Yield for each file below a location its top folder and its size; files that vanish meanwhile are left out."""
    if not is_local(location):
        files, root = filesystem_of(location)
        for info in files.get_file_info(pyarrow.fs.FileSelector(root, recursive=True)):
            if info.is_file:
                yield info.path.removeprefix(f"{root}/").partition("/")[0], info.size
        return
    for folder, _, names in os.walk(location):
        first = os.path.relpath(folder, location).partition(os.sep)[0]
        for name in names:
            with suppress(OSError):
                yield first, os.lstat(f"{folder}{os.sep}{name}").st_size


_KEY = (*GROUP_KEY, "replicate")
_SCHEMA = pa.schema([EVENTS.schema.field(name) for name in _KEY])


class Waiting(NamedTuple):
    """How many replicates wait for rows of missing positions, and how many documents these replicates belong to."""

    replicates: int
    documents: int

    def __str__(self) -> str:
        numbers = ((self.replicates, "replicate"), (self.documents, "document"))
        return " of ".join(f"{number:,} {name}{'' if number == 1 else 's'}" for number, name in numbers)


def count_waiting(store: Store) -> dict[tuple[str, str], Waiting]:
    """Count the waiting replicates of a store by study and model; empty if none wait.

    Waiting rows are in the store's folder ``pieces``, which a store behind a URL does not have. Replicates that the
    store has do not count: their rows stay in a file of the folder while other rows of that file wait.

    Raises:
        DamagedStoreError: A file of the folder cannot be read.
    """
    if not is_local(store.location):
        return {}
    files = sorted(Path(store.location, "pieces").glob("*.parquet"))
    keys = pa.concat_tables([_SCHEMA.empty_table(), *map(_keys, files)]).group_by(list(_KEY)).aggregate([])
    if not keys.num_rows:
        return {}
    stored = store.units(columns=(*GROUP_KEY, "first_replicate", "replicates", "estimator"))
    stored = stored.filter(pc.equal(stored["estimator"], PLAIN))
    near = keys.join(stored, list(GROUP_KEY), join_type="inner")
    place = pc.subtract(near["replicate"], near["first_replicate"])
    within = pc.and_(pc.greater_equal(place, 0), pc.less(place, near["replicates"]))
    waiting = keys.join(near.filter(within).select(_KEY), list(_KEY), join_type="left anti")
    replicates, documents = (
        Counter(zip(rows["study"].to_pylist(), rows["model"].to_pylist(), strict=True))
        for rows in (waiting, waiting.group_by(["study", "model", "doc"]).aggregate([]))
    )
    return {of: Waiting(count, documents[of]) for of, count in sorted(replicates.items())}


def _keys(path: Path) -> pa.Table:
    """Return the keys of the replicates with rows in a file; no rows if an ingestion has just removed the file."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            parts = (pa.Table.from_batches([batch]) for batch in file.iter_batches(columns=list(_KEY)))
            return pa.concat_tables(
                [_SCHEMA.empty_table(), *(part.group_by(list(_KEY)).aggregate([]).cast(_SCHEMA) for part in parts)]
            )
    except FileNotFoundError:
        return _SCHEMA.empty_table()
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise DamagedStoreError(
            f"{path}: cannot be read ({first_line(error)}), must be Parquet with rows of waiting replicates"
        ) from None
