"""Finished studies whose laws or selectors changed under the same names: refused, and exact once they are redone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from fixtures.own_files import prompts, write_own_study
from fixtures.own_selectors import write_module
from fixtures.refusals import refused
from fixtures.small_study import evaluate, run_of
from fixtures.stored_units import units_of
from fixtures.study_files import load_study
from fixtures.table_systems import copy_study, study_of_tables, table_system, write_systems
from safetensors.numpy import load_file, save_file

from kvdrift.flows.run import stages
from kvdrift.flows.run.checks import check_study
from kvdrift.flows.run.comparison import check_agrees, differences, redo_actions
from kvdrift.flows.run.study_run import StudyRun
from kvdrift.generator.generation.units import library_versions
from kvdrift.log.store import Store, Unit
from kvdrift.schema.errors import OperationError, PlanError
from kvdrift.schema.tables import IDENTITIES, TABLES
from kvdrift.sql.catalog import open_views
from kvdrift.verification.whole_store import verify

TABLES_STUDY = (
    study_of_tables(2, 2, 2, "one", "two")
    + """
[plan]
baseline = "one"
primary = ["mismatch"]
replicates = 3
documents = 2
development_replicates = 2
"""
)
RAW = ("events", "exact_values", "documents")


def write_tables(path: Path, *, actions: Sequence[float] = (0.1, 0.2), reference: float = 0.5) -> None:
    """Six equal systems; each action is that far from the reference."""
    laws = {name: reference + shift for name, shift in zip(("one", "two"), actions, strict=True)}
    write_systems(path, [table_system(2, reference, laws)] * 6)


def finite_run(folder: Path, store: str = "store") -> StudyRun:
    """A run of the study of tables, whose working folder this must be."""
    if not (folder / "tables.json").is_file():
        write_tables(folder / "tables.json")
    (folder / "study.toml").write_text(TABLES_STUDY)
    return run_of(load_study(folder / "study.toml"), folder / store)


def faults(store: Store, subject: str | None = None) -> list[str]:
    """The faults that ``verify`` finds, or those of one check, after which it checks nothing more."""
    if subject is not None:
        return [str(fault) for fault in next(check for check in verify(store) if check.subject == subject).faults]
    return [str(fault) for check in verify(store) for fault in check.faults]


def developed(run: StudyRun) -> StudyRun:
    """The events of the development documents."""
    stages.prepare(run)
    stages.develop(run)
    return run


def assert_same_views(ours: StudyRun, theirs: StudyRun, views: Collection[str], **rows: str) -> None:
    with open_views(ours.store) as one, open_views(theirs.store) as other:
        for view in views:
            redone, fresh = (opened.rows(view, **rows) for opened in (one, other))
            columns = [name for name in fresh.column_names if name not in {"action_revision", "unit"}]
            assert redone.select(columns).equals(fresh.select(columns)), view


@pytest.fixture(scope="module")
def laws_finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("laws")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        evaluate(finite_run(folder))
    return folder


@pytest.fixture
def laws(laws_finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a finished study of tables, to be changed."""
    monkeypatch.chdir(tmp_path)
    copy_study(laws_finished, tmp_path)
    return tmp_path


def test_units_and_rows_say_what_made_them(laws: Path) -> None:
    run = finite_run(laws)
    rows = {row["action"]: row for row in run.store.read("identities").to_pylist()}
    assert rows.keys() == {"one", "two", "full"}
    units = run.store.units().to_pylist()
    assert units
    for unit in units:
        assert all(unit[name] == rows[unit["action"]][name] for name in IDENTITIES.columns)
        assert unit["prompt_sha256"] == run.store.read("documents")["prompt_sha256"][0].as_py()
    assert len({row["weights_sha256"] for row in rows.values()}) == 1
    assert len({row["selector_sha256"] for row in rows.values()}) == 3
    assert differences(run) == []
    assert faults(run.store) == []


def test_other_laws_of_the_reference_concern_every_action(laws: Path) -> None:
    write_tables(laws / "tables.json", reference=0.4)
    run = finite_run(laws)
    line = refused(check_agrees, run, error=PlanError)
    for name in ("one", "two", "full"):
        assert f"reference distributions of action '{name}'" in line
    assert "kvdrift run --redo one --redo two --redo full " in line
    refused(check_agrees, run, ["one", "two"], error=PlanError)
    check_agrees(run, ["one", "two", "full"])
    redo_actions([run], ["one", "two", "full"])
    assert_same_views(developed(run), developed(finite_run(laws, "fresh")), RAW)


