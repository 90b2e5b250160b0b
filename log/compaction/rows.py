"""Tables that are not derived from files of events: their small files made one, sorted by key."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from log.appends import compacted_name
from log.commits import Commit
from log.compaction.counts import footer_of_counts
from log.compaction.members import files_footer, originals
from log.compaction.packs import rewriting, tiers
from log.delta.folder import DeltaFolder
from log.delta.snapshot import Snapshot
from log.parquet_files import StoredFile, content_digest, encode_parquet
from schema.tables import TABLES

ROW_GROUP_ROWS = 1 << 13  # a writer looks for the rows of a few units
FILE_BYTES = 1 << 26  # compressed; a file of half of it is left as it is
_OPEN_FILES = 16  # read at once: Arrow holds a tenth of a megabyte for each, whatever its size


def compact_rows(folder: DeltaFolder, table: str) -> bool:
    """Put small files of a table together, as many as one file may have.

    Returns:
        Whether they were; there may be nothing to put together, or another compaction may have been quicker.

    Raises:
        InputError: A file is damaged, or the store cannot be written.

    """
    loaded, sources, size = folder.load(table), list[StoredFile](), 0
    for file in loaded.files():
        if file.size < FILE_BYTES // 2 and size + file.size <= FILE_BYTES:
            sources.append(file)
            size += file.size
    return len(sources) > 1 and _put_together(folder, loaded, sources, counted=True)


def gather_rows(folder: DeltaFolder, table: str, most: int, rows: int) -> bool:
    """Put the files of a table together of which there are more than ``most`` of one size; see ``tiers``.

    Those of half of ``rows`` and more are left as they are.

    Returns:
        Whether they were; another compaction may have been quicker.

    Raises:
        InputError: A file is damaged, or the store cannot be written.

    """
    loaded = folder.load(table)
    done = [_put_together(folder, loaded, sources) for sources in tiers(loaded.files(), most, rows)]
    return any(done)


def _put_together(
    folder: DeltaFolder, loaded: Snapshot, sources: Sequence[StoredFile], *, counted: bool = False
) -> bool:
    table = loaded.table
    declared = TABLES[table]
    replaced = [file.path for file in sources]
    parts = [replaced[begin : begin + _OPEN_FILES] for begin in range(0, len(replaced), _OPEN_FILES)]
    rows = pa.concat_tables(folder.read(loaded, declared.columns, paths=part) for part in parts)
    rows = rows.sort_by([(name, "ascending") for name in declared.key])
    footer = files_footer(sorted(originals(folder, table, replaced)))
    if counted:
        footer |= footer_of_counts(folder, table, rows)
    data = encode_parquet(rows, footer, row_group=ROW_GROUP_ROWS)
    file = StoredFile(compacted_name(content_digest(data)), len(data), rows.num_rows)
    folder.put(table, file.path, data)

    def attempt(latest: Snapshot) -> Commit | None:
        return rewriting(latest, file, replaced)

    return bool(folder.commit(table, attempt, alone=True))
