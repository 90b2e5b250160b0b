"""A document removed for good: nothing of it is left in any file, and the study goes on with the others."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from fixtures.command import call, mistake
from fixtures.own_files import prompts, write_own_study
from fixtures.refusals import refused
from fixtures.small_study import finish, run_of
from fixtures.stored_units import derive, make_unit
from fixtures.study_files import load_study

from flows.run import forgetting
from flows.run.forgetting import find_removal, remove_document, without_document
from log.delta import folder as delta_folder
from log.delta.table_log import TableLog
from log.forgotten import FORGOTTEN
from log.store import Store
from schema.errors import InputError
from schema.frozen_text import frozen_sha256, wanted_documents
from schema.tables import TABLES
from verification.logs import check_logs

DOC = "patient-4711"


def traces(root: Path, *words: str) -> list[str]:
    """Return every file below a folder whose name, bytes, or decompressed Parquet columns have one of some words."""
    found = []
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        data = path.read_bytes()
        texts = [str(path.relative_to(root)).encode(), data]
        if data.startswith(b"PAR1"):
            with pq.ParquetFile(io.BytesIO(data)) as parquet:
                texts += [str(parquet.read().to_pydict()).encode(), str(parquet.metadata.to_dict()).encode()]
        if any(word.encode() in text for word in words for text in texts):
            found.append(str(path.relative_to(root)))
    return found


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


def columns(store: Store, table: str) -> list[dict[str, Any]]:
    return sorted(store.read(table).to_pylist(), key=lambda row: str([row[name] for name in TABLES[table].key]))


def test_nothing_is_left_of_a_document_and_the_study_goes_on(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    location = study.parent / "store"
    store = Store(location)
    assert call(capsys, "report", location)[0] == 0
    # Another program's file has statistics of texts in the log, and a replaced one stays beside it.
    DeltaTable(str(location / "events")).alter.set_table_properties({"delta.dataSkippingNumIndexedCols": "32"})
    DeltaTable(str(location / "events")).optimize.compact()
    (location / "set-aside").mkdir()
    (location / "set-aside" / "half.parquet").write_text(DOC)
    (location / ".prefect").mkdir(exist_ok=True)
    (location / ".prefect" / "prefect.db").write_text(DOC)
    hidden = next(row for row in store.read("documents").to_pylist() if row["doc"] == DOC)
    others = {table: [row for row in columns(store, table) if row.get("doc") != DOC] for table in ("events", "units")}
    assert len(traces(location, DOC)) > 10
    line = mistake(capsys, "forget", location, "--document", DOC)
    assert DOC in line
    assert "--yes" in line
    assert len(traces(location, DOC)) > 10

    code, out, _ = call(capsys, "forget", location, "--document", DOC, "--yes")
    assert (code, f"document '{DOC}' of own" in out) == (0, True)
    assert traces(location, DOC, hidden["prompt_sha256"]) == []
    store = Store(location)
    assert {table: columns(store, table) for table in others} == others
    (plan,) = store.read("plans").to_pylist()
    assert json.loads(plan["plan"])["forgotten"] == {"evaluation": {"words": 1}}
    code, out, _ = call(capsys, "verify", location)
    assert (code, out.splitlines()[-1]) == (0, f"{location}: sound")

    # The source still has the row. A run neither brings it back nor takes another one in its place.
    code, _, err = call(capsys, "run", study, "--store", location)
    assert code == 0, err
    store = Store(location)
    assert store.read("documents").num_rows == 3
    assert store.read("results").num_rows > 0
    assert traces(location, DOC, hidden["prompt_sha256"]) == []
    for command in (("analyze", location), ("report", location), ("status", location)):
        code, out, _ = call(capsys, *command)
        assert code == 0
        page = location / "report" / "own" / "index.html"
        assert "the evaluation is not finished" not in page.read_text(encoding="utf-8")
    assert "evaluation: 1 of 1 document" in out
    code, out, _ = call(capsys, "verify", location)
    assert (code, out.splitlines()[-1]) == (0, f"{location}: sound")
    assert call(capsys, "forget", location, "--document", DOC, "--yes")[0] == 0, "again, which changes nothing"


def grown(path: Path) -> Store:
    """A store with events of three documents, one of them secret, in several files of each table."""
    store = Store.create(path)
    for doc in ("d0", DOC, "d1"):
        row = dict.fromkeys(TABLES["documents"].columns) | {
            **{name: make_unit(doc).record[name] for name in ("study", "model", "doc")}, "cluster": doc, "split": "evaluation", "stratum": "all",
            "document_revision": 0,
        }  # fmt: skip
        store.append_rows("documents", pa.Table.from_pylist([row], schema=TABLES["documents"].schema))
        store.append_units([make_unit(doc)])
        derive(store)
    (path / "pieces").mkdir()
    for name, docs in (("mixed", ("d0", DOC)), ("other", ("d1",))):
        waiting = pa.concat_tables([make_unit(doc).events for doc in docs])
        pq.write_table(waiting, path / "pieces" / f"{name}.parquet")
    return store


def state(store: Store) -> dict[str, Any]:
    tables = {table: columns(store, table) for table in ("documents", "events", "units", "trajectories", "steps")}
    pieces = {path.name: pq.read_table(path).num_rows for path in Path(store.location, "pieces").glob("*.parquet")}
    return tables | pieces


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


def steps(monkeypatch: pytest.MonkeyPatch, at: int) -> list[str]:
    """Have the step ``at`` of a removal be the last one, as of a process that is killed then; return what was done."""
    done: list[str] = []

    def ending(owner: Any, name: str) -> None:
        whole = getattr(owner, name)

        def step(*arguments: Any, **options: Any) -> Any:
            if len(done) == at:
                raise Killed
            done.append(name)
            return whole(*arguments, **options)

        monkeypatch.setattr(owner, name, step)

    ending(forgetting, "add_forgotten")
    ending(Store, "rewrite_rows")
    ending(delta_folder, "replace_file")
    ending(delta_folder.DeltaFolder, "make_durable")
    ending(TableLog, "delete_before")
    ending(Path, "unlink")
    ending(forgetting.shutil, "rmtree")
    ending(forgetting, "refresh_catalog")
    return done


class Killed(BaseException):
    """The end of the process."""


@pytest.fixture(scope="module")
def removed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[str]]:
    """A store before a removal, what is left after it, and its steps."""
    folder = tmp_path_factory.mktemp("removed")
    grown(folder / "store")
    shutil.copytree(folder / "store", folder / "after")
    store = Store.open(folder / "after")
    with pytest.MonkeyPatch.context() as patch:
        done = steps(patch, -1)
        remove_document(store, find_removal(store, DOC, None), lambda _: None)
    return folder / "store", state(Store(folder / "after")), done


@pytest.mark.parametrize("part", [*range(8), *(pytest.param(part, marks=pytest.mark.slow) for part in range(8, 64))])
def test_a_removal_that_was_killed_is_finished_by_the_next_call(
    removed: tuple[Path, dict[str, Any], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    before, wanted, done = removed
    at = (part * 37 + 11) % len(done)
    location = Path(shutil.copytree(before, tmp_path / "store"))
    store = Store.open(location)
    with monkeypatch.context() as patch:
        steps(patch, at)
        with pytest.raises(Killed):
            remove_document(store, find_removal(store, DOC, None), lambda _: None)
    store = Store.open(location)
    kept = {row["doc"] for row in store.read("events").to_pylist()} - {DOC}
    assert kept == {"d0", "d1"}
    remove_document(store, find_removal(store, DOC, None), lambda _: None)
    assert traces(location, DOC) == []
    assert state(Store.create(location)) == wanted
    assert check_logs(Store(location)).faults == ()


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
    for doc, wanted in ((DOC, 2), ("d1", 1), ("d0", 0)):  # the third of the frozen order takes the first one's place
        text = without_document(text, doc) or ""
        assert wanted_documents(json.loads(text)) == {"all": wanted, "other": 2}
