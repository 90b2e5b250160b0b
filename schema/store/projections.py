"""What is made from the files of ``events``: the rows of ``units``, and derived files; held against them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from schema.errors import InputError
from schema.store.appends import UNIT_FOOTER, span_of_path, span_of_record, with_defaults
from schema.store.commits import Commit, transactions
from schema.store.delta import DeltaFolder
from schema.store.parquet_files import StoredFile, content_digest, encode_parquet
from schema.store.snapshot import Snapshot
from schema.tables import UNITS


class UnitRows:
    """The table ``units``: the records in the footers of events files, as rows."""

    def __init__(self, folder: DeltaFolder) -> None:
        self._folder = folder

    def stored_and_missing(self) -> tuple[Snapshot, pa.Table]:
        """Return the table, and the rows that it lacks for visible events files.

        Raises:
            InputError: A file is damaged.
            DamagedStoreError: There are rows whose events are lost.

        """
        units = self._folder.load("units")
        paths = self._folder.load("events").paths()
        own = [path for path in paths if span_of_path(path) is not None]
        missing: list[str] = []
        # Equal counts mean nothing is missing, without a look into any file, as every unit is one file and one row.
        if len(own) < len(paths) or len(own) != units.count_rows():
            known = set(self._folder.read(units, ["path"]).column("path").to_pylist())
            missing = [path for path in own if path not in known]
            if len(own) == len(paths) and (lost := known - set(own)):
                raise self._folder.damaged(f"'units' has a row of {min(lost)}, which 'events' has lost")
        rows = [{**self._record(path), "path": path} for path in missing]
        return units, pa.Table.from_pylist(rows, schema=UNITS.schema)

    def append(self, records: Sequence[dict[str, Any]]) -> int:
        """Append the rows that the table lacks; return how many."""
        new: list[dict[str, Any]] = []

        def attempt(units: Snapshot) -> Commit | None:
            nonlocal new
            new = [row for row in records if units.transaction_version(span_of_record(row).app_id) is None]
            if not new:
                return None
            data = encode_parquet(pa.Table.from_pylist(new, schema=UNITS.schema))
            file = StoredFile(f"{content_digest(data)}.parquet", len(data), len(new))
            self._folder.put("units", file.path, data)
            spans = [span_of_record(row) for row in new]
            return Commit([file], transactions((span.app_id, span.count) for span in spans))

        if records:
            self._folder.commit("units", attempt)
        return len(new)

    def _record(self, path: str) -> dict[str, Any]:
        text = self._folder.footer("events", path).get(UNIT_FOOTER.encode())
        if text is None:
            raise InputError(f"{self._folder.location}: events/{path} is damaged (no unit record in its footer)")
        return with_defaults(json.loads(text))


def check_units(folder: DeltaFolder, version: int | None, events: Sequence[str]) -> None:
    """Check that ``units``, at a version, has no more rows than there are events files; reads logs and no data.

    Raises:
        DamagedStoreError: There are rows whose events are lost.

    """
    rows = folder.load("units", version).count_rows()
    if rows > len(events) and None not in map(span_of_path, events) and rows > len(folder.load("events").paths()):
        raise folder.damaged(f"'units' has {rows} rows, 'events' {len(events)} units: events are lost")


def check_derived(folder: DeltaFolder, derived: Mapping[str, set[str]], events: set[str]) -> None:
    """Check that every derived file, by table, is of one of the events files.

    Raises:
        DamagedStoreError: Some are of events that are lost.

    """
    for table, paths in derived.items():
        ahead = {path for path in paths - events if span_of_path(path) is not None}
        # Events may have come since the version that is looked at.
        if ahead and (lost := ahead - set(folder.load("events").paths())):
            more = f" and {len(lost) - 1} more files" if len(lost) > 1 else ""
            raise folder.damaged(f"'{table}' has rows of {min(lost)}{more}, which 'events' has lost")
