"""``kvdrift ingest``: correct logs go in whole and once, in any format and order; errors are named and stay out."""

from __future__ import annotations

import itertools
import json
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from fixtures.altered_events import with_column
from fixtures.dealt_files import dealt
from fixtures.event_logs import (
    ACTION_NAMES,
    DOCS,
    LOG,
    PAIR_KEY,
    H,
    Run,
    canonical,
    command,
    documents_csv,
    edit,
    make_log,
    place,
    stored,
    with_kinds,
    without,
    write,
)
from fixtures.refusals import refused
from fixtures.table_rows import add_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrift.ingestion import files as event_files
from kvdrift.ingestion import formats, intake
from kvdrift.ingestion.ingest import ingest
from kvdrift.log.store import Store, Unit
from kvdrift.schema.tables import EVENTS, GROUP_KEY
from kvdrift.sql.catalog import open_views
from kvdrift.transforms.pipeline import run_derivation

NAMES = {"study": "ext", "model": "org/m"}

# What is right goes in


def test_a_log_comes_back_as_it_was_and_gives_numbers(tmp_path: Path, run: Run) -> None:
    report = run(LOG)
    assert (report.findings, report.remarks) == ([], [])
    assert (report.taken.units, report.taken.events) == (8, LOG.num_rows)
    assert stored(tmp_path / "store").equals(canonical(LOG))
    store = Store.open(tmp_path / "store")
    assert run_derivation(store.location).events == LOG.num_rows
    with open_views(store) as views:
        rows = views.sql(
            "select action, documents, mismatch, fixed_history_tv from decomposition "
            "where stratum = 'S0' and split = 'evaluation' order by action"
        ).fetchall()
    own = LOG.filter(pc.and_(pc.equal(LOG["doc"], "d2"), pc.equal(LOG["action"], "half")))
    mismatch = np.mean(own["x_token"].to_numpy() != own["y_token"].to_numpy())
    assert rows[0] == ("full", 1, 0.0, 0.0)
    assert rows[1][:2] == ("half", 1)
    assert rows[1][2] == pytest.approx(mismatch)
    assert rows[1][3] == pytest.approx(own["f"].to_numpy().mean(dtype=float))
    assert mismatch > 0


def test_rows_that_ingest_writes_beside_the_events(tmp_path: Path, run: Run) -> None:
    run(LOG)
    store = Store.open(tmp_path / "store")
    documents = {row["doc"]: row for row in store.read("documents").to_pylist()}
    assert set(documents) == set(DOCS)
    wanted = {"study": "ext", "model": "org/m", "stratum": "S1", "split": "evaluation", "cluster": "d3", "task": None}
    assert wanted.items() <= documents["d3"].items()
    actions = {row["action"]: row for row in store.read("actions").to_pylist()}
    assert [actions[name]["control"] for name in ACTION_NAMES] == [True, False]
    assert [actions[name]["keep"] for name in ACTION_NAMES] == ["all", "unknown"]
    assert {(row["selector"], row["prespecified"]) for row in actions.values()} == {("external", True)}
    assert run(make_log(actions=["full", "half", "floor"])).findings == []
    floor = next(row for row in store.read("actions").to_pylist() if row["action"] == "floor")
    assert (floor["selector"], floor["control"]) == ("numerics", False), "it need not be 0"
    unit = store.units().to_pylist()[0]
    assert (unit["first_replicate"], unit["replicates"], unit["horizon"], unit["seed"]) == (0, 4, H, None)


def test_an_action_that_a_frozen_plan_does_not_name_is_exploratory(tmp_path: Path, run: Run) -> None:
    plans = [
        NAMES | {"plan": json.dumps({"actions": actions}), "plan_revision": revision}
        for revision, actions in ((1, ["half"]), (0, ["late"]))
    ]
    add_rows(Store.create(tmp_path / "store"), "plans", *plans)
    assert run(make_log(actions=["full", "half", "late"])).findings == []
    rows = Store.open(tmp_path / "store").read("actions").to_pylist()
    assert {row["action"]: row["prespecified"] for row in rows} == {"full": True, "half": True, "late": False}


def test_an_action_that_is_known_keeps_its_row(tmp_path: Path, run: Run) -> None:
    add_rows(Store.create(tmp_path / "store"), "actions", {"study": "ext", "action": "half", "selector": "snapkv"})
    assert run(LOG).findings == []
    rows = {row["action"]: row["selector"] for row in Store.open(tmp_path / "store").read("actions").to_pylist()}
    assert rows == {"full": "external", "half": "snapkv"}


def wide(log: pa.Table) -> pa.Table:
    """The same log as others may write it: int64, float64, flags as integers, dictionaries, large strings."""
    shapes = {
        "study": pa.dictionary(pa.int8(), pa.string()), "model": pa.large_string(),
        "doc": pa.dictionary(pa.int32(), pa.large_string()), "action": pa.string_view(), "replicate": pa.uint64(),
        "t": pa.int16(), "x_token": pa.int64(), "y_token": pa.uint32(), "delta": pa.float64(), "f": pa.float64(),
        "x_eos": pa.uint8(),
    }  # fmt: skip
    return log.cast(
        pa.schema([pa.field(name, shapes.get(name, log.schema.field(name).type)) for name in log.column_names])
    )


