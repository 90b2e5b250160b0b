"""The catalogue over real stores: pinned versions, a file that any DuckDB client opens, errors of one line."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import duckdb
import pyarrow as pa
import pytest
from fixtures.awkward_logs import awkward_log
from fixtures.stored_units import derive
from fixtures.swrb_events import unit
from fixtures.table_rows import add_rows
from fixtures.unread_pages import blank_pages

from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError, KvdriftError, OperationError
from kvdrift.schema.tables import MEASURES
from kvdrift.sql.catalog import Views, be_quiet, describe_views, open_views
from kvdrift.sql.catalog_file import write_catalog
from kvdrift.sql.contracts import contracts
from kvdrift.transforms.compaction import compact

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOG = awkward_log("long agreements")
DOCS = sorted({row["doc"] for row in LOG.documents})
FOLDER = "it's a [store]* {x} study=1"


def append_document(store: Store, doc: str) -> None:
    """Append a document, its units and its derived rows."""
    add_rows(store, "documents", *(row for row in LOG.documents if row["doc"] == doc))
    for action in ("one", "two"):
        events = [row for row in LOG.events if row["doc"] == doc and row["action"] == action]
        store.append_units([unit(events, "plain", 40)])
    derive(store)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store in a folder whose name has characters that SQL and glob patterns treat specially."""
    made = Store.create(tmp_path_factory.mktemp("made") / FOLDER)
    append_document(made, DOCS[0])
    return made


@pytest.fixture(scope="module")
def catalog(made: Store) -> Path:
    """The catalogue of that store, to be read."""
    return write_catalog(made)


@pytest.fixture(scope="module")
def opened(made: Store) -> Iterator[Views]:
    """Views of that store, to be asked."""
    with open_views(made) as views:
        yield views


@pytest.fixture
def store(made: Store, tmp_path: Path) -> Store:
    """A copy of the store, for tests that write to it."""
    return Store.open(shutil.copytree(made.location, tmp_path / FOLDER))


def test_a_view_set_stays_at_its_versions(store: Store) -> None:
    pinned = store.versions()
    with open_views(store) as before:
        append_document(store, DOCS[1])
        assert before.versions == pinned
        assert set(before.rows("decomposition", stratum="pooled").column("documents").to_pylist()) == {1}
        with open_views(store) as after, open_views(store, pinned) as again:
            assert set(after.rows("decomposition", stratum="pooled").column("documents").to_pylist()) == {2}
            assert again.rows("moments").equals(before.rows("moments"))


@pytest.mark.slow
def test_pooled_means_do_not_depend_on_the_order_of_rows(store: Store) -> None:
    """Sums of 120 random numbers in 6 random orders: unless ordered, some differ in their last bit."""
    copies = "* replace (doc || i as doc, stratum || i % 3 as stratum, random() as mismatch, random() as diverged)"
    views = ("stratum_moments", "decomposition", "frontier", "summary")
    with open_views(store, kept=["moments"]) as opened:
        opened.connection.execute("select setseed(0.5)")
        opened.connection.execute(f"create table copied as select {copies} from moments, range(120) as t(i)")  # noqa: S608
        found = []
        for _ in range(6):
            opened.connection.execute("create or replace table moments as from copied order by random()")
            found.append([opened.rows(view) for view in views])
    assert found[0][1].num_rows > 0
    assert all(rows == found[0] for rows in found)


def test_rows_of_some_documents_are_the_same_in_any_files(store: Store) -> None:
    append_document(store, DOCS[1])
    wanted = [{"doc": DOCS[1]}, {"doc": [DOCS[1], "none"], "replicate": 0}, {"doc": DOCS}, {"doc": "none"}]
    found = []
    for files in ("several", "one"):
        if files == "one":
            compact(store)
        with open_views(store) as views:
            found += [[views.rows(table, **equal) for table in ("events", "trajectories", "steps") for equal in wanted]]
    assert found[0] == found[1]
    assert [rows.num_rows > 0 for rows in found[0]] == [True, True, True, False] * 3


def test_rows_of_some_documents_leave_the_pages_of_others_unread(store: Store) -> None:
    """The bounds in footers tell: zeros in the place of other documents' pages do not show."""
    append_document(store, DOCS[1])
    with open_views(store) as views:
        there = [views.rows(table, doc=DOCS[1]) for table in ("events", "trajectories", "steps")]
    for table in ("events", "trajectories", "steps"):
        blank_pages(store, table, DOCS[0])
    with open_views(store) as views:
        assert [views.rows(table, doc=DOCS[1]) for table in ("events", "trajectories", "steps")] == there
        with pytest.raises(KvdriftError):
            views.rows("steps", doc=DOCS[0])


