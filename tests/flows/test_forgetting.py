"""A document removed for good: nothing of it is left in any file, and the study goes on with the others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from fixtures import sequential_study
from fixtures.command import call, mistake
from fixtures.finished_studies import without_figures
from fixtures.own_files import prompts, write_own_study
from fixtures.refusals import refused
from fixtures.removed_documents import DOC, columns, grown, traces
from fixtures.small_study import finish, run_of
from fixtures.stored_units import make_unit
from fixtures.study_files import load_study

from kvdrift.flows.plan.frozen_plan import FrozenPlan, InterimLooksTaken, find_plan
from kvdrift.flows.run.forgetting import find_removal, without_document
from kvdrift.log.forgotten import FORGOTTEN
from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError
from kvdrift.schema.frozen_text import frozen_sha256, wanted_documents
from kvdrift.schema.tables import TABLES


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished study of a file of prompts, one of which is secret, with all that a store collects."""
    folder = tmp_path_factory.mktemp("own")
    rows = prompts(12)
    study = write_own_study(folder, rows)
    store = folder / "store"
    run = run_of(load_study(study), store)
    documents = [one.doc for one in run.material.of_split("evaluation")]
    for row in rows:
        row["id"] = DOC if row["id"] == documents[0] else row["id"]
    # Ids decide the split, so name the splits that the first reading gave.
    for row in rows:
        row["split"] = "evaluation" if row["id"] in {DOC, *documents} else "development"
    write_own_study(folder, rows)
    shutil.rmtree(store, ignore_errors=True)
    finish(run_of(load_study(study), store))
    return folder


@pytest.fixture
def study(own: Path, tmp_path: Path) -> Path:
    """A copy of that folder's study file."""
    shutil.copytree(own, tmp_path, dirs_exist_ok=True)
    return tmp_path / "own.toml"


