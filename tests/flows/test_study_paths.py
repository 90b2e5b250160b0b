"""Files that a study names, with the working folder elsewhere, and stores that know them by other names."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from fixtures.finite_study import write_finite_study
from fixtures.refusals import refused
from fixtures.small_study import run_of, write_study
from fixtures.study_files import load_study
from fixtures.table_systems import table_system, write_systems

from kvdrift.flows.generate.local import LocalGenerator
from kvdrift.flows.run import stages
from kvdrift.flows.run.comparison import check_agrees
from kvdrift.generator.checks.random_models import save_random_model
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_ID
from kvdrift.generator.transformer.files.locations import model_location
from kvdrift.generator.transformer.other_weights.model import load_transformer
from kvdrift.schema.errors import PlanError
from kvdrift.schema.study import Study


def systems_study(folder: Path, path: str) -> Study:
    """The finite study of systems in a file."""
    return load_study(
        write_finite_study(folder, ('family = "mixture"\nalphabet = 2', f'tables = "{path}"'), ("development = 4", "development = 2"),
                           ("evaluation = 6", "evaluation = 2"), ("documents = 6", "documents = 2"))
    )  # fmt: skip


def test_a_store_goes_on_with_systems_at_another_path_and_not_with_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "studies").mkdir()
    (folder / "older").mkdir()
    for path in (folder / "one.json", folder / "older" / "one.json"):
        write_systems(path, [table_system(4, 0.5, {"mixture": 0.4})] * 4)
    before = run_of(systems_study(folder, "older/one.json"), tmp_path / "store")
    stages.prepare(before)
    stages.develop(before)
    (row,) = before.store.read("studies").to_pylist()
    after = run_of(systems_study(folder, "one.json"), tmp_path / "store")
    assert after.study.sha256 != before.study.sha256
    stages.prepare(after)
    assert stages.develop(after) == 0
    assert after.store.read("studies").to_pylist() == [row]
    write_systems(folder / "one.json", [table_system(4, 0.5, {"mixture": 0.3})] * 4)
    line = refused(check_agrees, run_of(systems_study(folder, "one.json"), tmp_path / "store"), error=PlanError)
    assert "distributions of action 'mixture': stored " in line


def test_a_models_folder_begins_at_the_study_file_and_its_name_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("studies", "elsewhere"):
        (tmp_path / folder).mkdir()
    save_random_model(tmp_path / "models" / "random", "llama", vocab_size=256)
    monkeypatch.chdir(tmp_path / "elsewhere")
    change = f'id = "{EMBEDDED_ID}"'
    study = load_study(write_study(tmp_path / "studies", (change, 'id = "../models/random"')))
    assert model_location(study.model) == str(tmp_path / "models" / "random")
    assert load_transformer(study).id == study.model.id == "../models/random"
    elsewhere: Study = pickle.loads(pickle.dumps(study))  # noqa: S301 - as side processes and workers get it
    assert model_location(elsewhere.model) == model_location(study.model)
    (action, *_) = run_of(study, tmp_path / "store").material.actions
    assert LocalGenerator().identify(study, required=False)(action).weights_sha256 is not None
    unnamed = load_study(write_study(tmp_path, (change, 'id = "models/random"')))
    assert model_location(unnamed.model) == str(tmp_path / "models" / "random")
    monkeypatch.chdir(tmp_path)
    beside = load_study(write_study(tmp_path / "studies", (change, 'id = "models/random"')))
    line = refused(model_location, beside.model)
    assert line.startswith("model.id = 'models/random': ")
    assert f"{tmp_path}/studies" in line
    assert "write '../models/random'" in line


@pytest.mark.parametrize("name", [EMBEDDED_ID, "org/model", "/abs/model", "~/model"])
def test_other_ids_stay_as_they_are(tmp_path: Path, name: str) -> None:
    study = load_study(write_study(tmp_path, (f'id = "{EMBEDDED_ID}"', f'id = "{name}"')))
    assert model_location(study.model) == name