def test_more_threads_give_the_same_rows(store: Store) -> None:
    with open_views(store) as one, open_views(store, threads=2) as two:
        assert one.rows("trajectories").equals(two.rows("trajectories"))
        assert one.rows("decomposition").num_rows == two.rows("decomposition").num_rows
    with pytest.raises(InputError, match="threads is 0"):
        open_views(store, threads=0)


def test_types_do_not_depend_on_whether_there_are_rows(opened: Views, tmp_path: Path) -> None:
    with open_views(Store.create(tmp_path / "empty")) as empty:
        for view in ("events", "moments", "decomposition", "contrasts", "plan"):
            assert opened.sql(f"from {view}").types == empty.sql(f"from {view}").types, view


PLAIN_CLIENT = """
import sys
sys.path[:] = [path for path in sys.path if path]
import duckdb
with duckdb.connect(sys.argv[1], read_only=True) as connection:
    views = "select schema_name || '.' || view_name from duckdb_views() where not internal"
    for (view,) in connection.sql(views).fetchall():
        connection.sql(f"from {view}").fetchall()
    print(connection.sql("select documents from decomposition where stratum = 'pooled' limit 1").fetchall()[0][0])
    print(connection.sql("select comment from duckdb_views() where view_name = 'saturation'").fetchall()[0][0])
with duckdb.connect() as connection:
    connection.execute("attach '" + sys.argv[1].replace("'", "''") + "' as study (read_only)")
    print(connection.sql("select count(*) from study.contrasts").fetchall()[0][0])
assert "sql" not in sys.modules and "schema" not in sys.modules
"""