def test_nothing_is_left_of_a_document_and_the_study_goes_on(
    study: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdrift.report.page.draw_figures", without_figures)
    location = study.parent / "store"
    store = Store(location)
    (location / "report" / "own").mkdir(parents=True)
    (location / "report" / "own" / "index.html").write_text(DOC)
    # Another program's file has statistics of texts in the log, and a replaced one stays beside it.
    DeltaTable(str(location / "events")).alter.set_table_properties({"delta.dataSkippingNumIndexedCols": "32"})
    DeltaTable(str(location / "events")).optimize.compact()
    (location / "set-aside").mkdir()
    (location / "set-aside" / "half.parquet").write_text(DOC)
    hidden = next(row for row in store.read("documents").to_pylist() if row["doc"] == DOC)
    others = {table: [row for row in columns(store, table) if row.get("doc") != DOC] for table in ("events", "units")}
    found = traces(location, DOC)
    assert {path.partition("/")[0] for path in found} >= {"documents", "events", "plans", "prompts", "report", "units"}
    line = mistake(capsys, "forget", location, "--document", DOC)
    assert DOC in line
    assert "--yes" in line
    assert traces(location, DOC) == found

    code, out, _ = call(capsys, "forget", location, "--document", DOC, "--yes")
    assert (code, f"document '{DOC}' of own" in out) == (0, True)
    assert traces(location, DOC, hidden["prompt_sha256"]) == []
    store = Store(location)
    assert {table: columns(store, table) for table in others} == others
    (plan,) = store.read("plans").to_pylist()
    assert json.loads(plan["plan"])["forgotten"] == {"evaluation": {"words": 1}}

    # The source still has the row. A run neither brings it back nor takes another one in its place.
    finish(run_of(load_study(study), location))
    store = Store(location)
    assert store.read("documents").num_rows == 3
    assert store.read("results").num_rows > 0
    assert traces(location, DOC, hidden["prompt_sha256"]) == []
    for command in (("report", location), ("status", location)):
        code, out, _ = call(capsys, *command)
        assert code == 0
    assert "evaluation: 1 of 1 document" in out
    page = (location / "report" / "own" / "index.html").read_text(encoding="utf-8")
    assert "the evaluation is not finished" not in page
    assert "documents removed for good since" in page
    assert "evaluation: words: 1" in page
    code, out, _ = call(capsys, "verify", location)
    assert (code, out.splitlines()[-1]) == (0, f"{location}: sound")
    assert call(capsys, "forget", location, "--document", DOC, "--yes")[0] == 0, "again, which changes nothing"


def test_a_removed_document_is_refused_and_names_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = grown(tmp_path / "store")
    line = mistake(capsys, "forget", store.location, "--document", "patient-4712", "--yes")
    assert f"no document 'patient-4712'; did you mean '{DOC}'?" in line
    line = mistake(capsys, "forget", store.location, "--document", DOC, "--study", "t", "--yes")
    assert f"study 't': no document '{DOC}'" in line
    with pytest.raises(InputError, match=r"s3://bucket/store: .* local store"):
        find_removal(SimpleNamespace(location="s3://bucket/store"), DOC, None)  # type: ignore[arg-type]
    assert call(capsys, "forget", store.location, "--document", DOC, "--yes")[0] == 0
    store = Store(store.location)
    assert traces(Path(store.location), DOC) == []
    row = columns(store, "documents")[0] | {"doc": DOC}
    documents = pa.Table.from_pylist([row], schema=TABLES["documents"].schema)
    line = f"document '{DOC}' of study 's' was removed from this store for good"
    assert line in refused(store.append_rows, "documents", documents)
    assert line in refused(store.append_units, [make_unit("d2"), make_unit(DOC)])
    assert store.append_units([make_unit("d2")]) == 1
    assert refused(store.read, "events", 1).endswith("later")
    assert (Path(store.location) / FORGOTTEN).read_text().count("\n") == 1


@pytest.mark.slow
def test_a_sequential_study_stays_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sequential_study.write_laws(tmp_path)

    def go_on() -> tuple[FrozenPlan, InterimLooksTaken]:
        run = sequential_study.study_run(tmp_path, "store")
        sequential_study.begin(run)
        sequential_study.go_on(run)
        plan = find_plan(run.store, run.study.name, run.study.model.id)
        assert plan is not None
        taken = InterimLooksTaken.in_store(run.store, plan)
        assert taken is not None
        return plan, taken

    before, taken = go_on()
    ((stratum, order),) = taken.looks.order.items()
    assert call(capsys, "forget", tmp_path / "store", "--document", order[0], "--yes")[0] == 0
    after, again = go_on()
    assert after.sha256 != before.sha256
    assert again.looks.order == {stratum: order[1:]}
    assert (again.stopped, again.reached) == (taken.stopped, taken.reached) == (True, taken.reached)
    assert Store(tmp_path / "store").read("looks")["plan_sha256"].unique().to_pylist() == [after.sha256]
    assert call(capsys, "verify", tmp_path / "store")[0] == 0


def test_a_plan_counts_the_documents_that_it_lacks() -> None:
    rows = {"all": [{"doc": doc, "prompt_sha256": doc} for doc in ("d0", DOC, "d1")], "other": [{"doc": "d2"}]}
    plan = {
        "actions": [DOC],  # an action may have the name of a document
        "documents": {"development": {"all": [{"doc": "d9"}]}, "evaluation": rows},
        "sequential": {"order": {"all": ["d0", DOC], "other": ["d2"]}},
    }
    text = without_document(json.dumps(plan), DOC)
    assert text is not None
    left = json.loads(text)
    assert [row["doc"] for row in left["documents"]["evaluation"]["all"]] == ["d0", "d1"]
    assert (left["sequential"]["order"], left["actions"]) == ({"all": ["d0"], "other": ["d2"]}, [DOC])
    assert left["forgotten"] == {"evaluation": {"all": 1}}
    assert without_document(text, DOC) is None
    more = json.loads(without_document(text, "d1") or "")
    assert more["forgotten"] == {"evaluation": {"all": 2}}
    assert frozen_sha256(text) != frozen_sha256(json.dumps(plan))


def test_a_plan_asks_for_the_documents_that_are_left() -> None:
    frozen = {"evaluation": {"all": [{"doc": doc} for doc in ("d0", DOC, "d1")], "other": [{"doc": "d2"}]}}
    text = json.dumps({"strata": ["all", "other"], "documents_per_stratum": 2, "documents": frozen})
    for doc, wanted in ((DOC, 2), ("d1", 1), ("d0", 0)):  # the third document of the order replaces the first
        text = without_document(text, doc) or ""
        assert wanted_documents(json.loads(text)) == {"all": wanted, "other": 2}
