"""Stored moments of documents: equal to the views' to the last bit, and used only while they are current."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from fixtures.refusals import refused
from fixtures.stored_units import edit, make_unit
from fixtures.unread_pages import blank_pages

from log.store import Store, Unit
from schema.errors import DamagedStoreError
from schema.tables import ACTIONS, DOCUMENT_MOMENTS, DOCUMENTS, STEPS, STUDIES
from sql.catalog import Views, open_views, view_texts
from sql.catalog_file import write_catalog
from sql.contracts import contract
from sql.materialized.storing import materialize_moments
from sql.stored_moments import stored_moments
from sql.view_texts import MATERIALIZED, qualified_texts
from transforms.compaction import compact
from transforms.pipeline import run_derivation
from verification.moments import check_moments

KEYS = {"study": "s", "model": "org/model"}
WINDOWS = {"horizon": 8, "cohort_bound": 4, "early_last": 1, "late_first": 4, "first_block_last": 2,
           "second_block_last": 4, "agreement_run": 2, "saturation_threshold": 0.9}  # fmt: skip
ANOTHER = "f" * 64  # definition
ALL = set(view_texts()) - {"document_moments", "revisions"}  # all but the logs


def append(store: Store, table: str, *rows: dict[str, object]) -> None:
    schema = {"studies": STUDIES, "documents": DOCUMENTS, "actions": ACTIONS}[table].schema
    store.append_rows(table, pa.Table.from_pylist([dict.fromkeys(schema.names) | row for row in rows], schema=schema))


def add_documents(store: Store, *docs: str) -> None:
    given = KEYS | {"split": "evaluation", "stratum": "all"}
    append(store, "documents", *(given | {"doc": doc, "cluster": doc} for doc in docs))


def add_actions(store: Store, revision: int, *names: str) -> None:
    fixed = {"study": "s", "selector": "snapkv", "keep": "1/2", "position_mode": "on", "control": False}
    fixed |= {"prespecified": True, "dropped": False, "action_revision": revision}
    append(store, "actions", *(fixed | {"action": name} for name in names))


def generate(store: Store, *units: Unit) -> None:
    store.append_units(units)
    run_derivation(store.location)


def assert_as_computed(store: Store, views: Iterable[str] = MATERIALIZED) -> None:
    """Assert that views have the same bits with stored moments and without.

    Only views of moments have other texts if moments are stored. It suffices to compare these views for every kind of
    source, and all views once with stored moments and once if some moments wait.
    """
    with open_views(store) as stored, open_views(store, materialized=False) as computed:
        for view in views:
            assert stored.rows(view).equals(computed.rows(view)), view


def waiting(store: Store) -> set[tuple[str, str]]:
    """Documents and actions whose moments are computed."""
    with open_views(store) as views:
        return {(row["doc"], row["action"]) for row in views.table("from computed.waiting").to_pylist()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two documents under two actions, with their moments stored."""
    made = Store.create(tmp_path_factory.mktemp("made") / "store")
    append(made, "studies", KEYS | WINDOWS | {"seed": 1, "study_sha256": "0", "temperature": 1.0})
    add_documents(made, "d0", "d1")
    add_actions(made, 0, "one", "two")
    generate(made, *(make_unit(doc, action=action) for doc in ("d0", "d1") for action in ("one", "two")))
    assert materialize_moments(made, 1) == 4
    return made


@pytest.fixture
def store(made: Store, tmp_path: Path) -> Store:
    """A copy of that store, to write to."""
    return Store.open(shutil.copytree(made.location, tmp_path / "it's a [store]* {x}"))


def test_stored_moments_are_those_that_are_computed(store: Store) -> None:
    assert not stored_moments(store, store.versions()).waits
    with open_views(store) as views:
        assert views.rows("moments").num_rows == 4
    assert_as_computed(store, ALL)
    assert materialize_moments(store, 1) == 0, "nothing waits"


def test_moments_are_kept_in_the_order_of_their_grain(store: Store) -> None:
    """Otherwise the last bits of sums over documents would depend on the order in which moments were stored."""
    add_documents(store, "a")
    generate(store, *(make_unit("a", action=action) for action in ("two", "one")))
    assert materialize_moments(store, 1) == 2
    for materialized in (True, False):
        with open_views(store, kept=MATERIALIZED, materialized=materialized) as views:
            for view in MATERIALIZED:
                keys = views.sql(f"from {contract(view).relation} select {', '.join(contract(view).grain)}").fetchall()
                assert len(keys) >= 6
                assert keys == sorted(keys), view


def test_the_views_of_moments_alone_have_other_texts() -> None:
    plain, *others = qualified_texts(), qualified_texts(stored=True), qualified_texts(stored=True, waiting=True)
    for texts in others:
        changed = {name for name, text in plain.items() if texts[name] != text}
        assert changed == {f"{contract(name).schema}.{name}" for name in MATERIALIZED}


