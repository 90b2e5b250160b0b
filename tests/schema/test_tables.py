"""The declared tables: every column has a meaning, and types are common to Delta Lake and DuckDB."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from kvdrift.log.store import Store
from kvdrift.schema.columns import Table
from kvdrift.schema.tables import TABLES

ALLOWED = {
    pa.string(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.bool_(), pa.timestamp("us", tz="UTC"),
    pa.list_(pa.string()), pa.list_(pa.float64()), pa.list_(pa.int32()),
    pa.list_(pa.struct([(name, pa.int32()) for name in ("answer", "piece", "first", "last")])),
    pa.list_(pa.struct([("role", pa.string()), ("first", pa.int32())])),
}  # fmt: skip

every_table = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)


@every_table
def test_keys_are_columns_and_every_column_has_a_meaning_and_a_shared_type(table: Table) -> None:
    assert table.row
    assert len(set(table.columns)) == len(table.columns)
    assert set() < set(table.key) <= set(table.columns)
    assert TABLES[table.name] is table
    for field in table.schema:
        assert field.metadata[b"meaning"], field.name
        assert field.type in ALLOWED, f"{field.name}: {field.type} is unsigned, a dictionary, or not in Delta Lake"
        if field.name in table.defaults:
            default = table.defaults[field.name]
            assert field.nullable == (default is None)
            assert field.nullable or pa.scalar(default).cast(field.type).as_py() == default


def test_a_column_of_the_same_name_has_the_same_type_everywhere() -> None:
    types: dict[str, pa.DataType] = {}
    for table in TABLES.values():
        for field in table.schema:
            assert types.setdefault(field.name, field.type) == field.type, f"{table.name}.{field.name}"


def one_row(schema: pa.Schema, *, null: bool) -> pa.Table:
    values = {
        pa.string(): "ü",
        pa.bool_(): True,
        pa.timestamp("us", tz="UTC"): 1,
        pa.list_(pa.string()): ["a", "b"],
        pa.list_(pa.float64()): [0.5],
        pa.list_(pa.int32()): [3, 4],
        TABLES["prompts"].schema.field("records").type: [{"answer": 0, "piece": 0, "first": 1, "last": 2}],
        TABLES["prompts"].schema.field("turns").type: [{"role": "user", "first": 1}],
    }
    return pa.table(
        {
            field.name: pa.array([None if null and field.nullable else values.get(field.type, 3)], field.type)
            for field in schema
        },
        schema=schema,
    )


@every_table
def test_delta_and_duckdb_give_each_schema_back(table: Table, tmp_path: Path) -> None:
    made = DeltaTable.create(tmp_path / table.name, schema=table.schema)
    stored = pa.schema(made.schema().to_arrow())
    assert [(field.name, field.type, field.nullable) for field in stored] == [
        (field.name, field.type, field.nullable) for field in table.schema
    ]
    rows = pa.concat_tables([one_row(table.schema, null=False), one_row(table.schema, null=True)])
    write_deltalake(made, rows, mode="append")
    back = made.to_pyarrow_table().select(table.columns).cast(table.schema)
    assert sorted(map(str, back.to_pylist())) == sorted(map(str, rows.to_pylist()))
    files = made.file_uris()
    read = duckdb.connect().sql("select * from read_parquet($files)", params={"files": files}).to_arrow_table()
    assert read.column_names == list(table.columns)
    assert read.num_rows == 2


def test_a_store_has_the_tables_that_delta_rs_would_make(tmp_path: Path) -> None:
    """The store writes the first commits of local tables itself; only ids and times differ."""
    Store.create(tmp_path / "ours")
    for table in TABLES.values():
        made = DeltaTable.create(
            tmp_path / "theirs" / table.name, schema=table.schema, name=table.name, description=table.row,
            configuration=DeltaTable(tmp_path / "ours" / table.name).metadata().configuration,
            raise_if_key_not_exists=False,
        )  # fmt: skip
        assert made.version() == 0
        assert first_actions(tmp_path / "ours" / table.name) == first_actions(tmp_path / "theirs" / table.name)
        assert [path.name for path in (tmp_path / "ours" / table.name).rglob("*")] == ["_delta_log", f"{0:020d}.json"]


def first_actions(table: Path) -> dict[str, Any]:
    """Return the actions of a table's first commit, without values that differ between tables."""
    actions: dict[str, Any] = {}
    for line in (table / "_delta_log" / f"{0:020d}.json").read_text().splitlines():
        actions |= json.loads(line)
    assert actions.pop("commitInfo")["operation"] == "CREATE TABLE"
    declared = actions["metaData"]
    assert len(declared.pop("id")) == 36
    assert declared.pop("createdTime") > 0
    declared["schemaString"] = json.loads(declared["schemaString"])
    return actions
