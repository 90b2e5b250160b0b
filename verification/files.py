"""The files of a store's tables, one at a time: there, whole, and as the log and the declared schema have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from log.appends import conform
from log.compaction.members import Member, members_in

from log.checked_files import READ_ERRORS, damage_of, parse
from log.store import Store, StoredFile
from schema.errors import InputError, first_line
from schema.tables import TABLES
from verification.findings import Check, Fault, counted

UnitRecord = dict[str, Any]  # a unit's values by column of ``units``, as in the footer of its events file


@dataclass(frozen=True)
class Reading:
    """What one file turned out to hold."""

    where: str  # table and path
    rows: pa.Table | None = None  # in the declared schema, defaults filled in; None where it has no such rows
    units: tuple[Member, ...] = ()  # of an events file
    faults: tuple[Fault, ...] = ()


class TableFiles:
    """The visible files of one table at one version.

    Raises:
        InputError: the table's log cannot be read.

    """

    def __init__(self, store: Store, table: str, version: int) -> None:
        self.table = table
        self._store = store
        self.by_path = {file.path: file for file in store.stored_files(table, version)}
        folder = f"{store.location}/{table}/"
        self._lacking = {
            file.removeprefix(folder): names
            for names, files in store.files_by_missing_columns(table, version).items()
            for file in files
        }

    def read(self, path: str) -> Reading:
        """Read one file wholly, page checksums verified; whatever is wrong with it is among the reading's faults.

        A file that is damaged but still holds rows is given with them: what they say may be wrong in more than this.
        """
        file = self.by_path[path]
        where = f"{self.table}/{path}"
        try:
            data = self._store.read_bytes(self.table, path)
        except InputError:
            return Reading(where, faults=(Fault(where, "the file is missing or cannot be read, must be there"),))
        damage = damage_of(self.table, file, data)
        try:
            rows, footer = parse(data)
        except READ_ERRORS as error:
            reason = f"the file cannot be read ({first_line(error)}), must be Parquet with right page checksums"
            return Reading(where, faults=(Fault(where, damage or reason),))
        faults = [Fault(where, damage)] if damage else []
        units = members_in(path, rows.num_rows, footer) if self.table == "events" else []
        if units is None:
            faults.append(Fault(where, "the footer has no unit record, must have that of its unit"))
        try:
            declared = self._declared(path, rows)
        except (InputError, pa.ArrowException) as error:
            fault = Fault(where, first_line(error).removeprefix(f"{self.table}: "))
            return Reading(where, units=tuple(units or ()), faults=(*faults, fault))
        if not damage and file.rows is not None and declared.num_rows != file.rows:
            faults.append(Fault(where, f"the file has {declared.num_rows} rows, must have {file.rows} as the log says"))
        return Reading(where, declared, tuple(units or ()), tuple(faults))

    def _declared(self, path: str, rows: pa.Table) -> pa.Table:
        """The rows in the declared schema.

        Raises:
            InputError: the rows are not of that schema.

        """
        lacking = self._lacking[path]
        table = TABLES[self.table]
        for name in table.columns:
            if (name in rows.column_names) == (name in lacking):
                what = "came after this file, must not be in it" if name in lacking else "is missing"
                raise InputError(f"column '{name}' {what}")
        for name, default in table.defaults.items():
            at = rows.schema.get_field_index(name)
            if at >= 0 and default is not None and rows.column(at).null_count:  # compacted files of an older version
                rows = rows.set_column(at, rows.schema.field(at), rows.column(at).fill_null(default))
        return conform(table, rows)


def read_unnamed(store: Store, table: str, path: str) -> Reading:
    """Read a file that no commit names; its rows are None unless it is whole, as its name and the schema say."""
    where = f"{table}/{path}"
    try:
        data = store.read_bytes(table, path)
        if damage_of(table, StoredFile(path, len(data), 0), data):
            return Reading(where)
        rows, footer = parse(data)
        units = members_in(path, rows.num_rows, footer) if table == "events" else None
        return Reading(where, conform(TABLES[table], rows), tuple(units or ()))
    except (InputError, *READ_ERRORS):
        return Reading(where)


@dataclass(frozen=True)
class SmallTable:
    """A table read whole. ``rows`` are those of the files that could be read, ``readable`` says that all could."""

    check: Check
    rows: pa.Table
    readable: bool


def check_small_table(store: Store, table: str, version: int) -> SmallTable:
    """All files of a keyed table are there, whole and of the declared schema, and no key is there twice."""
    files = TableFiles(store, table, version)
    readings = [files.read(path) for path in files.by_path]
    read = [reading.rows for reading in readings if reading.rows is not None]
    rows = pa.concat_tables([TABLES[table].schema.empty_table(), *read])
    faults = [fault for reading in readings for fault in reading.faults]
    faults += [
        Fault(row_name(table, key), f"{count} rows have this key, must be 1") for key, count in _repeated(table, rows)
    ]
    check = Check(
        table, f"{counted(len(readings), 'file')}, {counted(rows.num_rows, 'row')}", "whole and unique", tuple(faults)
    )
    return SmallTable(check, rows, len(read) == len(readings))


def _repeated(table: str, rows: pa.Table) -> list[tuple[dict[str, Any], int]]:
    counts = rows.group_by(list(TABLES[table].key)).aggregate([([], "count_all")])
    again = counts.filter(pc.greater(counts["count_all"], 1)).to_pylist()
    return [(row, row.pop("count_all")) for row in again]


def row_name(table: str, key: Mapping[str, Any]) -> str:
    """A row as fault lines name it: ``plans (study=a, model=b)``."""
    return f"{table} ({', '.join(f'{name}={value}' for name, value in key.items() if value is not None)})"
