"""Write the first commit of a local table, in the form of Delta Lake's protocol.

A store has many tables, and delta-rs takes as long to make a table as for three commits.
"""

from __future__ import annotations

import functools
import json
import os
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from deltalake import Schema

from schema.tables import SCHEMA_VERSION, TABLES

if TYPE_CHECKING:
    from collections.abc import Mapping

_PROTOCOL = {"minReaderVersion": 1, "minWriterVersion": 2}  # of append-only tables


def write_first_commit(table: str, folder: Path, configuration: Mapping[str, str]) -> None:
    """Make a table by writing its first commit as one file, which is not durable yet.

    Args:
        table: The table's name.
        folder: The table's folder.
        configuration: The table's properties.

    Raises:
        OSError: The disk refuses.

    """
    now = int(time.time() * 1000)
    declared = {
        "id": str(uuid.uuid4()),
        "name": table,
        "description": TABLES[table].row,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": _schema(table),
        "partitionColumns": [],
        "createdTime": now,
        "configuration": dict(configuration),
    }
    made = {"timestamp": now, "operation": "CREATE TABLE", "engineInfo": f"kvdrift schema {SCHEMA_VERSION}"}
    actions = [{"commitInfo": made}, {"protocol": _PROTOCOL}, {"metaData": declared}]
    log_folder = folder / "_delta_log"
    log_folder.mkdir(parents=True, exist_ok=True)
    aside = log_folder / f"_commit_{uuid.uuid4()}.json.tmp"  # as delta-rs names them, whose cleaning knows it
    try:
        aside.write_text("\n".join(map(json.dumps, actions)), encoding="utf-8")
        os.link(aside, log_folder / f"{0:020d}.json")
    finally:
        aside.unlink(missing_ok=True)


@functools.cache
def _schema(table: str) -> str:
    return str(Schema.from_arrow(TABLES[table].schema).to_json())