def test_the_views_read_no_steps(store: Store) -> None:
    for file in store.files("steps"):
        pq.write_table(STEPS.schema.empty_table(), file)
    with open_views(store) as views:
        assert views.rows("steps").num_rows == 0
        for view in ("decomposition", "contrasts", "generation_clock", "branch_clock", "entry", "depth_moments"):
            assert views.rows(view).num_rows > 0, view


@pytest.mark.slow
def test_what_got_replicates_or_is_new_is_computed_until_its_moments_are_stored(store: Store) -> None:
    add_documents(store, "d2")
    generate(store, make_unit("d1", action="one", first=4), make_unit("d2", action="two"))
    assert waiting(store) == {("d1", "one"), ("d2", "two")}
    assert_as_computed(store, ALL)
    assert materialize_moments(store, 1 << 20) == 0, "too few steps"
    assert materialize_moments(store, 1) == 2
    assert waiting(store) == set()
    assert_as_computed(store)


def test_a_document_that_becomes_known_after_its_trajectories(store: Store) -> None:
    generate(store, make_unit("late", action="one"))
    assert materialize_moments(store, 1) == 0, "without its row in documents it has no moments"
    generate(store, make_unit("d1", action="two", first=4))
    assert materialize_moments(store, 1) == 1
    add_documents(store, "late")
    assert waiting(store) == {("late", "one")}
    assert_as_computed(store)


@pytest.mark.slow
def test_redone_and_dropped_actions(store: Store) -> None:
    add_actions(store, 1, "one")
    assert_as_computed(store)
    generate(store, make_unit("d0", action="one", action_revision=1))
    assert_as_computed(store)
    assert materialize_moments(store, 1) == 1
    assert_as_computed(store)
    dropped = [
        row | {"action_revision": 1, "dropped": True}
        for row in store.read("actions").to_pylist()
        if row["action"] == "two"
    ]
    append(store, "actions", *dropped)
    assert_as_computed(store, ALL)


def test_moments_of_new_documents_leave_the_steps_of_others_unread(store: Store) -> None:
    add_documents(store, "a")
    generate(store, make_unit("a", action="one"))
    with open_views(store, materialized=False) as views:
        computed = views.rows("moments", doc="a")
    blank_pages(store, "steps", "d0")
    assert materialize_moments(store, 1) == 1
    with open_views(store) as views:
        assert views.rows("moments", doc="a").equals(computed)
        assert views.rows("moments").num_rows == 5


