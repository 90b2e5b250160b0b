"""Beam coders that pass Arrow tables as IPC streams; a pickled slice would carry the whole table."""

from __future__ import annotations

import pyarrow as pa
from apache_beam.coders import Coder
from apache_beam.coders.typecoders import registry


class TableCoder(Coder):
    """Encodes a table as an Arrow IPC stream."""

    def encode(self, table: pa.Table) -> bytes:
        """Return the table's rows as an IPC stream, without other rows of the same buffers."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write(table)
        return bytes(sink.getvalue())

    def decode(self, encoded: bytes) -> pa.Table:
        """Return the table of an IPC stream."""
        return pa.ipc.open_stream(encoded).read_all()

    def is_deterministic(self) -> bool:
        """Return False: equal tables may be encoded differently, since dictionaries may be in any order."""
        return False


class BatchCoder(TableCoder):
    """Encodes a record batch as an Arrow IPC stream."""

    def decode(self, encoded: bytes) -> pa.RecordBatch:
        """Return the record batch of an IPC stream."""
        return next(iter(pa.ipc.open_stream(encoded)))


def register() -> None:
    """Register these coders with Beam for tables and record batches."""
    registry.register_coder(pa.Table, TableCoder)
    registry.register_coder(pa.RecordBatch, BatchCoder)