def save_ipc(log: pa.Table, path: Path) -> None:
    with pa.ipc.new_file(str(path), log.schema) as writer:
        writer.write_table(log, max_chunksize=100)


def plain(log: pa.Table) -> pa.Table:
    """Without string views: Arrow does not write them to Parquet."""
    return with_column(log, "action", log["action"].cast(pa.string()))


@pytest.mark.parametrize(
    "save",
    [
        lambda log, path: save_ipc(log.unify_dictionaries(), path),
        lambda log, path: pq.write_table(plain(log), path, row_group_size=77),
    ],
    ids=["IPC", "Parquet"],
)
@pytest.mark.parametrize("order", ["sorted", "reversed", "shuffled", "by t"])
@pytest.mark.by_default("shuffled-IPC", "by t-Parquet")
def test_formats_types_and_orders(
    tmp_path: Path, save: Callable[[pa.Table, Path], None], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_files, "PORTION_ROWS", 60)
    monkeypatch.setattr(formats, "SLICE_ROWS", 35)
    monkeypatch.setattr(intake, "UNITS_PER_COMMIT", 3)
    rows = LOG.num_rows
    places = {"sorted": np.arange(rows), "reversed": np.arange(rows)[::-1], "shuffled": np.random.default_rng(1).permutation(rows),
              "by t": np.argsort(LOG["t"].to_numpy(), kind="stable")}  # fmt: skip
    log = wide(LOG.take(pa.array(places[order]))).append_column("extra", pa.array(np.zeros(rows)))
    log = log.select(log.column_names[::-1])
    save(log, tmp_path / "log.data")
    report = ingest(tmp_path / "store", [tmp_path / "log.data"], documents_csv(tmp_path))
    assert report.findings == []
    assert report.remarks == [f"{tmp_path}/log.data: columns ignored: extra"]
    assert stored(tmp_path / "store").equals(canonical(LOG))


@pytest.mark.parametrize("write_ipc", [False, True])
def test_what_memory_does_not_take_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, write_ipc: bool
) -> None:
    """A group has 48 rows, the log 384; even a small file may claim any number of rows."""
    path, shuffled = tmp_path / "log", tmp_path / "shuffled"
    order = pa.array(np.random.default_rng(1).permutation(LOG.num_rows))
    for target, rows in ((path, LOG), (shuffled, LOG.take(order))):
        if write_ipc:
            with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
                writer.write_table(rows, max_chunksize=40)
        else:
            pq.write_table(rows, target)
    monkeypatch.setattr(formats, "SLICE_ROWS", 40)
    monkeypatch.setattr(formats, "MOST_ROWS", 48)
    assert sum(len(rows) for rows in _portions(path)) == LOG.num_rows
    ordered = "more than 48 rows that are not ordered by study, model, doc, action; order them, or give some replicates"
    assert refused(_portions, shuffled) == f"{shuffled}: {ordered} in a file of their own"
    monkeypatch.setattr(formats, "MOST_ROWS", 47)
    assert "48 rows of ('ext', 'org/m', 'd0', 'full'), must be 47 at most; give some repl" in refused(_portions, path)
    monkeypatch.setattr(event_files, "MOST_GROUPS", 3)
    assert "more than 3 groups of study, model, doc, action; split the file" in refused(_portions, path)
    monkeypatch.setattr(formats, "MOST_BYTES", 20)
    line = refused(_portions, path)
    assert ("a batch of 40 rows" if write_ipc else "column 'study' has") in line


def _portions(path: Path) -> list[event_files.EventRows]:
    file = event_files.EventFile(path)
    return list(file.portions(file.groups()))


def test_the_log_of_our_own_generator_is_right(finished: Path, tmp_path: Path) -> None:
    store = Store.open(finished)
    write(tmp_path / "documents.parquet", store.read("documents"))
    report = ingest(tmp_path / "store", [finished / "events"], tmp_path / "documents.parquet")
    assert report.findings == []
    assert all(remark.endswith("columns ignored: kl, kl_own, top1") for remark in report.remarks)
    assert stored(tmp_path / "store").equals(canonical(store.read("events").drop_columns(["kl", "kl_own", "top1"])))
    documents = [Store.open(place).read("documents").sort_by("doc") for place in (finished, tmp_path / "store")]
    assert documents[0].filter(pc.is_in(documents[0]["doc"], documents[1]["doc"])).equals(documents[1])


