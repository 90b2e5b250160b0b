"""Rows of Delta Lake tables at a version, in the declared columns of the present schema."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from log.delta.versions import TableVersions
from schema.errors import InputError, first_line
from schema.location import join
from schema.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from log.delta.snapshot import Snapshot

READABLE_SINCE = "kvdrift.readable-since"  # the application id of the first version whose files are all there


class TableReading(TableVersions):
    """What is read of the tables under one location."""

    def _check_readable(self, snapshot: Snapshot) -> None:
        if self._newest(snapshot.table) == snapshot.version:
            return
        since = self.load(snapshot.table).transaction_version(READABLE_SINCE) or 0
        if snapshot.version < since:
            raise InputError(
                f"{self.location}: version {snapshot.version} of '{snapshot.table}' cannot be read any more: compact "
                f"--vacuum has deleted its files; give {since} or later"
            )

    def paths_by_missing_columns(self, snapshot: Snapshot) -> dict[tuple[str, ...], list[str]]:
        """Group the visible files by the declared columns that they lack.

        Returns:
            Sorted relative paths by missing columns; files of the present schema version lack none.

        """
        self._check_readable(snapshot)
        paths, last = snapshot.paths(), snapshot.last_versions_without()
        older = {
            version: set(paths if version == snapshot.version else self.load(snapshot.table, version).paths())
            for version in set(last.values())
        }
        found: dict[tuple[str, ...], list[str]] = {}
        for path in paths:
            missing = tuple(name for name, version in last.items() if path in older[version])
            found.setdefault(missing, []).append(path)
        return found

    def dataset(
        self, snapshot: Snapshot, paths: Sequence[str] | None = None, coded: Collection[str] = ()
    ) -> pads.Dataset:
        """Return the visible files, or some of them, as a dataset of the declared schema, which reads nothing yet.

        Page checksums are verified. The columns that files of older schema versions lack are null. Columns of texts
        that are to be ``coded`` are dictionaries.
        """
        self._check_readable(snapshot)
        scan = pads.ParquetFragmentScanOptions(page_checksum_verification=True)
        parquet = pads.ParquetFileFormat(default_fragment_scan_options=scan, dictionary_columns=list(coded))
        sizes = {file.path: file.size for file in snapshot.files()}  # in the log: no object store is asked for them
        fragments = [
            parquet.make_fragment(join(self._root, snapshot.table, path), self._files, file_size=sizes[path])
            for path in (sizes if paths is None else paths)
        ]
        return pads.FileSystemDataset(fragments, _declared(snapshot.table, coded), parquet, self._files)

    def read(
        self,
        snapshot: Snapshot,
        columns: Sequence[str],
        *,
        where: pc.Expression | None = None,
        paths: Sequence[str] | None = None,
        coded: bool = False,
    ) -> pa.Table:
        """Read the visible rows in some columns and verify page checksums.

        Args:
            snapshot: The table.
            columns: Names of declared columns.
            where: What holds of the rows; columns that came after the table are null there in rows of older files.
            paths: The files to read, some of the visible ones; all of them by default.
            coded: Whether texts come as dictionaries, which may be other ones from chunk to chunk.

        Raises:
            InputError: A file is missing or damaged.

        """
        table = snapshot.table
        defaults = TABLES[table].defaults
        texts = [name for name in columns if coded and TABLES[table].schema.field(name).type == pa.string()]
        declared = _declared(table, texts)
        try:
            # A column that came after the table is null in the rows of older files, also once these are compacted.
            rows = self.dataset(snapshot, paths, texts).to_table(columns=list(columns), filter=where)
            for at, name in enumerate(columns):
                if defaults.get(name) is not None and rows.column(at).null_count:
                    filled = rows.column(at).fill_null(defaults[name])
                    rows = rows.set_column(at, declared.field(name), filled)
            return rows.cast(pa.schema([declared.field(name) for name in columns]))
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{self.location}: table '{table}' is damaged ({first_line(error)})") from None


def _declared(table: str, coded: Collection[str]) -> pa.Schema:
    """The declared schema, with dictionaries in some columns of texts."""
    codes = pa.dictionary(pa.int32(), pa.string())
    return pa.schema([field.with_type(codes) if field.name in coded else field for field in TABLES[table].schema])
