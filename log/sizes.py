"""The sizes of a store: everything that lies in its folder, by table, from one listing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pyarrow.fs

from kvdrift.schema.location import filesystem_of, is_local
from kvdrift.schema.tables import TABLES


def store_size(location: str) -> dict[str, Any]:
    """Return files and bytes of a store and of each table's folder, as plain values.

    A table's folder also has its log, and files that were replaced. Besides the tables, the store has pages, the
    catalogue, and whatever else lies in it.
    """
    files, sizes = Counter[str](), Counter[str]()
    for table, size in _sizes_below(location):
        files[table] += 1
        sizes[table] += size
    tables = {table: {"files": files[table], "bytes": sizes[table]} for table in TABLES}
    return {"files": files.total(), "bytes": sizes.total(), "tables": tables}


def _sizes_below(location: str) -> Iterator[tuple[str, int]]:
    """Yield the first folder and the size of each file below a location; files that vanish meanwhile are left out."""
    if not is_local(location):
        files, root = filesystem_of(location)
        for one in files.get_file_info(pyarrow.fs.FileSelector(root, recursive=True)):
            if one.is_file:
                yield one.path.removeprefix(f"{root}/").partition("/")[0], one.size
        return
    for folder, _, names in os.walk(location):
        first = os.path.relpath(folder, location).partition(os.sep)[0]
        for name in names:
            with suppress(OSError):
                yield first, os.lstat(f"{folder}{os.sep}{name}").st_size
