"""Count the replicates that wait in a store's folder ``pieces`` until they have all positions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvdrift.schema.errors import DamagedStoreError, first_line
from kvdrift.schema.location import is_local
from kvdrift.schema.tables import EVENTS, GROUP_KEY, PLAIN

if TYPE_CHECKING:
    from kvdrift.log.readable_store import ReadableStore

_KEY = (*GROUP_KEY, "replicate")
_SCHEMA = pa.schema([EVENTS.schema.field(name) for name in _KEY])


class Waiting(NamedTuple):
    """The replicates that wait, and the documents that these replicates belong to."""

    replicates: int
    documents: int

    def __str__(self) -> str:
        numbers = ((self.replicates, "replicate"), (self.documents, "document"))
        return " of ".join(f"{number:,} {name}{'' if number == 1 else 's'}" for number, name in numbers)


def count_waiting(store: ReadableStore) -> dict[tuple[str, str], Waiting]:
    """Count the waiting replicates of a store by study and model; empty if none wait.

    Replicates that the store has do not count: their rows stay in a file of the folder while other rows of the file
    wait. A store behind a URL has no such folder.

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
    """Return the keys of the replicates with rows in a file; none if an ingestion has just removed the file."""
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
