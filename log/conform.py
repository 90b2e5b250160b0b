"""Bring rows into the declared schema of their table before they are appended."""

from __future__ import annotations

import pyarrow as pa

from kvdrift.schema.errors import InputError, nearest
from kvdrift.schema.tables import Table


def conform(table: Table, rows: pa.Table, *, filled: bool = False) -> pa.Table:
    """Return rows, with columns in any order, in the declared schema of a table.

    A column of ``table.defaults`` may be missing. With ``filled``, nulls in such a column become its default.
    """
    names, declared, defaults = rows.column_names, table.columns, table.defaults
    for name in names:
        if name not in declared:
            raise InputError(f"{table.name}: unknown column '{name}'; {nearest(name, declared)}")
    given = dict(zip(names, rows.columns, strict=True))
    if len(given) < len(names):
        raise InputError(f"{table.name}: two columns have the same name")
    columns = []
    for field in table.schema:
        if field.name not in given and field.name not in defaults:
            raise InputError(f"{table.name}: column '{field.name}' is missing")
        column = given.get(field.name)
        if column is None:
            column = pa.chunked_array([pa.repeat(pa.scalar(defaults[field.name], field.type), rows.num_rows)])
        if column.type != field.type:
            raise InputError(f"{table.name}: column '{field.name}' is {column.type}, must be {field.type}")
        if filled and column.null_count and defaults.get(field.name) is not None:
            column = column.fill_null(pa.scalar(defaults[field.name], field.type))
        if column.null_count and not field.nullable:
            raise InputError(f"{table.name}: column '{field.name}' is null in {column.null_count} row(s)")
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=table.schema)
