"""Which stored moments of documents are the present ones: all but those of documents that got trajectories since."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from schema.location import is_local
from sql.quoting import parquet_files
from sql.view_texts import WAITING, moments_definition

if TYPE_CHECKING:
    from collections.abc import Mapping

    import duckdb

    from log.store import Store


@dataclass(frozen=True)
class StoredMoments:
    """What the views of moments take from the store.

    Attributes:
        stored: Whether they take stored rows.
        waiting: A query for the documents and actions whose moments they compute; None where there are none.

    """

    stored: bool
    waiting: str | None

    def insert_waiting(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Put the documents and actions whose moments are computed into the table that the views look at."""
        if self.waiting is not None:
            connection.execute(f"insert into {WAITING} {self.waiting}")


NO_MOMENTS: Final = StoredMoments(stored=False, waiting=None)
"""Everything is computed."""


def stored_moments(store: Store, versions: Mapping[str, int]) -> StoredMoments:
    """Find out what the stored moments cover of tables at their versions; reads the logs alone.

    They cover the files of trajectories and of documents that there were when they were made. Where one of these is
    no longer there, and in a store behind a URL, everything is computed.

    Args:
        store: The store.
        versions: Delta version by table name, of all tables.

    Raises:
        InputError: The store is damaged.

    """
    new = store.files_since_moments(versions, moments_definition()) if is_local(store.location) else None
    if new is None:
        return NO_MOMENTS
    keys, queries = "select distinct study, model, doc, action", []
    if files := new["trajectories"]:
        queries.append(f"{keys} from {parquet_files(files)}")
    if files := new["documents"]:  # may be of trajectories that were there before them
        late = f"semi join {parquet_files(files)} using (study, model, doc)"
        queries.append(f"{keys} from main.trajectories {late}")
    return StoredMoments(stored=True, waiting=" union ".join(queries) or None)
