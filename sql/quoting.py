"""Names, texts and files as they stand in SQL."""

from __future__ import annotations

import re
from collections.abc import Iterable

_BETWEEN = "\0"  # what no path has


def quoted(identifier: str) -> str:
    """A name in double quotes."""
    return '"' + identifier.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A text in single quotes."""
    return "'" + text.replace("'", "''") + "'"


def file_pattern(path: str) -> str:
    """A pattern that a path alone matches: DuckDB reads every path as a pattern."""
    return re.sub(r"[*?\[]", lambda found: f"[{found.group()}]", path)


def parquet_files(paths: Iterable[str]) -> str:
    """The rows of Parquet files that have the same columns; the names of their folders mean nothing (no Hive keys)."""
    files = literal(file_pattern(_BETWEEN.join(paths))).replace(_BETWEEN, "', '")  # all at once: they may be many
    return f"read_parquet([{files}], hive_partitioning = false, union_by_name = false)"