def test_what_changes_during_a_run_is_refused(laws: Path) -> None:
    run = finite_run(laws)
    redo_actions([run], ["two"])
    stages.prepare(run)
    write_tables(laws / "tables.json", actions=(0.1, 0.45))
    before = run.store.versions()
    line = refused(stages.develop, run, error=OperationError)
    assert "selector_sha256 is" in line
    assert run.store.versions() == before


def test_more_documents_of_the_same_file_are_no_other_laws(laws: Path) -> None:
    study = laws / "study.toml"
    finite_run(laws)
    study.write_text(study.read_text().replace("evaluation = 2", "evaluation = 4"))
    run = run_of(load_study(study), laws / "store")
    (line,) = map(str, differences(run))
    assert line.startswith("evaluation documents of all: stored 2, requested 4; ")


def test_verify_names_units_that_were_made_otherwise(laws: Path) -> None:
    store = finite_run(laws).store
    unit = next(one.record for one in units_of(store) if one.record["action"] == "two")
    unit |= {"first_replicate": 90, "replicates": 1, "selector_sha256": "1" * 64}
    names = {name: unit[name] for name in ("study", "model", "doc", "action", "action_revision")}
    events = [
        names | {"replicate": 90, "t": t, "x_token": 0, "y_token": 0, "delta": 0.0, "f": 0.0, "x_eos": False,
                 "y_eos": False, "kind": "coupled", "weight": None}
        for t in (1, 2)
    ]  # fmt: skip
    store.append_units([Unit(unit, pa.Table.from_pylist(events, schema=TABLES["events"].schema))])
    (found_unit,) = faults(store, "identities")
    assert "action=two" in found_unit
    assert f"selector_sha256 is '{'1' * 64}' in 1 unit" in found_unit


def test_a_formula_that_changed_is_refused_and_redone(tmp_path: Path) -> None:
    study = write_own_study(tmp_path, prompts(16), ('selector = "recent"', 'selector = "my_selector:Mine"'))

    def own(store: str) -> StudyRun:
        return run_of(load_study(study), tmp_path / store)

    write_module(tmp_path)
    before = developed(own("store")).store.read("events")
    assert differences(own("store")) == []
    write_module(tmp_path, ("float() * self.sign", "float() * -self.sign"))
    run = own("store")
    line = refused(check_agrees, run, error=PlanError)
    assert "source of selector 'my_selector:Mine' of action 'recent-half': stored" in line
    assert "(2 units); kvdrift run --redo recent-half " in line
    check_agrees(run, ["recent-half"])
    redo_actions([run], ["recent-half"])
    fresh = own("fresh")
    for each in (run, fresh):
        stages.prepare(each)
        assert stages.develop(each) == (2 if each is run else 4)  # the control is not redone
    with open_views(run.store) as ours, open_views(fresh.store) as theirs:
        new, alone = (views.rows("events").drop_columns(["action_revision", "unit"]) for views in (ours, theirs))
    assert new.equals(alone)
    old, new = (rows.filter(pc.equal(rows["action"], "recent-half"))["f"].to_pylist() for rows in (before, new))
    assert sorted(old) != sorted(new)


@pytest.mark.slow
def test_other_weights_in_the_same_folder_are_refused_and_redone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    study, weights = write_own_study(tmp_path, prompts(16)), tmp_path / "model" / "model.safetensors"

    def local(store: str) -> StudyRun:
        return run_of(load_study(study), tmp_path / store)

    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(
            "kvdrift.generator.generation.units.versions_on", lambda _: {**library_versions(), "gpu": "NVIDIA X"}
        )
        developed(local("store"))
    assert differences(local("store")) == []
    with monkeypatch.context() as unread:  # units were made from these files by these libraries, wherever
        unread.setattr("kvdrift.flows.run.checks.check_model", None)
        check_study(local("store"))
    others = {name: values * np.float32(0.7) for name, values in load_file(weights).items()}
    weights.unlink()
    save_file(others, weights, metadata={"format": "pt"})
    line = refused(check_agrees, local("store"), error=PlanError)
    for name in ("recent-half", "full"):
        assert f"model files (weights and configuration) of action '{name}': stored" in line
    assert "kvdrift run --redo recent-half --redo full " in line
    run = local("store")
    redo_actions([run], ["recent-half", "full"])
    assert_same_views(developed(run), developed(local("fresh")), ("events",))
    assert faults(run.store) == []
