"""The rows that a study stores of its material and its prompts, and the cases without such rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from fixtures.small_study import TEXT, write_study
from fixtures.study_files import load_study

from flows.generate.local import LocalGenerator
from flows.generate.stored_material import record_material
from flows.generate.storing import storing
from flows.material import Material
from flows.run import stages
from flows.run.study_run import StudyRun
from generator.embedded import vocabulary
from generator.service.protocol import KeptMessage
from log.prompts import KeptEntries
from log.store import Store
from schema.document import SPLITS
from schema.study import load_studies
from schema.tables import STUDIES

OFF = TEXT.replace("seed = 3", "seed = 3\nstore_prompts = false")


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
    run, other = developed(tmp_path / "on", TEXT), developed(tmp_path / "off", OFF)
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

    # A row from before there was the column holds null, and stays as it is.
    row = store.read("studies").to_pylist()[0] | {"revision": None}
    older = Store.create(tmp_path / "older")
    older.append_rows("studies", pa.Table.from_pylist([row], schema=STUDIES.schema))
    record_material(older, material, None)
    assert older.read("studies").to_pylist() == [row]
