"""The wheel installs one name, and a study runs beside files that have the names of our folders."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

import pytest
from fixtures.finite_study import write_finite_study
from fixtures.house import PACKAGES, ROOT


def ran(command: Sequence[str | Path], folder: Path) -> str:
    """Run a command, which must succeed, in a folder; return its standard output. PYTHONPATH has no say."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    ran([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], ROOT)
    (found,) = folder.glob("*.whl")
    return found


def test_it_has_every_file_under_one_name(wheel: Path) -> None:
    folders = (*PACKAGES, "studies")
    files = {str(path.relative_to(ROOT)) for name in folders for path in (ROOT / name).rglob("*") if path.is_file()}
    expected = {
        name if name.startswith("kvdrift/") else f"kvdrift/{name}" for name in files if "__pycache__" not in name
    }
    assert {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name} == expected


@pytest.mark.slow
def test_a_study_runs_beside_files_with_the_names_of_our_folders(tmp_path: Path) -> None:
    for name in ("schema", "log"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError")
    (tmp_path / "stats").mkdir()
    (tmp_path / "stats" / "__init__.py").write_text("raise RuntimeError")
    (tmp_path / "kvdrift").mkdir()
    study = write_finite_study(tmp_path)
    assert "report: " in ran([sys.executable, "-m", "kvdrift", "run", study, "--store", "store"], tmp_path)
    assert ran([Path(sys.executable).with_name("kvdrift"), "verify", "store"], tmp_path)
