"""The rows of a study's material that are stored before anything is generated."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from fixtures.small_study import write_study
from fixtures.study_files import load_study

from flows.generate.stored_material import record_material
from flows.material import Material
from log.store import Store
from schema.document import SPLITS
from schema.tables import STUDIES


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
