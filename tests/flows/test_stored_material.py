"""The rows that a study stores of its material, its prompts and its model's tokens, and the cases without such rows."""

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np
import pytest
from fixtures.command import call
from fixtures.finite_study import write_finite_study
from fixtures.heard import Heard
from fixtures.small_study import TEXT, run_of, write_study
from fixtures.study_files import changed, load_study

from kvdrift.flows.estimate.scores import record_tokens
from kvdrift.flows.generate.local import LocalGenerator
from kvdrift.flows.generate.storing import record_material, storing
from kvdrift.flows.material import Material
from kvdrift.flows.run import stages
from kvdrift.flows.run.study_run import StudyRun
from kvdrift.generator.embedded import vocabulary
from kvdrift.generator.service.protocol import KeptMessage
from kvdrift.generator.transformer.files import tokenizer
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_FOLDER
from kvdrift.generator.transformer.files.tokenizer import load_tokenizer, token_reader
from kvdrift.log.prompts import KeptEntries
from kvdrift.log.store import Store
from kvdrift.schema.document import SPLITS
from kvdrift.schema.study import load_studies
from kvdrift.sql.catalog import open_views

OFF = TEXT.replace("seed = 3", "seed = 3\nstore_prompts = false")
SHORT = (("horizon = 12", "horizon = 4"), ("development_replicates = 4", "development_replicates = 2"))


def developed(folder: Path, text: str) -> StudyRun:
    """A study with its development documents."""
    folder.mkdir()
    (folder / "small.toml").write_text(text, encoding="utf-8")
    (study,) = load_studies(folder / "small.toml")
    run = StudyRun(study, str(folder / "store"), storing(LocalGenerator()))
    stages.prepare(run)
    stages.develop(run)
    return run


def test_prompts_are_stored_unless_the_study_leaves_them_out(tmp_path: Path) -> None:
    """Its events are the same, and so is its hash: nothing depends on it."""
    run, other = (developed(tmp_path / name, changed(text, *SHORT)) for name, text in (("on", TEXT), ("off", OFF)))
    assert run.study.sha256 == other.study.sha256
    assert other.store.read("prompts").num_rows == 0
    keys = [("doc", "ascending"), ("action", "ascending"), ("replicate", "ascending"), ("t", "ascending")]
    events = [one.store.read("events").sort_by(keys) for one in (run, other)]
    assert events[0].equals(events[1])
    rows = run.store.read("prompts").to_pylist()
    documents = {one.doc: one for split in ("development", "evaluation") for one in run.material.of_split(split)}
    prompts = {row["doc"]: row for row in rows if row["action"] is None}
    assert {doc: tuple(row["tokens"]) for doc, row in prompts.items()} == {
        doc: one.tokens for doc, one in documents.items()
    }
    for doc, row in prompts.items():
        stated = [vocabulary.to_text(row["tokens"][one["first"] - 1 : one["last"]]) for one in row["records"]]
        assert " ".join(stated) == " ".join(documents[doc].answers)
    units = {(row["doc"], row["action"]): row for row in run.store.units("small", "kvdrift/tiny").to_pylist()}
    kept = {(row["doc"], row["action"]): row for row in rows if row["action"] is not None}
    assert kept.keys() == units.keys()
    for key, row in kept.items():
        assert (row["layers"], row["pairs"], row["step"]) == (3, 6, 0)
        assert sum(row["kept"]) == units[key]["kept_entries"] * row["pairs"]


def test_what_is_kept_comes_through_the_service() -> None:
    random = np.random.default_rng(1)
    kept = KeptEntries(5, 70, random.integers(0, 70_000, (3, 401)).astype(np.int32), 9)
    back = KeptMessage.decoded(KeptMessage.of(kept).encoded()).kept
    assert (back.layers, back.pairs, back.step, back.counts.dtype) == (5, 70, 9, np.int32)
    assert (back.counts == kept.counts).all()


@pytest.mark.parametrize("revision", [None, "refs/pr/7"])
def test_the_models_revision_is_recorded(tmp_path: Path, revision: str | None) -> None:
    given = () if revision is None else (('id = "kvdrift/tiny"', f'id = "kvdrift/tiny"\nrevision = "{revision}"'),)
    study = load_study(write_study(tmp_path, *given))
    material = Material(study, {split: {} for split in SPLITS}, [])
    store = Store.create(tmp_path / "store")
    for _ in range(2):
        record_material(store, material, None)
        assert store.read("studies").column("revision").to_pylist() == [revision]


MODEL = "kvdrift/tiny"


def test_a_run_records_the_whole_vocabulary(finished: Path) -> None:
    store, read = Store.open(finished), token_reader(MODEL)
    assert read is not None
    rows = store.read("tokens").to_pylist()
    assert {row["token"]: row["text"] for row in rows} == {token: read(token) for token in range(256)}
    assert {(row["study"], row["model"]) for row in rows} == {("small", MODEL)}
    assert record_tokens(store, "small", MODEL) == 0


def test_each_study_has_those_of_its_own_model(copied: Path) -> None:
    """A model's files may be elsewhere than its name says; a model that is not on this machine has no texts."""
    store, heard = Store.open(copied), Heard()
    size = len(load_tokenizer(str(EMBEDDED_FOLDER)))
    assert record_tokens(store, "other", "mine", location=str(EMBEDDED_FOLDER), progress=heard) == size
    assert heard.lines == []
    assert record_tokens(store, "other", "nobody/nothing", progress=heard) == 0
    (line,) = heard.lines
    assert "'nobody/nothing'" in line
    with open_views(store) as views:
        assert views.rows("tokens", model="mine").num_rows == size
        assert views.rows("tokens", model="nobody/nothing").num_rows == 0


def test_analyze_records_them_in_a_store_that_has_none(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.open(copied)
    before = store.read("tokens").sort_by("token")
    store.withdraw_files("tokens", store.paths("tokens"))
    with open_views(store) as views:
        texts = views.rows("trajectory_text", doc=views.rows("documents")["doc"][0].as_py())
        assert texts.num_rows == texts["x_text"].null_count > 0
    code, out, err = call(capsys, "analyze", str(copied))
    assert code == 0, err
    assert "estimates are up to date" in out
    assert store.read("tokens").sort_by("token").equals(before)
    with duckdb.connect(str(copied / "catalog.duckdb"), read_only=True) as client:
        assert client.sql("select count(*) from tokens where text <> ''").fetchall() == [(256,)]


def test_systems_have_no_tokens_to_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study of finite-state systems names no model that a hub could know."""
    run = run_of(load_study(write_finite_study(tmp_path)), tmp_path / "store")
    stages.prepare(run)
    monkeypatch.setattr(tokenizer, "model_source", lambda _: pytest.fail("something was looked for"))
    heard = Heard()
    assert record_tokens(run.store, "finite", "binary", progress=heard) == 0
    assert heard.lines == []
