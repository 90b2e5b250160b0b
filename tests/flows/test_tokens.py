"""Table ``tokens``: the whole vocabulary of a study's model, once, where its tokenizer can be loaded."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest
from fixtures.command import call
from fixtures.heard import Heard

from flows.tokens import record_tokens
from generator.transformer.local_folders import EMBEDDED_FOLDER
from generator.transformer.tokenizer import load_tokenizer, token_reader
from schema.store.store import Store
from sql.catalog import open_views

MODEL = "kvdrift/tiny"


def test_a_run_records_the_whole_vocabulary(finished: Path) -> None:
    store, read = Store.open(finished), token_reader(MODEL)
    assert read is not None
    rows = store.read("tokens").to_pylist()
    assert {row["token"]: row["text"] for row in rows} == {token: read(token) for token in range(256)}
    assert {(row["study"], row["model"]) for row in rows} == {("small", MODEL)}
    assert record_tokens(store, "small", MODEL) == 0


def test_each_study_has_those_of_its_own_model(copied: Path) -> None:
    """A model's files may be elsewhere than its name says, and a model that is not here has none."""
    store, heard = Store.open(copied), Heard()
    size = len(load_tokenizer(str(EMBEDDED_FOLDER)))
    assert record_tokens(store, "other", "mine", location=str(EMBEDDED_FOLDER), progress=heard) == size
    assert heard.lines == []
    assert record_tokens(store, "other", "nobody/nothing", progress=heard) == 0
    assert heard.lines == ["table tokens has no texts: the tokenizer of 'nobody/nothing' cannot be loaded here"]
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