@pytest.mark.parametrize(
    ("save", "kind", "weight"),
    [
        (pq.write_table, pa.string(), pa.float64()), (pq.write_table, pa.dictionary(pa.int8(), pa.string()), pa.float16()),
        (save_ipc, pa.large_string(), pa.null()), (save_ipc, pa.string_view(), pa.float64()),
        (save_ipc, pa.dictionary(pa.int32(), pa.large_string()), pa.float16()),
    ],
    ids=("text", "coded", "large text", "views", "coded large text"),
)  # fmt: skip
@pytest.mark.by_default("coded", "large text", "views")
def test_a_log_may_say_that_its_pairs_are_coupled(
    tmp_path: Path, save: Callable[[pa.Table, Path], None], kind: pa.DataType, weight: pa.DataType
) -> None:
    shapes = {"kind": kind, "weight": weight}
    log = with_kinds(LOG.slice(0, 48))
    schema = pa.schema([pa.field(field.name, shapes.get(field.name, field.type)) for field in log.schema])
    columns = [
        pa.nulls(48, weight) if name == "weight" else log[name].cast(schema.field(name).type)
        for name in log.column_names
    ]
    save(pa.table(columns, schema=schema), tmp_path / "log")
    report = ingest(tmp_path / "store", [tmp_path / "log"], documents_csv(tmp_path))
    assert (report.findings, report.remarks) == ([], [])
    assert stored(tmp_path / "store").equals(canonical(LOG.slice(0, 48)))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("kind", "scan", "row 31: kind is 'scan', must be 'coupled': ingest takes coupled pairs only"),
        ("kind", None, "row 31: kind is None, must be 'coupled': ingest takes coupled pairs only"),
        ("weight", 0.25, "row 31: weight is 0.25, must be null: ingest takes coupled pairs only"),
    ],
)
def test_other_kinds_of_events_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str, value: Any,
    message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(formats, "SLICE_ROWS", 20)
    log = with_kinds(LOG)
    values = log[column].to_pylist()
    values[30:40] = [value] * 10
    paths = (
        write(tmp_path / "other.parquet", with_column(log, column, values)),
        write(tmp_path / "log.parquet", make_log(study="b")),
    )
    code, out, err = command(capsys, *paths, "--store", tmp_path / "store", "--documents", documents_csv(tmp_path))
    assert (code, err) == (2, f"kvdrift: {tmp_path}/other.parquet: {message}\n")
    assert "files:         2, 1 not readable, or not to the end" in out
    assert "went in:       8 units" in out


NO_TEXT = pc.cast(pa.array([b"\xff"] * 4, pa.binary()), pa.string(), safe=False)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("kind", pa.array([1] * 4), "column 'kind' is int64, must be string"),
        ("weight", pa.array([""] * 4), "column 'weight' is string, must be float or double"),
        ("doc", NO_TEXT, "cannot be read as Parquet: 'utf-8' codec can't decode"),
    ],
)
def test_columns_of_other_types_are_refused(tmp_path: Path, column: str, values: pa.Array, message: str) -> None:
    path = write(tmp_path / "log.parquet", with_column(with_kinds(LOG.slice(0, 4)), column, values))
    (finding,) = ingest(tmp_path / "store", [path]).findings
    assert str(finding).startswith(f"{path}: {message}")


def test_units_of_the_other_estimator_are_not_in_the_way(tmp_path: Path, run: Run) -> None:
    """A store that a generator filled with residual branches takes the log's pairs of the same replicates."""
    names = {"study": "ext", "model": "org/m", "doc": "d0", "action": "half"}
    still = {"x_token": 5, "y_token": 5, "delta": 0.0, "f": 0.0, "x_eos": False, "y_eos": False, "weight": 0.0}
    rows = [{**names, "kind": "scan", "replicate": 0, "t": t, **still} for t in range(1, H + 1)]
    record = {**names, "estimator": "swrb", "first_replicate": 0, "replicates": 1, "horizon": H}
    Store.create(tmp_path / "store").append_units([Unit(record, pa.Table.from_pylist(rows, schema=EVENTS.schema))])
    (finding,) = run(make_log(["d1"], ["full"], [0], horizon=H - 1)).findings
    assert finding.kind == "horizon", "their horizon is the study's"
    report = run(LOG)
    assert (report.findings, report.taken.units, report.present.units) == ([], 8, 0)
    there = stored(tmp_path / "store")
    assert there.filter(pc.equal(there["kind"], "coupled")).equals(canonical(LOG))


# Once, and growing


def test_again_changes_nothing(tmp_path: Path, run: Run) -> None:
    run(LOG)
    versions = Store.open(tmp_path / "store").versions()
    report = run(LOG, LOG)
    assert (report.taken.units, report.present.units, report.present.events) == (0, 16, 2 * LOG.num_rows)
    assert Store.open(tmp_path / "store").versions() == versions
    other = ingest(tmp_path / "other", [tmp_path / "log0.parquet", tmp_path / "log1.parquet"], documents_csv(tmp_path))
    assert (other.taken.units, other.present.units, other.findings) == (8, 8, []), "the first file waits for its commit"
    assert stored(tmp_path / "other").equals(canonical(LOG))


