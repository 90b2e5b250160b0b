"""Write names, texts and files as SQL."""

from __future__ import annotations

import re
from collections.abc import Iterable

_BETWEEN = "\0"  # what no path has


def quoted(identifier: str) -> str:
    """Return a name in double quotes."""
    return '"' + identifier.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Return a text in single quotes."""
    return "'" + text.replace("'", "''") + "'"


def file_pattern(path: str) -> str:
    """Return a pattern that matches this path only, since DuckDB reads every path as a pattern."""
    return re.sub(r"[*?\[]", lambda match: f"[{match.group()}]", path)


def parquet_files(paths: Iterable[str]) -> str:
    """Return SQL for the rows of Parquet files with equal columns; folder names give no columns (no Hive keys)."""
    files = literal(file_pattern(_BETWEEN.join(paths))).replace(_BETWEEN, "', '")  # all at once: they may be many
    return f"read_parquet([{files}], hive_partitioning = false, union_by_name = false)"
