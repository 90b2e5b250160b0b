"""Delta tables that other programs wrote: which files hold their rows."""

from __future__ import annotations

from typing import Any

import pyarrow.dataset
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from kvdrift.schema.errors import reading


def live_files(location: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the files that hold a table's rows at its newest version, sorted: path, and values of partition columns.

    A path begins at the table's folder. Rows that were deleted or replaced are in other files, or in none.

    Raises:
        InputError: There is no table, or reading it needs a feature that pyarrow lacks: deletion vectors (rows of a
            live file are deleted) or column mapping (its columns have other names).
    """
    with reading(f"{location}: cannot be read as a Delta table", DeltaError):
        fragments = DeltaTable(location).to_pyarrow_dataset().get_fragments()
        keys = pyarrow.dataset.get_partition_keys
        return sorted((file.path, keys(file.partition_expression)) for file in fragments)