@pytest.mark.parametrize("examples", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_any_files_in_any_order_give_the_same_rows(tmp_path: Path, examples: int) -> None:
    """Whole replicates are dealt out to files, some to several; the rows of each file come in any order."""
    keys = zip(*(LOG.column(name).to_pylist() for name in PAIR_KEY[:-1]), strict=True)  # all but t
    places = defaultdict[tuple[Any, ...], list[int]](list)
    for row, key in enumerate(keys):
        places[key].append(row)
    replicates, folders = list(places.values()), itertools.count()

    @settings(max_examples=examples)
    @given(dealt(len(replicates)), st.permutations(range(LOG.num_rows)))
    def check(whole: tuple[list[list[int]], list[list[int]]], order: list[int]) -> None:
        dealt_replicates, calls = whole
        folder = tmp_path / str(next(folders))
        folder.mkdir()
        files = []
        for number, own in enumerate(dealt_replicates):
            rows = {row for replicate in own for row in replicates[replicate]}
            files.append(write(folder / f"{number}.parquet", LOG.take([row for row in order if row in rows])))
        for call in calls:
            assert ingest(folder / "store", [files[number] for number in call], documents_csv(folder)).findings == []
        assert stored(folder / "store").equals(canonical(LOG))
        units = Store.open(folder / "store").units()
        assert sum(units["replicates"].to_pylist()) == len(replicates)

    check()


def test_replicates_grow_and_fill_gaps(tmp_path: Path, run: Run) -> None:
    first = run(make_log(replicates=[2, 3, 6]))
    assert (first.taken.units, first.taken.events) == (16, 8 * 3 * H), "two runs of replicates are two units"
    report = run(make_log(replicates=range(9)))
    assert (report.taken.units, report.taken.events, report.present.events) == (8, 8 * 6 * H, 8 * 3 * H)
    assert report.findings == []
    assert stored(tmp_path / "store").equals(canonical(make_log(replicates=range(9))))
    units = Store.open(tmp_path / "store").units().filter((pc.field("doc") == "d0") & (pc.field("action") == "half"))
    spans = sorted((row["first_replicate"], row["replicates"]) for row in units.to_pylist())
    assert spans == [(0, 2), (2, 2), (4, 2), (6, 1), (7, 2)]
    assert run(make_log(replicates=[1, 2])).present.units == 8


@pytest.mark.parametrize("together", [True, False])
def test_a_conflicting_second_file(tmp_path: Path, run: Run, together: bool) -> None:  # noqa: FBT001
    open_at_7 = next(
        row for row in LOG.to_pylist() if row["action"] == "half" and row["t"] == 7 and not row["x_eos"] | row["y_eos"]
    )
    key = {name: open_at_7[name] for name in ("doc", "action", "replicate")} | {"t": 5}
    other = make_log(replicates=range(6))
    value = other["delta"][place(other, **key)].as_py() / 2 + 0.25
    other = edit(edit(other, {"delta": value, "x_token": 40, "y_token": 41}, **key), {"f": 0.125}, **(key | {"t": 7}))
    if together:
        report = run(LOG, other)
    else:
        run(LOG)
        report = run(other)
    (finding,) = report.findings
    assert finding.kind == "conflict"
    assert finding.key == {"study": "ext", "model": "org/m", **key}
    assert finding.count == 2
    assert "x_token is 40, but the store has" in finding.text
    assert report.kept_out.units == 1
    assert report.kept_out.events == 6 * H
    grown = make_log(replicates=range(6))
    for replicate in (4, 5):
        grown = without(grown, doc=key["doc"], action="half", replicate=replicate)
    assert stored(tmp_path / "store").equals(canonical(grown))


def test_a_dropped_action_takes_events_as_a_new_revision_alone(tmp_path: Path, run: Run) -> None:
    run(LOG)
    store = Store.open(tmp_path / "store")
    (row,) = (row for row in store.read("actions").to_pylist() if row["action"] == "half")
    add_rows(store, "actions", row | {"action_revision": 1, "dropped": True})
    before = store.version("events")
    report = run(make_log(replicates=range(6)))
    assert {(finding.kind, finding.key["action"]) for finding in report.findings} == {("revision", "half")}
    assert "'half' was dropped" in report.findings[0].text
    assert (report.taken.units, report.kept_out.units) == (4, 4), "the other action grows"
    assert store.version("events") == before + 1
    revised = run(make_log(replicates=range(6)), revise=True)
    assert revised.findings == []
    assert revised.taken.events == 4 * 6 * H
    assert current(store, "half") == {2}
    assert run(make_log(replicates=range(6)), revise=True).taken.units == 0, "and once more nothing is new"


def test_a_correction_is_a_revision_of_the_actions_that_differ(tmp_path: Path, run: Run) -> None:
    run(LOG)
    store = Store.open(tmp_path / "store")
    corrected = shifted(LOG, "half")
    assert {finding.kind for finding in run(corrected).findings} == {"conflict"}
    report = run(corrected, revise=True)
    assert (report.findings, report.taken.units, report.present.units) == ([], 4, 4)
    assert (current(store, "half"), current(store, "full")) == ({1}, {0})
    assert any("half" in remark and "revision 1" in remark and "4 units" in remark for remark in report.remarks)
    with open_views(store) as views:
        tokens = views.connection.sql("select sum(x_token) from events where action = 'half'").fetchall()
    assert tokens == [(sum(row["x_token"] for row in corrected.to_pylist() if row["action"] == "half"),)]
    assert run(corrected).present.units == 8, "the corrected rows are the store's"
    later = run(make_log(docs=["d0", "d9"]).filter(pc.equal(make_log(docs=["d0", "d9"])["doc"], "d9")), documents=None)
    assert {finding.kind for finding in later.findings} == {"document"}


def test_a_wrong_horizon_is_corrected_by_a_revision_of_all_actions(tmp_path: Path, run: Run) -> None:
    half = H // 2
    run(LOG.filter(pc.less_equal(LOG["t"], half)))
    store = Store.open(tmp_path / "store")
    assert set(store.units()["horizon"].to_pylist()) == {half}
    assert run(LOG).taken.units == 0, "the store has another horizon"
    one = run(LOG.filter(pc.equal(LOG["action"], "half")), revise=True)
    assert one.taken.units == 0, "the other action still has the earlier horizon"
    assert run(LOG, revise=True).taken.events == LOG.num_rows
    assert set(store.units()["horizon"].to_pylist()) == {H}


@pytest.mark.parametrize("same", [True, False])
def test_events_that_another_writer_commits_meanwhile_are_compared(
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    same: bool,  # noqa: FBT001
) -> None:
    """The other writer comes between the comparison and the commit, with the same replicates and other bounds."""
    run(LOG.filter(pc.equal(LOG["doc"], "d0")))
    other = LOG if same else shifted(LOG, "half")
    other = other.filter(pc.and_(pc.equal(other["action"], "half"), pc.less(other["replicate"], 2)))
    if not same:
        other = other.filter(pc.not_equal(other["doc"], "d0"))
    add, turns = Store.add_pairs, list[int]()

    def add_late(store: Store, *given: Any) -> set[int]:
        if not turns:
            turns.append(1)
            assert run(other).findings == []
        return add(store, *given)

    monkeypatch.setattr(Store, "add_pairs", add_late)
    report = run(LOG)
    docs = {"d1", "d2", "d3"}
    if same:
        assert report.findings == []
        assert stored(tmp_path / "store").equals(canonical(LOG))
    else:
        assert {(f.kind, f.key["doc"], f.key["action"]) for f in report.findings} == {
            ("conflict", doc, "half") for doc in docs
        }
        assert report.kept_out.units == 3
    there = Store.open(tmp_path / "store").units()
    assert report.taken.events + report.present.events + report.kept_out.events == LOG.num_rows
    assert sum(there["replicates"].to_pylist()) == 4 * 4 + 4 * 4 - (0 if same else 3 * 2)


def shifted(log: pa.Table, action: str) -> pa.Table:
    """Return a log in which both tokens of an action's rows are larger by 1."""
    more = pc.equal(log["action"], action).cast(pa.int32())
    for name in ("x_token", "y_token"):
        log = with_column(log, name, pc.add(log[name], more))
    return log


def current(store: Store, action: str) -> set[int]:
    """Return the revisions of an action's current units."""
    units = store.units()
    return set(units.filter(pc.equal(units["action"], action))["action_revision"].to_pylist())


def test_nothing_new_goes_into_an_action_that_kvdrift_generated(tmp_path: Path, run: Run) -> None:
    run(LOG)
    store = Store.open(tmp_path / "store")
    add_rows(store, "identities", NAMES | {"action": "half", "selector_sha256": "5" * 64})
    assert run(LOG).findings == [], "what is there already is compared"
    report = run(make_log(replicates=range(6)))
    assert {(finding.kind, finding.key["action"]) for finding in report.findings} == {("identity", "half")}
    assert "kvdrift generated action 'half'" in report.findings[0].text


# What is wrong is named and stays out


def after(log: pa.Table, *, both: bool, **key: Any) -> dict[str, Any]:
    """The key of the second row after X's EOS (or both sides'), at which a rule of absorption can be broken."""
    for row in log.to_pylist()[::-1]:
        if row["x_eos"] and row["y_eos"] == both and all(row[name] == value for name, value in key.items()):
            before = (
                place(log, **{name: row[name] for name in PAIR_KEY} | {"t": row["t"] - 2}) if row["t"] > 3 else None
            )
            if before is not None and log["x_eos"][before].as_py() and log["y_eos"][before].as_py() == both:
                return {name: row[name] for name in PAIR_KEY}
    pytest.fail("the log has no such row")


BOTH = after(LOG, both=True, action="half")
ONE = after(make_log(replicates=range(40)), both=False, action="half")
AT = {"doc": "d1", "action": "half", "replicate": 2, "t": 6}
MOVED = AT | {"action": "full", "t": 2}
OPEN = {"doc": "d1", "action": "full", "replicate": 0}  # no side ends


def repeated(log: pa.Table, **key: Any) -> pa.Table:
    return pa.concat_tables([log, log.slice(place(log, **key), 1)])


CASES: dict[str, tuple[Callable[[], pa.Table], str, dict[str, Any], str]] = {
    "duplicate": (lambda: repeated(LOG, **AT), "duplicate", AT, "the key occurs more than once"),
    "gap": (lambda: without(LOG, **AT), "gap", AT, "the position is missing"),
    "short": (lambda: without(LOG, **(OPEN | {"t": H})), "horizon", OPEN | {"t": H - 1}, f"the replicate ends at {H - 1}, but the study and model have horizon {H}"),
    "zero t": (lambda: edit(LOG, {"t": 0}, **(AT | {"t": 1})), "position", AT | {"t": 0}, "t is 0, must be at least 1"),
    "negative": (lambda: pa.concat_tables([LOG, make_log(["d1"], ["half"], [0]).set_column(4, "replicate", pa.array([-1] * H, pa.int32()))]),
                 "replicate", AT | {"replicate": -1, "t": 1}, "replicate is -1, must be at least 0"),
    "f NaN": (lambda: edit(LOG, {"f": float("nan")}, **AT), "range", AT, "f is nan, must be within [0, 1]"),
    "token null": (lambda: edit(LOG, {"x_token": None}, **AT), "null", AT, "x_token is null"),
    "t null": (lambda: edit(LOG, {"t": None}, **AT), "null", {name: AT[name] for name in ("doc", "action", "replicate")}, "t is null"),
    "replicate no number": (lambda: edit(LOG, {"replicate": 2**31}, **AT), "type", {"doc": "d1", "action": "half", "t": 6}, "replicate does not fit int32"),
    "wide token": (lambda: edit(LOG, {"y_token": 2**31}, **AT), "type", AT, "y_token does not fit int32"),
    "flag 2": (lambda: edit(LOG, {"x_eos": 2}, **AT), "type", AT, "x_eos is not 0 or 1"),
    "impossible": (lambda: edit(LOG, {"delta": 0.0, "x_token": 7, "y_token": 8}, **AT), "impossible mismatch", AT, "x_token 7 and y_token 8 differ although delta is 0"),
    "EOS undone": (lambda: edit(LOG, {"x_eos": False}, **BOTH), "EOS undone", BOTH, "x_eos is false after it was true"),
    "delta after EOS": (lambda: edit(LOG, {"delta": 0.1}, **BOTH), "delta after EOS", BOTH, "delta is 0.1 after both sides' EOS, must be 0"),
    "f after EOS": (lambda: edit(make_log(replicates=range(40)), {"f": 0.25}, **ONE), "f after EOS", ONE, "f is 0.25 after X's EOS, must be 0"),
    "token after EOS": (lambda: edit(LOG, {"y_token": 7, "x_token": 7}, **BOTH), "token after EOS", BOTH, "x_token is 7 after 2, must repeat it after EOS"),
    "control delta": (lambda: edit(LOG, {"delta": 0.001}, **MOVED), "control", MOVED, "must be 0, 0 and two equal tokens"),
    "control f": (lambda: edit(LOG, {"f": 0.001}, **MOVED), "control", MOVED, "a full-retention control has delta 0, f 0.001, "),
    "control tokens": (lambda: edit(LOG, {"y_token": 77}, **MOVED), "control", MOVED, "tokens "),
    "unknown document": (lambda: pa.concat_tables([LOG, make_log(["d9"], ["half"])]), "document", {"doc": "d9", "action": "half"}, "the document is neither in the store nor in the --documents file"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.by_default(
    *(case for case in CASES if case not in {"wide token", "token null"})
)  # as other types and nulls
def test_findings_name_their_first_key_and_the_rest_goes_in(tmp_path: Path, run: Run, case: str) -> None:
    make, kind, key, text = CASES[case]
    log = make()
    report = run(log)
    found = [finding for finding in report.findings if finding.kind == kind]
    assert found, report.findings
    assert found[0].key == {"study": "ext", "model": "org/m", **key}
    assert text in found[0].text
    assert found[0].file == str(tmp_path / "log0.parquet")
    assert report.kept_out.units >= 1
    good = without(log, doc=key["doc"], action=key["action"])
    there = stored(tmp_path / "store")
    if report.kept_out.units == 1 and case != "unknown document":
        assert there.equals(canonical(good))
    assert there.num_rows + report.kept_out.events == log.num_rows
    assert report.taken.events == there.num_rows
    assert without(there, doc=key["doc"], action=key["action"]).num_rows == good.num_rows
    if case == "gap":
        assert run(LOG).findings == [], "the right log goes in afterwards"


def test_a_row_without_a_name_has_no_unit(run: Run) -> None:
    report = run(edit(edit(LOG, {"doc": None}, **AT), {"doc": None}, **(AT | {"t": 7})))
    null, gap = report.findings
    assert null.key == {"row": place(LOG, **AT) + 1, "study": "ext", "model": "org/m", "action": "half"}
    assert (null.kind, null.text, null.count) == ("null", "doc is null", 2)
    assert gap.key == {"study": "ext", "model": "org/m", **AT}
    assert (report.kept_out.units, report.kept_out.events) == (1, 4 * H)


@pytest.mark.parametrize(("column", "empty"), zip(GROUP_KEY, ("", " \t", "", " "), strict=True))
def test_an_empty_name_is_none(run: Run, column: str, empty: str) -> None:
    """Nobody could query rows with an empty name."""
    value = LOG[column][0].as_py()
    names = [empty if name == value else name for name in LOG[column].to_pylist()]
    report = run(with_column(LOG, column, names))
    (finding,) = report.findings
    of_column = sum(name == value for name in LOG[column].to_pylist())
    assert (finding.kind, finding.text, finding.count) == ("empty", f"{column} is empty", of_column)
    assert column not in finding.key
    assert (report.kept_out.events, report.taken.events) == (of_column, LOG.num_rows - of_column)


def test_several_kinds_in_several_units(run: Run) -> None:
    log = edit(edit(LOG, {"delta": 2.0}, **AT), {"f": -1.0}, **(AT | {"doc": "d3", "t": 9}))
    report = run(without(edit(log, {"f": 3.0}, **(AT | {"t": 8})), **(AT | {"t": 4})))
    assert {(finding.kind, finding.key["doc"], finding.text) for finding in report.findings} == {
        ("range", "d1", "delta is 2, must be within [0, 1]"), ("range", "d1", "f is 3, must be within [0, 1]"),
        ("gap", "d1", "the position is missing"), ("range", "d3", "f is -1, must be within [0, 1]"),
    }  # fmt: skip
    assert (report.taken.units, report.kept_out.units) == (6, 2)


# What sums of floats end at: the value and what is stored, or what a refusal shows.
ROUNDED = {
    1.0000001: 1.0,  # a total variation summed in float32
    -1.9826e-08: 0.0,  # pytorch/pytorch#80488: a divergence of equal distributions
    -5.9604645e-08: 0.0,  # google/tunix#2315: a cancelled difference
    -0.0: 0.0,  # p-e-w/heretic#141: a negative zero
    1 + 9.9e-7: 1.0,  # as far as rounding goes
}
BEYOND_ROUNDING = {
    1.00000536: "1.0000054",  # facebookresearch/fastText#718
    1.00000978: "1.0000098",  # facebookresearch/fastText#718
    -1.1e-6: "-1.1e-06",
}
DISTANCES = pytest.mark.parametrize(
    ("name", "kind"), [("delta", pa.float64()), ("f", pa.float32())], ids=["delta", "f"]
)
# If neither side has ended and the two tokens are equal, every δ and f is possible.
ALIKE_KEYS = [
    {name: row[name] for name in PAIR_KEY}
    for row in LOG.to_pylist()
    if row["action"] == "half" and row["x_token"] == row["y_token"] and not (row["x_eos"] or row["y_eos"])
]


@DISTANCES
def test_distances_outside_by_rounding_are_0_or_1(tmp_path: Path, run: Run, name: str, kind: pa.DataType) -> None:
    log = with_column(LOG, name, LOG[name].cast(kind))
    for value, key in zip(ROUNDED, ALIKE_KEYS, strict=False):
        log = edit(log, {name: value}, **key)
    assert not run(log).findings
    events = stored(tmp_path / "store")
    found = [events[name][place(events, **key)].as_py() for key in ALIKE_KEYS[: len(ROUNDED)]]
    assert found == list(ROUNDED.values())


@DISTANCES
@pytest.mark.parametrize(("value", "shown"), BEYOND_ROUNDING.items(), ids=["above", "far above", "below"])
@pytest.mark.by_default("above-delta", "below-f")
def test_distances_outside_by_more_than_rounding_are_refused(
    run: Run, name: str, kind: pa.DataType, value: float, shown: str
) -> None:
    (finding,) = run(edit(with_column(LOG, name, LOG[name].cast(kind)), {name: value}, **ALIKE_KEYS[0])).findings
    assert f"{name} is {shown}," in finding.text
    assert "[0, 1]" in finding.text


def test_the_horizon_is_one_for_a_study_and_model(tmp_path: Path, run: Run) -> None:
    short = make_log(["d3"], ["half"], horizon=H - 2)
    report = run(pa.concat_tables([make_log(DOCS[:3]), short]))
    (finding,) = report.findings
    assert (finding.kind, finding.key["doc"], finding.count) == ("horizon", "d3", 2), "the other two have ended"
    assert run(short).findings[0].kind == "horizon", "the stored units' horizon holds"
    assert run(make_log(model="other", horizon=5)).findings == [], "another model has its own"
    add_rows(Store.open(tmp_path / "store"), "studies", {"study": "ext", "model": "third", "horizon": 3})
    (finding, *_) = run(make_log(model="third", horizon=5)).findings
    assert finding.text == "the replicate ends at 5, but the study and model have horizon 3"
    assert run(make_log(model="third", horizon=3)).findings == []


def test_what_the_definitions_allow_is_let_in(run: Run) -> None:
    log = make_log(replicates=range(40))
    only_y = next(row for row in log.to_pylist() if row["y_eos"] and not row["x_eos"] and row["t"] > 2)
    log = edit(log, {"f": 0.9}, **{name: only_y[name] for name in PAIR_KEY})  # f after Y's EOS alone
    log = edit(log, {"delta": 1.0}, **ONE)  # one side absorbed, the other not
    first = dict(BOTH)
    while log["x_eos"][place(log, **first)].as_py():
        first["t"] -= 1
    first["t"] += 1
    assert run(edit(log, {"x_token": 5, "y_token": 5}, **first)).findings == [], "the first EOS is another EOS token"


def test_remarks_keep_nothing_out(run: Run) -> None:
    log = edit(LOG, {"delta": 0.1, "f": 0.1}, **(AT | {"t": 1}))
    report = run(edit(log, {"f": 0.9}, **(AT | {"t": 2, "doc": "d2"})))
    assert report.findings == []
    assert report.taken.units == 8
    first, apart = sorted(report.remarks, key=lambda line: "eviction" not in line)
    assert (
        "doc=d1, action=half, replicate=2, t=1: delta is 0.1, f 0.1; at t = 1 both are 0 if eviction follows prefill"
        in first
    )
    assert "doc=d2, action=half, replicate=2, t=2" in apart


# The command


def test_the_command_says_what_went_in_and_what_to_type_next(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log, store = write(tmp_path / "log.parquet", LOG), tmp_path / "store"
    code, out, err = command(capsys, log, "--store", store, "--documents", documents_csv(tmp_path))
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "files:         1", "went in:       8 units, 384 events", "already there: 0 units, 0 events",
        "kept out:      0 units, 0 events", f"horizon:       {H} (ext, org/m), from the rows",
        f"next:          kvdrift derive {store}",
    ]  # fmt: skip
    code, out, err = command(capsys, log, "--store", store)
    assert (code, err) == (0, "")
    assert "already there: 8 units, 384 events" in out
    assert "nothing new: the store is unchanged" in out


def test_mixed_good_and_bad_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    good, bad = (
        write(tmp_path / "good.parquet", LOG),
        write(tmp_path / "bad.parquet", edit(make_log(study="b"), {"delta": 9.0}, **AT)),
    )
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "cut.parquet").write_bytes(good.read_bytes()[:-100])
    save_ipc(LOG, tmp_path / "whole.arrow")
    ipc = (tmp_path / "whole.arrow").read_bytes()
    (tmp_path / "cut.arrow").write_bytes(ipc[:-100])
    (tmp_path / "damaged.arrow").write_bytes(ipc[: len(ipc) // 3] + b"\xff" * 5000 + ipc[len(ipc) // 3 + 5000 :])
    with pa.ipc.new_stream(str(tmp_path / "stream"), LOG.schema) as stream:
        stream.write_table(LOG)
    (tmp_path / "cut.stream").write_bytes((tmp_path / "stream").read_bytes()[:-100])
    write(tmp_path / "lacking.parquet", LOG.drop_columns(["f", "doc"]))
    write(tmp_path / "typed.parquet", LOG.set_column(5, "t", LOG["t"].cast(pa.float64())))
    pairs = [(name, LOG.column(name).combine_chunks()) for name in [*LOG.column_names, "t"]]
    schema = pa.schema([(name, column.type) for name, column in pairs])
    with pa.ipc.new_file(str(tmp_path / "twice"), schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([column for _, column in pairs], schema=schema))
    names = [
        "missing", "text", "empty", "cut.parquet", "cut.arrow", "cut.stream", "lacking.parquet", "typed.parquet",
        "twice", "damaged.arrow",
    ]  # fmt: skip
    code, out, err = command(
        capsys, good, *(tmp_path / name for name in names), bad, "--store", tmp_path / "store", "--documents",
        documents_csv(tmp_path),
    )  # fmt: skip
    assert code == 2
    lines = err.splitlines()
    assert len(lines) == 11
    for line, text in zip(lines, [
        "missing: no such file", "text: neither Parquet, Arrow IPC, nor CSV or JSON Lines with columns such as x_token",
        "empty: neither Parquet, Arrow IPC, nor ", "cut.parquet: cannot be read as Parquet: ",
        "cut.arrow: cannot be read as an Arrow IPC file: ", "cut.stream: cannot be read as an Arrow IPC stream: ",
        "lacking.parquet: no column 'doc', 'f'; an event has study, model, doc",
        "typed.parquet: column 't' is double, must be an integer type", "twice: 2 columns are named 't', must be one",
        "damaged.arrow: cannot be read as an Arrow IPC file: ", "bad.parquet: study=b, model=org/m, doc=d1, action=half, replicate=2, t=6: delta is 9, must be within [0, 1]",
    ], strict=True):  # fmt: skip
        assert line.startswith(f"kvdrift: {tmp_path}/{text}")
    assert lines[2].endswith("(the file is empty)")
    assert "files:         12, 10 not readable, or not to the end" in out
    assert "went in:       15 units" in out
    assert "kept out:      1 units, 48 events" in out


def test_pipes_and_devices_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Reading one waits for ever, reading the other never ends."""
    os.mkfifo(tmp_path / "pipe")
    store, log = tmp_path / "store", write(tmp_path / "log.parquet", LOG)
    for arguments in ((tmp_path / "pipe",), ("/dev/zero",), (log, "--documents", "/dev/zero")):
        code, _, err = command(capsys, *arguments, "--store", store)
        assert code == 2
        assert err.endswith("is no regular file; give a file\n")
        assert err.count("\n") == 1


def test_no_readable_file_makes_no_store(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = command(capsys, tmp_path / "missing", "--store", tmp_path / "store")
    assert (code, err) == (2, f"kvdrift: {tmp_path}/missing: no such file\n")
    assert "next" not in out
    assert not (tmp_path / "store").exists()


def test_a_file_damaged_further_down_gives_its_sound_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_files, "PORTION_ROWS", 48)
    monkeypatch.setattr(formats, "SLICE_ROWS", 48)
    path = tmp_path / "log.parquet"
    pq.write_table(LOG, path, row_group_size=48, compression="none", use_dictionary=False, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(6).column(8).data_page_offset  # delta
    data[start + 60] ^= 0xFF
    path.write_bytes(bytes(data))
    report = ingest(
        tmp_path / "store", [path, write(tmp_path / "other.parquet", make_log(study="b"))], documents_csv(tmp_path)
    )
    (finding,) = report.findings
    assert (finding.kind, report.unread, report.taken.units) == ("file", 1, 14)
    assert str(finding).startswith(f"{path}: cannot be read as Parquet: ")
    assert "\n" not in str(finding)
    there = stored(tmp_path / "store")
    assert there.filter(pc.equal(there["study"], "ext")).equals(canonical(LOG.slice(0, 6 * 48)))


def test_many_findings_of_a_kind_are_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = make_log([f"d{number}" for number in range(25)], ["half"], [0], 4)
    code, out, err = command(capsys, write(tmp_path / "log.parquet", log), "--store", tmp_path / "store")
    assert code == 2
    assert err.count("\n") == 21
    assert err.splitlines()[-1] == "kvdrift: and 5 more findings of the kind 'document'"
    assert "kept out:      25 units, 100 events" in out


def test_a_store_where_a_file_is_cannot_be_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = write(tmp_path / "log.parquet", LOG)
    code, _, err = command(capsys, log, "--store", log)
    assert code == 2
    assert "cannot make a store here" in err
    assert err.count("\n") == 1
