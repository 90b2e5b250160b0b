"""The sizes of a store: the files that readers see, by table, and everything that lies in its folder."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pyarrow.fs

from schema.location import filesystem_of, is_local
from schema.tables import TABLES

if TYPE_CHECKING:
    from log.readable_store import ReadableStore


def store_size(store: ReadableStore) -> dict[str, Any]:
    """Return files and bytes of a store, and of the visible files of each table, as plain values.

    The whole has more than the tables' visible files: logs, replaced files, pages and the catalogue.
    """
    tables = {}
    for table in TABLES:
        visible = store.stored_files(table)
        tables[table] = {"files": len(visible), "bytes": sum(file.size for file in visible)}
    sizes = _sizes_below(store.location)
    return {"files": len(sizes), "bytes": sum(sizes), "tables": tables}


def _sizes_below(location: str) -> list[int]:
    """Return the size of each file below a location; files that vanish meanwhile are left out."""
    if not is_local(location):
        files, root = filesystem_of(location)
        return [one.size for one in files.get_file_info(pyarrow.fs.FileSelector(root, recursive=True)) if one.is_file]
    sizes = []
    for folder, _, names in os.walk(location):
        for name in names:
            with suppress(OSError):
                sizes.append(os.lstat(f"{folder}{os.sep}{name}").st_size)
    return sizes
