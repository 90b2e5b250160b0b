"""Read rows of Delta Lake tables at a version, in the columns of their declared schema."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from kvdrift.log.delta.commits import changes_rows
from kvdrift.log.delta.durability import side_by_side
from kvdrift.log.delta.versions import TableVersions
from kvdrift.schema.errors import InputError, first_line
from kvdrift.schema.location import join
from kvdrift.schema.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from kvdrift.log.delta.snapshot import Snapshot

_DAMAGED = (pa.ArrowException, OSError, ValueError)  # ValueError: nulls in a column that must have none

_Made = TypeVar("_Made")

READABLE_SINCE = "kvdrift.readable-since"  # application id: its version is the first whose files all still exist


class TableReading(TableVersions):
    """Reads the tables under one location."""

    def __init__(self, location: str | Path) -> None:
        """Keep a location, without accessing it; ``TableVersions`` says what is raised."""
        super().__init__(location)
        self._changing: dict[tuple[str, int], bool] = {}  # whether a version changed rows
        self._made: dict[tuple[str, Callable[[pa.Table], Any]], dict[str, Any]] = {}  # by path; see ``of_files``
        self._bounds: dict[tuple[str, str], dict[str, tuple[str, str] | None]] = {}  # by path, by table and column

    def _check_readable(self, snapshot: Snapshot) -> None:
        if self._newest_known(snapshot.table) == snapshot.version:
            return
        since = self.load(snapshot.table).transaction_version(READABLE_SINCE) or 0
        if snapshot.version < since:
            raise InputError(
                f"{self.location}: version {snapshot.version} of '{snapshot.table}' cannot be read any more: compact "
                f"--vacuum has deleted its files; give {since} or later"
            )

    def count_rows(self, snapshot: Snapshot) -> int:
        """Return the number of visible rows, from the log; footers are read only if the log lacks counts."""
        if snapshot.row_count is not None:
            return snapshot.row_count
        return int(self.dataset(snapshot).count_rows())

    def data_version(self, snapshot: Snapshot) -> int:
        """Return the last version, up to the snapshot's, that changed rows; log files are read from the newest on.

        A commit that only replaces files by others with the same rows changes no row, whoever made the commit.
        """
        version = snapshot.version
        while version > 0 and not self._changes_rows(snapshot.table, version):
            version -= 1
        return version

    def _changes_rows(self, table: str, version: int) -> bool:
        known = self._changing.get((table, version))
        if known is None:
            lines = self.log_lines(table, version)
            try:
                known = not lines or changes_rows(lines)
            except ValueError:
                known = True
            self._changing[table, version] = known
        return known

    def log_lines(self, table: str, version: int) -> list[bytes]:
        """Return the lines of a version's log file; none if a clean-up has deleted it, or it cannot be read."""
        try:
            with self._files.open_input_file(join(self._root, table, "_delta_log", f"{version:020d}.json")) as file:
                content: bytes = file.read()
        except OSError:
            return []
        return content.splitlines()

    def dataset(
        self, snapshot: Snapshot, paths: Sequence[str] | None = None, coded: Collection[str] = ()
    ) -> pads.Dataset:
        """Return the visible files, or some of them, as a dataset of the declared schema; nothing is read yet.

        Page checksums are verified. Text columns in ``coded`` are dictionaries.
        """
        self._check_readable(snapshot)
        scan = pads.ParquetFragmentScanOptions(page_checksum_verification=True)
        parquet = pads.ParquetFileFormat(default_fragment_scan_options=scan, dictionary_columns=list(coded))
        sizes = {file.path: file.size for file in snapshot.files()}  # from the log, so that no request asks for them
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
        compared: Sequence[str] = (),
    ) -> pa.Table:
        """Return the visible rows in some columns, with page checksums verified.

        ``paths`` are some of the visible files. With ``coded``, texts are dictionaries, which may differ between
        chunks. The columns ``compared`` are those of ``where``: they are coded after the read, since Arrow skips no
        part of a file by the bounds of a column that is read as dictionaries.

        Raises:
            InputError: A file is missing or damaged.
        """
        table = snapshot.table
        texts = [name for name in columns if coded and TABLES[table].schema.field(name).type == pa.string()]
        try:
            rows = self._scanned(snapshot, paths, columns, where, texts, compared)
            return _cast(rows, _declared(table, texts))
        except _DAMAGED as error:
            raise self._is_damaged(table, paths, error) from None

    def files_with(self, snapshot: Snapshot, column: str, values: Sequence[str], paths: Sequence[str]) -> list[str]:
        """Return the files that may have some of the sorted ``values`` in a text column, by bounds in their footers.

        Bounds are kept while a file is visible, so that looking for other values in the same files costs nothing.
        """
        table, kept = snapshot.table, self._bounds.get((snapshot.table, column), {})
        if new := [path for path in paths if path not in kept]:
            found = side_by_side(lambda path: self._bounds_of(table, path, column), new)
            known = kept | dict(zip(new, found, strict=True))
            kept = self._bounds[table, column] = {path: known[path] for path in snapshot.paths() if path in known}

        def may_have(path: str) -> bool:
            bounds = kept[path]
            return bounds is None or bisect_left(values, bounds[0]) < bisect_right(values, bounds[1])

        return [path for path in paths if may_have(path)]

    def _bounds_of(self, table: str, path: str, column: str) -> tuple[str, str] | None:
        """Return the least and the greatest text of a file's column; None if the footer does not say, or is damaged."""
        try:
            footer = pq.read_metadata(join(self._root, table, path), filesystem=self._files)
            at = footer.schema.names.index(column)
            parts = [footer.row_group(number).column(at).statistics for number in range(footer.num_row_groups)]
        except (*_DAMAGED, ValueError):
            return None
        if not parts or not all(part is not None and isinstance(part.min, str) for part in parts):
            return None
        return min(part.min for part in parts), max(part.max for part in parts)

    def _scanned(
        self, snapshot: Snapshot, paths: Sequence[str] | None, columns: Sequence[str], where: pc.Expression | None,
        texts: Sequence[str], compared: Sequence[str],
    ) -> pa.Table:  # fmt: skip
        """Read rows with ``texts`` as dictionaries, and code the texts of ``compared`` after the read if possible."""
        plain = {*texts} & {*compared}
        try:
            rows = self.dataset(snapshot, paths, {*texts} - plain).to_table(columns=list(columns), filter=where)
        except pa.ArrowNotImplementedError:  # another program's string views, which Arrow compares as dictionaries only
            return self.dataset(snapshot, paths, texts).to_table(columns=list(columns), filter=where)
        for name in plain:
            rows = rows.set_column(rows.column_names.index(name), name, rows[name].dictionary_encode())
        return rows

    def of_files(
        self,
        snapshot: Snapshot,
        columns: Sequence[str],
        make: Callable[[pa.Table], _Made],
        paths: Sequence[str] | None = None,
    ) -> dict[str, _Made]:
        """Return the result of ``make`` for each visible file's rows, by path; texts are dictionaries.

        A file never changes, so its result is kept until a call with new files leaves the file out. A look at a growing
        table therefore costs only the new files. Columns must be equal in every call with the same function.
        """
        table, kept = snapshot.table, self._made.get((snapshot.table, make), {})
        wanted = snapshot.paths() if paths is None else paths
        if new := [path for path in wanted if path not in kept]:
            kept = kept | {path: make(rows) for path, rows in self._each_file(snapshot, columns, new).items()}
        found = {path: kept[path] for path in wanted}
        if new:  # a call for an older version must not drop the results of newer files
            self._made[table, make] = found
        return found

    def _each_file(self, snapshot: Snapshot, columns: Sequence[str], paths: Sequence[str]) -> dict[str, pa.Table]:
        """Read several files at once, with texts coded, and return the rows of each by path."""
        texts = [name for name in columns if TABLES[snapshot.table].schema.field(name).type == pa.string()]
        # Threads would cost as much as reading a small table.
        scanner = self.dataset(snapshot, paths, texts).scanner(columns=list(columns), use_threads=False)
        batches = {path: list[pa.RecordBatch]() for path in paths}
        beginning = len(join(self._root, snapshot.table, ""))
        declared = _declared(snapshot.table, texts)
        try:
            for tagged in scanner.scan_batches():
                batches[tagged.fragment.path[beginning:]].append(tagged.record_batch)
            tables = {path: pa.Table.from_batches(own, scanner.projected_schema) for path, own in batches.items()}
            return {path: _cast(rows, declared).unify_dictionaries() for path, rows in tables.items()}
        except _DAMAGED as error:
            raise self._is_damaged(snapshot.table, paths, error) from None

    def _is_damaged(self, table: str, paths: Sequence[str] | None, error: Exception) -> InputError:
        damaged = f"{table}/{paths[0]}" if paths is not None and len(paths) == 1 else f"table '{table}'"
        return InputError(f"{self.location}: {damaged} is damaged ({first_line(error)})")

    def made_of_file(self, table: str, path: str, rows: pa.Table, make: Callable[[pa.Table], _Made]) -> None:
        """Keep the result of ``make`` for a file about to become visible, so that it need not be read."""
        self._made.setdefault((table, make), {})[path] = make(rows)

    def read_file(self, table: str, path: str) -> pa.Table:
        """Return the rows of a file, visible or not, in the columns that the file has."""
        data = self.read_bytes(table, path)
        try:
            with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as parquet:
                return parquet.read()
        except _DAMAGED as error:
            raise self._is_damaged(table, [path], error) from None

    def parts(self, snapshot: Snapshot, path: str, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the rows of one visible file in some columns, one part at a time; ``read`` says what is raised.

        A file of any size then takes little memory.
        """
        table = snapshot.table
        try:
            scan = self.dataset(snapshot, [path]).scanner(
                columns=list(columns), use_threads=False, batch_readahead=1, fragment_readahead=1
            )
            for batch in scan.to_batches():
                yield _cast(pa.Table.from_batches([batch]), _declared(table, ()))
        except _DAMAGED as error:
            raise self._is_damaged(table, [path], error) from None


def _cast(rows: pa.Table, declared: pa.Schema) -> pa.Table:
    """Return rows in the declared types: other programs write texts and lists in several Arrow types."""
    return rows.cast(pa.schema([declared.field(name) for name in rows.column_names]))


def _declared(table: str, coded: Collection[str]) -> pa.Schema:
    """Return the declared schema, with dictionaries for the text columns in ``coded``."""
    codes = pa.dictionary(pa.int32(), pa.string())
    return pa.schema([field.with_type(codes) if field.name in coded else field for field in TABLES[table].schema])
