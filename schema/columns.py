"""Columns of stored tables as Arrow fields, each with its meaning and its unit; and the columns that tables share.

The types are common to Delta Lake and DuckDB: signed integers only, strings without a dictionary type.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pyarrow as pa


@dataclass(frozen=True)
class Table:
    """One stored table: the meaning of a row, the columns that are unique together, and the columns."""

    name: str
    row: str
    key: tuple[str, ...]
    schema: pa.Schema

    @functools.cached_property
    def columns(self) -> tuple[str, ...]:
        """Column names in stored order."""
        return tuple(self.schema.names)

    @property
    def meanings(self) -> dict[str, str]:
        """The meaning of each column, by name."""
        return {field.name: field.metadata[b"meaning"].decode() for field in self.schema}

    @property
    def units(self) -> dict[str, str]:
        """The unit of each column that has numbers, one of ``MEASURES``, by name."""
        return {field.name: field.metadata[b"unit"].decode() for field in self.schema if b"unit" in field.metadata}

    @functools.cached_property
    def defaults(self) -> dict[str, Any]:
        """The columns that appended rows may leave out, by name, each with the value that it then gets."""
        return {
            field.name: pa.scalar(field.metadata[b"default"].decode()).cast(field.type).as_py()
            if b"default" in field.metadata
            else None
            for field in self.schema
            if field.nullable or b"default" in field.metadata
        }


def column(
    name: str, meaning: str, unit: str = "", *, kind: pa.DataType, null: bool = False, default: str = ""
) -> pa.Field:
    """Declare a column. Rows to append may leave out a column that may be null or has a ``default``."""
    metadata = {"meaning": meaning, "unit": unit, "default": default}
    return pa.field(name, kind, nullable=null, metadata={key: value for key, value in metadata.items() if value})


text = functools.partial(column, kind=pa.string())
integer = functools.partial(column, kind=pa.int32())
long = functools.partial(column, kind=pa.int64())
real = functools.partial(column, kind=pa.float64())
flag = functools.partial(column, kind=pa.bool_())
distance = functools.partial(column, kind=pa.float32())
integers = functools.partial(column, kind=pa.list_(pa.int32()))
texts = functools.partial(column, kind=pa.list_(pa.string()))


def stored_table(name: str, row: str, key: str, *columns: pa.Field) -> Table:
    """Declare a table; ``key`` has the names of the columns that are unique together."""
    return Table(name, row, tuple(key.split()), pa.schema(columns))


STUDY = text("study", "name of the study")
MODEL = text("model", "model id as the study file gives it")
DOC = text("doc", "document id, unique within study and model")
ACTION = text("action", "action name, unique within study")
GROUP = (STUDY, MODEL, DOC, ACTION)
PAIR = (*GROUP, integer("replicate", "coupled pair of continuations, from 0", "none"))
REVISION = integer(
    "action_revision", "revision of the action, from 0; a later revision supersedes it", "none", default="0"
)
SPLIT = text("split", "development or evaluation")
