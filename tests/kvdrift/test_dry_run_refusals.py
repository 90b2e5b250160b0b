"""``kvdrift run --dry-run`` refuses what ``run`` refuses, and counts against the store."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fixtures.command import call, mistake
from fixtures.small_study import ADDED_ACTION, run_of, write_study
from fixtures.study_files import load_study

from kvdrift.flows.generate.local import LocalGenerator
from kvdrift.flows.generate.storing import storing
from kvdrift.flows.run import stages
from kvdrift.flows.run.study_run import DocumentLimit, StudyRun
from kvdrift.log.store import Store
from kvdrift.schema.tables import SCHEMA_VERSION

Change = tuple[str, str]
TINY = 'id = "kvdrift/tiny"'
NEEDLE = 'source = "embedded"\ntasks = ["needle"]\nlength = 384'


def same_line(capsys: pytest.CaptureFixture[str], study: Path, store: Path, *options: str) -> str:
    """Return the line that both commands print; nothing may be written."""
    lines = [mistake(capsys, "run", study, "--store", store, *options, *dry) for dry in ((), ("--dry-run",))]
    assert lines[0] == lines[1]
    return lines[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((TINY, f'{TINY}\ndtype = "fp16"'), "model.dtype = 'fp16': "),
        ((TINY, f'{TINY}\ndevice = "cuda:77"'), "model.device = 'cuda:77': "),
        ((NEEDLE, 'source = "jsonl"\npath = "nowhere.jsonl"\nlength = 384'), "nowhere.jsonl: no such file"),
        ((NEEDLE, 'source = "ruler"\ntasks = ["vt"]\nlength = 384'), "embedded source"),
    ],
)  # fmt: skip
def test_what_run_refuses_is_refused_by_the_same_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, change: Change, message: str
) -> None:
    assert message in same_line(capsys, write_study(tmp_path, change), tmp_path / "store")
    assert not (tmp_path / "store").exists()


_TILED = ('selector = "recent"\nkeep = "1/2"', 'selector = "numerics"\nkeep = "all"\nrow_tile = 3')


@pytest.mark.parametrize(
    ("placed", "gpu", "fault", "message"),
    [
        ('device = "cuda"', False, "unknown", "row_tile = 3: model.device = 'cuda' is a GPU"),
        ('device = "cuda:1"', True, None, "row_tile = 3: model.device = 'cuda:1' is a GPU"),
        ('device = "cuda"', True, "triton is not installed", "model.device = 'cuda': "),  # none of this machine's
        ('device_map = "auto"', True, None, "row_tile = 3: model.device_map = 'auto' is a GPU"),
        ('device_map = "auto"', False, "unknown", "model.device_map = 'auto': needs accelerate"),
    ],
)
def test_tiles_of_an_action_on_a_gpu(
    placed: str, gpu: bool, fault: str | None, message: str, capsys: pytest.CaptureFixture[str],  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    """A GPU with fused attention refuses ``row_tile`` before anything is loaded; a GPU without Triton does not."""
    checks = "kvdrift.generator.transformer.model_checks"
    monkeypatch.setattr(f"{checks}.torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr(f"{checks}.attention_fault", lambda _: fault)
    monkeypatch.setattr(f"{checks}.importlib.util.find_spec", lambda _: None)
    study = write_study(tmp_path, (TINY, f"{TINY}\n{placed}"), _TILED)
    line = same_line(capsys, study, tmp_path / "store")
    assert message in line
    assert line.startswith("kvdrift: action 'recent-half': ") == message.startswith("row_tile")
    assert not (tmp_path / "store").exists()


def test_a_store_of_a_newer_version_is_no_missing_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    for table in ("events", "plans"):
        first = Path(store.location, table, "_delta_log", f"{0:020d}.json")
        first.write_text(first.read_text().replace(f'"{SCHEMA_VERSION}"', '"99"'))
    line = same_line(capsys, write_study(tmp_path), tmp_path / "store")
    assert "has schema version 99" in line


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measurement of time, for tests in which it must not run or does not matter."""
    monkeypatch.setattr("kvdrift.dry_run.description.time_lines", lambda *_, **__: iter(()))


@pytest.mark.usefixtures("unmeasured")
class TestAgainstTheStore:
    """The finished small study: 4 development and 6 evaluation documents under 2 actions and the control."""

    def test_a_finished_study(self, capsys: pytest.CaptureFixture[str], finished: Path, tmp_path: Path) -> None:
        before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
        code, out, _ = call(capsys, "run", write_study(tmp_path), "--store", finished, "--dry-run")
        assert code == 0
        assert "development: 4 documents, all 12 units are stored\n" in out
        assert "evaluation: 6 documents, all 18 units are stored\n" in out
        assert out.endswith("  nothing to do\n")
        assert before == {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}

    @pytest.mark.parametrize("change", [("seed = 3", "seed = 4"), ("draws = 200", "draws = 300")])
    def test_a_changed_setting(
        self, capsys: pytest.CaptureFixture[str], finished: Path, tmp_path: Path, change: Change
    ) -> None:
        assert change[1].split(" ", 1)[0] in same_line(capsys, write_study(tmp_path, change), finished)

    def test_an_action_that_is_new(self, capsys: pytest.CaptureFixture[str], finished: Path, tmp_path: Path) -> None:
        _, out, _ = call(capsys, "run", write_study(tmp_path, ADDED_ACTION), "--store", finished, "--dry-run")
        assert "development: 4 documents, 4 units besides 12 that are stored, 16 trajectories" in out
        assert (
            "evaluation: 6 documents, 6 units besides 18 that are stored, 30 trajectories" in out
        )  # the plan's K and N
        assert "new: snapkv-100 (6)" in out
        assert re.search(r"then: derive .*, estimate, write", out)

    def test_an_action_that_is_redone(self, capsys: pytest.CaptureFixture[str], finished: Path, tmp_path: Path) -> None:
        changed = write_study(tmp_path, ('selector = "recent"', 'selector = "recent"\nsinks = 2'))
        same_line(capsys, changed, finished)
        _, out, _ = call(capsys, "run", changed, "--store", finished, "--dry-run", "--redo", "recent-half")
        assert "evaluation: 6 documents, 6 units besides 12 that are stored" in out
        assert "redone: recent-half (6)" in out
        assert "recent-hlf" in same_line(capsys, write_study(tmp_path), finished, "--redo", "recent-hlf")

    def test_what_a_stopped_run_left(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        study, store = write_study(tmp_path), tmp_path / "store"
        stages.prepare(run_of(load_study(study), store))
        stages.develop(StudyRun(load_study(study), str(store), storing(LocalGenerator()), limit=DocumentLimit(1)))
        _, out, _ = call(capsys, "run", study, "--store", store, "--dry-run")
        assert "development: 4 documents, 9 units besides 3 that are stored" in out
        assert "missing: snapkv-half (3), recent-half (3), full (3)" in out
        assert re.search(r"then: derive 3 units .*, score answers, estimate", out)