def test_views_need_a_temporary_folder_with_space(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_views(store).close()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    for needs_it in (open_views, write_catalog):
        with pytest.raises(OperationError, match=r"no temporary file can be written \(.*\); set TMPDIR to a folder"):
            needs_it(store)


def test_a_plain_client_opens_the_catalogue_from_anywhere(catalog: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [sys.executable, "-I", "-c", PLAIN_CLIENT, str(catalog)]
    found = subprocess.run(command, cwd=elsewhere, env={}, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    documents, comment, contrasts = found.stdout.splitlines()
    assert (documents, contrasts) == ("1", "4")  # two ordered pairs, one stratum and pooled
    assert comment == {one.view: one.description for one in describe_views()}["saturation"]


def test_a_copied_catalogue_does_not_read_the_original(made: Store, catalog: Path, tmp_path: Path) -> None:
    copy = Store.open(shutil.copytree(catalog.parent, tmp_path / "copy"))
    written_for = re.escape(
        f"this catalogue was written for the store {made.location}; for a copy in FOLDER, run kvdrift derive"
    )
    with duckdb.connect(f"{copy.location}/catalog.duckdb", read_only=True) as client:
        for view in ("events", "entry"):
            with pytest.raises(duckdb.Error, match=written_for):
                client.sql(f"from {view}").fetchall()
    with duckdb.connect(str(write_catalog(copy)), read_only=True) as client:
        assert client.sql("from entry").fetchall()


# Views that answer from the catalogue alone.
CARRIED = (
    "summary", "frontier", "decomposition", "contrasts", "saturation", "local_agreement", "branch_windows",
    "generation_blocks", "generation_gaps", "generation_gap_change", "eos_partition", "eos_contrasts", "moments", "answers",
    "estimates", "calibration", "sequence", "plan", "documents", "actions", "units", "studies", "windows", "revisions",
    "published", "published_comparison", "tokens",
)  # fmt: skip


@pytest.mark.slow
def test_a_catalogue_moved_alone_answers_what_it_carries(store: Store, tmp_path: Path) -> None:
    catalog = shutil.copy(write_catalog(store), tmp_path / "moved.duckdb")
    with open_views(store) as views:
        there = {view: views.rows(view) for view in CARRIED}
    assert all(there[view].num_rows for view in ("summary", "contrasts", "documents", "units"))
    shutil.rmtree(store.location)
    with duckdb.connect(str(catalog), read_only=True) as client:
        for view, rows in there.items():
            order = ", ".join(contracts()[view].grain)
            assert client.sql(f"from {view} order by {order}").to_arrow_table().equals(rows), view
        with pytest.raises(duckdb.IOException, match="No files found"):
            client.sql("from trajectories")


def test_very_many_documents_and_their_means_stay_in_the_files(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdrift.sql.catalog_file.MOST_DOCUMENTS", 0)
    with open_views(store) as views:
        there = views.rows("decomposition")
    written = write_catalog(store)
    with duckdb.connect(str(written), read_only=True) as client:
        order = ", ".join(contracts()["decomposition"].grain)
        rows = client.sql(f"from decomposition order by {order}").to_arrow_table()
        for name in there.column_names:  # a client sums in the order of its own threads, which may move a last bit
            own, stored = rows[name].to_pylist(), there[name].to_pylist()
            assert own == (pytest.approx(stored, rel=1e-12) if pa.types.is_floating(there[name].type) else stored), name
    with duckdb.connect(shutil.copy(written, tmp_path / "copied.duckdb"), read_only=True) as client:
        with pytest.raises(duckdb.Error, match="this catalogue was written for the store"):
            client.sql("from decomposition").fetchall()
        for table in ("documents", "units"):
            with pytest.raises(duckdb.Error, match="this catalogue was written for the store"):
                client.sql(f"from {table}").fetchall()
        assert client.sql("from actions").fetchall() == []  # this store has none, and no file is asked


def test_views_and_catalogue_draw_no_progress_on_the_output(store: Store) -> None:
    """DuckDB would, in a process without a main file, which it takes for a person's."""
    script = f"""
from kvdrift.log.store import Store
from kvdrift.sql import catalog, catalog_file

def show(connection, *_, **__):
    print(connection.execute("select current_setting('enable_progress_bar')").fetchall())
    return ()

with catalog.open_views(Store({store.location!r})) as views:
    show(views.connection)
catalog_file.refuse_unlike_units = show
catalog_file.write_catalog(Store({store.location!r}))
"""
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == 2 * "[(False,)]\n"


@pytest.mark.slow
def test_the_catalogue_is_replaced_under_its_readers(store: Store) -> None:
    query = "select max(documents) from decomposition"
    with duckdb.connect(str(write_catalog(store)), read_only=True) as reader:
        append_document(store, DOCS[1])
        write_catalog(store)
        assert reader.sql(query).fetchall() == [(1,)]
    with open_views(store) as views:
        assert views.sql(query).fetchall() == [(2,)]
    left = [path.name for path in write_catalog(store).parent.iterdir() if path.is_file()]
    assert left == ["catalog.duckdb"]


def test_rows_are_selected_by_value_and_sorted_by_grain(opened: Views) -> None:
    rows = opened.rows("entry", stratum="pooled", action="one").column("t").to_pylist()
    assert rows == list(range(1, 41))
    assert opened.rows("entry", ("t",), stratum="pooled", action="one").to_pydict() == {"t": rows}
    assert opened.rows("trajectories", tau=None).num_rows < opened.rows("trajectories").num_rows
    assert opened.rows("trajectories", doc="'; drop view steps; --").num_rows == 0


@pytest.mark.parametrize(
    ("query", "part"),
    [
        ("select nonsense from decomposition", "nonsense"),
        ("selekt 1", "selekt"),
        ("select * from decompositon", "Did you mean"),
        ("select cast(action as integer) from decomposition", "Could not convert"),
        ("", "query is empty"),
        (
            "select split from units",
            r'"split" not found .*; documents has it: add join documents using \(study, model, doc\)$',
        ),
        ("select e.stratum from events as e", '"stratum"; documents has it'),
        ("select keep from trajectories", '"keep" .*; actions has it: add join actions using'),
        ("select splt from documents", "Candidate bindings: .*split"),
    ],
)
def test_a_wrong_query_is_one_line(opened: Views, query: str, part: str) -> None:
    with pytest.raises(InputError, match=part) as caught:
        opened.table(query)
    assert "\n" not in str(caught.value)


def test_the_join_that_an_error_names_answers(opened: Views) -> None:
    rows = opened.table("select distinct split from units join documents using (study, model, doc)")
    assert rows["split"].to_pylist()
    assert opened.table("select keep from trajectories join actions using (study, action)").column_names == ["keep"]


def test_unknown_names_are_answered_with_the_nearest(made: Store, opened: Views) -> None:
    with pytest.raises(InputError, match="did you mean 'decomposition'"):
        opened.rows("decompostion")
    with pytest.raises(InputError, match="did you mean 'stratum'"):
        opened.rows("decomposition", strata="x")
    with pytest.raises(InputError, match="no column 'mismach'; did you mean 'mismatch'"):
        opened.rows("decomposition", ("mismach",))
    with pytest.raises(InputError, match="did you mean 'steps'"):
        open_views(made, {"step": 0})
    with pytest.raises(InputError):
        open_views(made, {"steps": 999})


# Those that scripts may rely on, by these names and in the schema ``main``.
PROMISED = {
    "events", "documents", "actions", "units", "published", "trajectories", "steps", "moments", "decomposition", "contrasts",
    "entry", "generation_clock", "generation_blocks", "generation_gaps", "generation_gap_change", "branch_clock",
    "branch_windows", "local_agreement", "saturation", "eos_partition", "eos_contrasts", "branch_profile",
    "identified_interval", "action_ordering", "swrb", "swrb_efficiency", "estimates", "calibration", "plan", "sequence",
    "answers", "frontier", "summary", "published_comparison", "tokens", "trajectory_text",
}  # fmt: skip


NUMBERS = {"INTEGER", "BIGINT", "HUGEINT", "FLOAT", "DOUBLE", "DOUBLE[]"}


def test_described_views_are_those_that_people_query() -> None:
    described = describe_views()
    assert {one.view for one in described} == {name for name, one in contracts().items() if not one.internal}
    assert {one.view for one in described} >= PROMISED
    assert all(one.description and all(one.columns.values()) for one in described)


def test_every_column_says_what_it_is(opened: Views, catalog: Path) -> None:
    query = """
        select schema_name || '."' || table_name || '"', column_name, comment from duckdb_columns()
        where schema_name in ('main', 'internal') and not internal
    """
    with duckdb.connect(str(catalog), read_only=True) as client:
        for connection in (opened.connection, client):
            said = {(relation, column): comment for relation, column, comment in connection.sql(query).fetchall()}
            assert said == {
                (one.relation, name): text for one in contracts().values() for name, text in one.comments.items()
            }
            assert all(said.values())
            lists = connection.sql("show tables").fetchall()
            assert {name for (name,) in lists} == {one.view for one in describe_views()}


def test_every_number_has_a_unit(opened: Views) -> None:
    """The unit is of a closed list; texts, flags and times have no unit."""
    kinds = "select schema_name || '.\"' || table_name || '\"', column_name, data_type from duckdb_columns()"
    types = {(relation, column): kind for relation, column, kind in opened.sql(kinds).fetchall()}
    for one in contracts().values():
        numbers = {name for name in one.columns if types[one.relation, name] in NUMBERS}
        assert one.units.keys() == numbers, one.view
        assert set(one.units.values()) <= set(MEASURES), one.view
    comments = contracts()["decomposition"].comments
    assert comments["mean_entry"].endswith(" without divergence [tokens]")
    assert comments["mismatch"].endswith(" [share, 0..1]")
    assert comments["split"] == contracts()["decomposition"].columns["split"]
    assert "[" not in contracts()["events"].comments["replicate"], "a number that only tells apart"


def test_published_numbers_are_numbers_of_known_quantities(opened: Views) -> None:
    printed = opened.rows("published", model="Llama-3.1-8B-Instruct", quantity="saturation_99", action="snapkv-90")
    (row,) = printed.to_pylist()
    assert (row["value"], row["low"], row["high"], row["unit"]) == (28.44, 26.68, 30.24, "%")
    assert (row["level"], row["baseline"], row["x"]) == (0.99375, None, None)
    shares = opened.table("select min(value), max(value) from published where quantity = 'exposure_share'")
    assert [column[0].as_py() for column in shares.columns] == [84.7, 92.1]
    blocks = opened.table("select distinct x from published where quantity = 'generation_clock_tv_gap'")
    assert set(blocks.column("x").to_pylist()) == {"1-32", "33-64", "65-128"}


def test_a_notebook_without_widgets_has_no_progress_bar_to_turn_off() -> None:
    class InNotebook:
        def execute(self, text: str) -> None:
            raise duckdb.InvalidInputException(f"{text}: required package 'ipywidgets' is missing")

    be_quiet(InNotebook())  # type: ignore[arg-type]  # it has what is called
