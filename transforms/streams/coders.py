"""How Beam hands Arrow tables on: as Arrow IPC streams. Pickled, a slice of a table carries the whole table."""

from __future__ import annotations

import pyarrow as pa
from apache_beam.coders import Coder
from apache_beam.coders.typecoders import registry


class TableCoder(Coder):
    """A table as an Arrow IPC stream."""

    def encode(self, table: pa.Table) -> bytes:
        """Return the table's rows, and no others of the buffers that they lie in."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write(table)
        return bytes(sink.getvalue())

    def decode(self, encoded: bytes) -> pa.Table:
        """Return the table."""
        return pa.ipc.open_stream(encoded).read_all()

    def is_deterministic(self) -> bool:
        """Say that equal tables may be encoded differently: a dictionary's order is not part of the values."""
        return False


class BatchCoder(TableCoder):
    """A record batch as an Arrow IPC stream."""

    def decode(self, encoded: bytes) -> pa.RecordBatch:
        """Return the record batch."""
        return next(iter(pa.ipc.open_stream(encoded)))


def register() -> None:
    """Have Beam use these coders for tables and record batches."""
    registry.register_coder(pa.Table, TableCoder)
    registry.register_coder(pa.RecordBatch, BatchCoder)