def test_a_call_that_was_broken_off_is_gone_on_with(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    generate(store, *(make_unit(doc, action="one", first=4) for doc in ("d0", "d1")))
    appended, append_moments = [], Store.append_moments
    monkeypatch.setattr("sql.materialized.batches._STEPS_AT_ONCE", 10)

    def broken(store: Store, rows: pa.Table, version: int) -> bool:
        appended.append(rows.num_rows)
        if len(appended) > 1:
            raise KeyboardInterrupt
        return append_moments(store, rows, version)

    monkeypatch.setattr(Store, "append_moments", broken)
    with pytest.raises(KeyboardInterrupt):
        materialize_moments(store, 1)
    assert appended == [1, 1]
    assert waiting(store) == {("d1", "one")}, "the first batch is kept"
    assert_as_computed(store)
    monkeypatch.setattr(Store, "append_moments", append_moments)
    assert materialize_moments(store, 1) == 1
    assert waiting(store) == set()
    assert_as_computed(store)


def test_two_at_once_store_each_row_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    generate(store, make_unit("d1", action="one", first=4))
    append_moments = Store.append_moments

    def late(store: Store, rows: pa.Table, version: int) -> bool:
        monkeypatch.setattr(Store, "append_moments", append_moments)
        assert materialize_moments(store, 1) == 1
        return append_moments(store, rows, version)

    monkeypatch.setattr(Store, "append_moments", late)
    assert materialize_moments(store, 1) == 0
    assert_as_computed(store)
    assert store.row_count("document_moments") == 5


def test_documents_of_compacted_files_in_several_batches(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    compact(store)
    generate(store, make_unit("d1", action="one", first=4))
    monkeypatch.setattr("sql.stored_moments.moments_definition", lambda: ANOTHER)
    monkeypatch.setattr("sql.materialized.batches._STEPS_AT_ONCE", 10)
    assert materialize_moments(store, 1) == 4, "all are computed again"
    assert_as_computed(store)


def test_trajectories_wait_for_their_steps(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A derivation that is killed between its two commits, or that is between them now."""
    commit_derived = Store.commit_derived

    def killed(store: Store, table: str, *given: Any) -> int:
        if table == "steps":
            raise KeyboardInterrupt
        return commit_derived(store, table, *given)

    monkeypatch.setattr(Store, "commit_derived", killed)
    with pytest.raises(KeyboardInterrupt):
        generate(store, make_unit("d1", action="one", first=4))
    assert materialize_moments(store, 1) == 0
    monkeypatch.setattr(Store, "commit_derived", commit_derived)
    run_derivation(store.location)
    assert materialize_moments(store, 1) == 1
    assert_as_computed(store)


def test_moments_of_another_definition_are_not_taken(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an update of kvdrift that computes a moment otherwise."""
    monkeypatch.setattr("sql.stored_moments.moments_definition", lambda: ANOTHER)
    assert len(waiting(store)) == 4, "all"
    assert_as_computed(store)
    assert materialize_moments(store, 1) == 4
    assert waiting(store) == set()
    assert_as_computed(store)


def test_a_version_before_the_moments_is_computed(store: Store) -> None:
    pinned = store.versions()
    with open_views(store) as views:
        before = views.rows("moments")
    generate(store, make_unit("d1", action="one", first=4))
    assert materialize_moments(store, 1) == 1
    with open_views(store, pinned) as views:
        assert views.rows("moments").equals(before)
    later = store.versions() | {"trajectories": pinned["trajectories"], "steps": pinned["steps"]}
    with open_views(store, later) as views:
        assert views.rows("moments").equals(before)


@pytest.mark.parametrize("again", [False, True])
def test_moments_of_a_commit_that_was_lost_are_not_taken(store: Store, again: bool) -> None:  # noqa: FBT001
    """The log of trajectories loses its newest commit, and goes on with other rows to the same version."""
    generate(store, make_unit("d1", action="one", first=4))
    assert materialize_moments(store, 1) == 1
    for table in ("events", "units", "trajectories", "steps"):
        max(Path(store.location, table, "_delta_log").glob("*.json")).unlink()
    shorter = Store(store.location)
    if again:
        generate(shorter, make_unit("d0", action="one", first=4))
        assert shorter.version("trajectories") == store.version("trajectories")
    changed = {("d1", "one"), ("d0", "one")} if again else {("d1", "one")}
    assert waiting(shorter) == changed
    assert_as_computed(shorter)
    assert materialize_moments(shorter, 1) == len(changed)
    assert waiting(shorter) == set()
    assert_as_computed(shorter)


def test_no_moments_are_stored_of_steps_without_units(made: Store, tmp_path: Path) -> None:
    """Steps are found by their units, so steps without a unit would be missing in the means."""
    store = Store.open(shutil.copytree(made.location, tmp_path / "plain"))  # a folder whose name delta-rs takes
    generate(store, make_unit("d1", action="one", first=4))
    steps = DeltaTable(f"{store.location}/steps")
    steps.alter.set_table_properties({"delta.appendOnly": "false"})
    steps.update({"unit": "null"}, predicate="doc = 'd1' and replicate = 5")
    line = refused(materialize_moments, store, 1, error=DamagedStoreError)
    assert line == (
        f"{store.location}: 'steps' has rows that belong to no unit: kvdrift verify {store.location} names what is "
        "damaged"
    )
    assert store.row_count("document_moments") == 4


def test_moments_of_a_unit_that_was_lost_and_has_other_events_now_are_not_taken(store: Store) -> None:
    lost = make_unit("d1", action="one", first=4)
    generate(store, lost)
    assert materialize_moments(store, 1) == 1
    for table in ("events", "units", "trajectories", "steps"):
        max(Path(store.location, table, "_delta_log").glob("*.json")).unlink()
    shorter = Store(store.location)
    generate(shorter, edit(lost, "delta", 3, 0.25))
    assert waiting(shorter) == {("d1", "one")}
    assert_as_computed(shorter)
    assert materialize_moments(shorter, 1) == 1
    assert_as_computed(shorter)


def test_a_log_of_another_generator_keeps_none(tmp_path: Path) -> None:
    made = Store.create(tmp_path / "store")
    add_documents(made, "d0")
    generate(made, make_unit("d0", action="one"))
    assert materialize_moments(made, 1) == 0


def test_a_catalogue_has_the_moments(store: Store) -> None:
    import duckdb  # noqa: PLC0415 - a plain client

    generate(store, make_unit("d1", action="one", first=4))
    with (
        duckdb.connect(str(write_catalog(store)), read_only=True) as client,
        open_views(store, materialized=False) as own,
    ):
        for view in ("moments", "position_moments", "lag_moments", "depth_moments"):
            rows = Views(client, {}).rows(view)
            assert rows.equals(own.rows(view)), view


def test_verify_compares_them_with_steps(store: Store) -> None:
    versions = store.versions()
    assert check_moments(store, versions).faults == ()
    with open_views(store) as views:
        rows = views.table("select * exclude (moments_version), 9 as moments_version from internal.document_moments")
    wrong = pa.Table.from_pylist(
        [row | {"scalar_entry": 0.25} for row in rows.to_pylist()], schema=DOCUMENT_MOMENTS.schema
    )
    assert store.append_moments(wrong, versions["document_moments"])
    (fault,) = check_moments(store, store.versions()).faults
    assert str(fault).startswith("view moments (study=s, model=org/model, doc=d0, action=one): entry is stored as 0.25")
