"""``kvdrift sql`` accepts queries that only read. Other queries get one error line, and nothing is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.refusals import refused

from kvdrift.log.store import Store
from kvdrift.sql.catalog import open_views
from kvdrift.sql.read_only import ReadOnlyViews, read_only


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("read")


@pytest.fixture(scope="module")
def views(folder: Path) -> Iterator[ReadOnlyViews]:
    (folder / "outside.csv").write_text("a\n1\n")
    store = Store.create(folder / "store")
    (folder / "store" / "inside.csv").write_text("a\n1\n")
    with read_only(open_views(store), store) as opened:
        yield opened


@pytest.mark.parametrize(
    "query",
    [
        "select 1", "from decomposition", "table published", "values (1)", "describe published", "summarize published",
        "show tables", "explain select 1", "explain analyze select 1", "explain (format json) select 1",
        "pragma table_info('published')", "PRAGMA show_tables", "select 1;", "select copy from (select 1 as copy)",
        "with x as (select 1 as a) from x", "with recursive r as (select 1 as n union all select n + 1 from r where n < 3) from r",
        "pivot published on quantity in ('R') using count(*)", "-- a comment\nselect 'drop table x'",
        "from query('select 1')", "from read_csv('{store}/inside.csv')",
    ],
)  # fmt: skip
def test_what_reads_is_answered(views: ReadOnlyViews, folder: Path, query: str) -> None:
    assert views.table(query.format(store=folder / "store")).num_columns > 0


def test_several_queries_are_refused(views: ReadOnlyViews) -> None:
    """DuckDB would run all and answer the last."""
    line = refused(views.table, "select 1; select 2")
    assert line == "2 queries, but only the last would be answered; give one query at a time"


@pytest.mark.parametrize(
    "query",
    [
        "copy published to '{store}/x.csv'", "with x as (copy published to '{store}/x.csv') from x",
        "explain analyze copy published to '{store}/x.csv'", "explain analyze with x as (copy published to '{store}/x.csv') from x",
        "explain /* */ analyze copy published to '{store}/x.csv'", "copy (pivot published on quantity) to '{store}/x.csv'",
        "from query('with x as (copy published to ''{store}/x.csv'') from x')", "export database '{store}/x'",
        "import database '{store}'", "attach '{store}/x.db'", "install httpfs", "load httpfs", "create table x as select 1",
        "create macro x() as 1", "create temp view x as select 1", "drop view decomposition", "delete from stored.published",
        "with x as (delete from stored.published returning *) from x", "select 1; drop view decomposition",
        "from query('with x as (delete from stored.published returning *) from x')",
        "insert into stored.published select * from published", "set threads = 1", "reset threads", "use main",
        "set variable x = 1", "pragma threads = 1", "pragma enable_profiling", "pragma profile_output = '{store}/x'",
        "call pragma_version()", "checkpoint", "vacuum", "begin", "prepare p as select 1", "pivot published on quantity",
    ],
)  # fmt: skip
def test_what_writes_is_refused_in_one_line(views: ReadOnlyViews, folder: Path, query: str) -> None:
    before = sorted(folder.rglob("*"))
    refused(views.table, query.format(store=folder / "store"))
    assert sorted(folder.rglob("*")) == before
    assert views.table("from published").num_rows > 0


@pytest.mark.parametrize(
    "query",
    [
        "from read_csv('{outside}')", "from '{outside}'", "from read_text('/etc/passwd')", "from glob('/etc/*')",
        "from sniff_csv('{outside}')", "from read_csv('{store}/../outside.csv')", "from 'https://example.com/a.parquet'",
        "from read_parquet('s3://bucket/a.parquet')", "from folder", "select getenv('PATH')",
    ],
)  # fmt: skip
def test_no_file_outside_the_store_is_in_reach(views: ReadOnlyViews, folder: Path, query: str) -> None:
    refused(views.table, query.format(store=folder / "store", outside=folder / "outside.csv"))


def test_the_line_says_what_to_do(views: ReadOnlyViews) -> None:
    line = refused(views.table, "copy published to 'x.csv'")
    assert line == (
        "'copy published to 'x.csv'': sql can only read; give a select, or use kvdrift.open(STORE) in Python for "
        "a connection of your own"
    )
    assert "name the values of a pivot" in refused(views.table, "pivot published on quantity")
    assert "sql takes only the pragmas database_list, show_tables" in refused(views.table, "pragma enable_profiling")
