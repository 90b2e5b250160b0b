"""Selectors, codecs and policies that decide by more than source and parameters: replicates are not pooled."""

from __future__ import annotations

import shutil
from pathlib import Path

import duckdb
import pytest
from fixtures import own_codecs, own_policies
from fixtures.command import call
from fixtures.own_files import prompts, write_own_study
from fixtures.own_selectors import UNSEEN
from fixtures.refusals import refused
from fixtures.small_study import evaluate, finish, run_of
from fixtures.study_files import changed, load_study

from kvdrift.flows.run import stages
from kvdrift.flows.run.comparison import check_agrees, redo_actions
from kvdrift.flows.run.study_run import StudyRun
from kvdrift.log.store import Store
from kvdrift.schema.errors import UnlikeUnitsError
from kvdrift.sql.catalog import open_views
from kvdrift.sql.catalog_file import refresh_catalog
from kvdrift.verification.whole_store import verify

READS = ("import torch\n", "import os\n\nimport torch\n")
CODEC = changed(
    own_codecs.MODULE, READS,
    ("(numbers / self.step).round() * self.step", 'numbers * float(os.environ.get("COORDINATE", "1")) / 8'),
)  # fmt: skip
POLICY = changed(
    own_policies.MODULE, READS,
    ("return TOVA().score(layer)", 'return layer.key[..., int(os.environ.get("COORDINATE", "1"))].float().abs()'),
)  # fmt: skip
ACTION = 'selector = "recent"\nkeep = "1/2"'
OWN = 'selector = "mine:Mine"\nkeep = "1/2"'
MORE = ("development_replicates = 2", "development_replicates = 4")


def variable(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("COORDINATE", "2")


def written(folder: Path, action: str = OWN) -> Path:
    """A study of the module ``mine`` beside it."""
    (folder / "mine.py").write_text(UNSEEN)
    return write_own_study(folder, prompts(40), (ACTION, action))


def run_in(folder: Path, *changes: tuple[str, str]) -> StudyRun:
    study = folder / "own.toml"
    study.write_text(changed(study.read_text(), *changes))
    return run_of(load_study(study), folder / "store")


def developed(run: StudyRun) -> None:
    stages.prepare(run)
    stages.develop(run)


def check_line(line: str, column: str = "kept_sha256", does: str = "keep") -> None:
    assert line.startswith("action 'recent-half', document 'p")
    assert f"of study 'own': replicates [0, 2) and [2, 4) {does} different entries (layer " in line
    assert f": {column} " in line
    assert "kvdrift run STUDY.toml --redo recent-half " in line


def test_a_run_that_keeps_other_entries_stores_nothing_and_a_redo_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    first = run_in(tmp_path)
    developed(first)
    units = first.store.row_count("units")
    variable(monkeypatch)
    grown = run_in(tmp_path, MORE)
    check_line(refused(developed, grown, error=UnlikeUnitsError))
    kept = grown.store.units(columns=["action", "first_replicate"]).to_pylist()
    assert all(unit["first_replicate"] == 0 for unit in kept if unit["action"] == "recent-half")
    assert len(kept) == units
    redo_actions([grown], ["recent-half"])
    developed(run_in(tmp_path))
    assert grown.store.row_count("units") > units


@pytest.mark.by_default("codec")
@pytest.mark.parametrize(
    ("name", "text", "action"),
    [
        ("codec", CODEC, 'codec = "mine:Mine"'),
        ("policy", POLICY, 'policy = "mine:Mine"\nkeep = 20'),
    ],
)
def test_what_is_read_of_a_codec_or_policy_is_held_too(
    name: str, text: str, action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, action=action)
    (tmp_path / "mine.py").write_text(text)
    first = run_in(tmp_path)
    developed(first)
    units = first.store.units(columns=["action", "read_checksums"]).to_pylist()
    assert {unit["action"] for unit in units if unit["read_checksums"]} == {"recent-half"}, name
    variable(monkeypatch)
    line = refused(developed, run_in(tmp_path, MORE), error=UnlikeUnitsError)
    check_line(line, "read_checksums", "read")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluated study whose replicates 2 and 3 keep other entries, as versions before the check stored them."""
    folder = tmp_path_factory.mktemp("mixed")
    written(folder)
    evaluate(run_in(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvdrift.log.units.commits.check_same_entries", lambda *_: None)
        variable(patch)
        grown = run_in(folder, ("\nreplicates = 2", "\nreplicates = 4"))
        stages.prepare(grown)
        stages.plan(grown)
        stages.evaluate(grown)
        assert stages.derive(grown)
    return folder


def test_every_reader_that_ends_in_a_number_refuses_a_mixed_store(
    mixed: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store = mixed / "store"
    gate = ["--quantity", "mismatch", "--action", "recent-half", "--baseline", "full", "--margin", "0.5"]
    calls: list[list[str | Path]] = [
        ["run", mixed / "own.toml", "--store", store], ["gate", store, *gate], ["report", store, "-o", tmp_path],
        ["report", store, "--side-by-side", "-o", tmp_path], ["analyze", store], ["sql", store, "from summary"],
        ["sql", store, "from contrasts"], ["sql", store, "select count(*) from estimates"],
    ]  # fmt: skip
    for asked in calls:
        code, out, err = call(capsys, *asked)
        assert (code, out) == (2, "")
        check_line(err.splitlines()[-1].removeprefix("kvdrift: "))


def test_verify_names_the_units_of_a_mixed_store(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "verify", mixed / "store")
    faults = [line.removeprefix("  fault: units: ") for line in out.splitlines() if "fault: " in line]
    assert code == 1
    assert len(faults) == 2, "both evaluation documents"
    for line in faults:
        check_line(line)
    assert out.endswith(": 2 faults\n")


def test_stored_tables_and_single_replicates_of_a_mixed_store_stay_readable(mixed: Path) -> None:
    store = Store.open(mixed / "store")
    refresh_catalog(store)
    with open_views(store) as views, duckdb.connect(str(mixed / "store" / "catalog.duckdb"), read_only=True) as file:
        for view in ("units", "events", "trajectories", "revisions", "plan", "analyzed_trajectories", "controls"):
            assert len(file.sql(f"from {view}").fetchall()) == views.rows(view).num_rows > 0
        with pytest.raises(duckdb.Error, match=r"recent-half.*keep different entries"):
            file.sql("from decomposition").fetchall()


@pytest.mark.slow
def test_a_redo_makes_a_mixed_store_whole(mixed: Path, tmp_path: Path) -> None:
    grown = run_of(load_study(mixed / "own.toml"), shutil.copytree(mixed / "store", tmp_path / "store"))
    check_line(refused(check_agrees, grown, error=UnlikeUnitsError))
    check_agrees(grown, ["recent-half"])
    redo_actions([grown], ["recent-half"])
    finish(grown)
    with open_views(grown.store) as views:
        assert views.rows("summary").num_rows > 0
    assert not [fault for check in verify(grown.store) for fault in check.faults]
