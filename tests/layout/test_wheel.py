"""The wheel installs one name, and a study runs beside files that have the names of our folders."""

from __future__ import annotations

import json
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
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "OMP_NUM_THREADS"}}
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


# Installed in an environment of its own; make installed runs these in ten minutes

NOTEBOOK = """
import sys
import nbformat
from nbclient import NotebookClient

cells = ["import kvdrift", "kvdrift.run('finite_state.toml')", "kvdrift.run('finite_state.toml', dry_run=True)"]
made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
NotebookClient(made, timeout=600).execute()
nbformat.write(made, "made.ipynb")
"""


def behind_a_proxy(folder: Path, *command: str | Path) -> str:
    """Run a command, which must succeed, in a folder behind a proxy that does not answer; return its output."""
    return ran(
        ["env", *(f"{name}=http://127.0.0.1:9" for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY")), *command],
        folder,
    )


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the programs of an environment with the wheel, PyPI's ``schema``, and what runs notebooks."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", folder / "environment"], check=True)
    pip = [folder / "environment" / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, "schema", "ipykernel", "nbclient", wheel], check=True, cwd=folder)
    return folder / "environment" / "bin"


@pytest.mark.installed
def test_the_quickstart_in_an_empty_folder(programs: Path, tmp_path: Path) -> None:
    kvdrift = programs / "kvdrift"
    behind_a_proxy(tmp_path, kvdrift, "init", "--example", "quickstart")
    page = behind_a_proxy(tmp_path, kvdrift, "run", "quickstart.toml").splitlines()[-1].removeprefix("report: ")
    assert "<h1" in (tmp_path / page).read_text(encoding="utf-8")
    query = "select action from decomposition where split = 'evaluation' and stratum = 'pooled' order by mismatch"
    rows = json.loads(behind_a_proxy(tmp_path, kvdrift, "sql", "stores/quickstart", query, "--format", "json"))
    assert rows[0] == {"action": "full"}
    best, worst = (row["action"] for row in (rows[1], rows[-1]))
    gate = ("gate", "stores/quickstart", "--quantity", "mismatch", "--action", best, "--baseline", worst)
    assert "equivalent or better" in behind_a_proxy(tmp_path, kvdrift, *gate, "--margin", "0.01")
    assert "nothing to do" in behind_a_proxy(tmp_path, kvdrift, "run", "quickstart.toml")
    assert behind_a_proxy(tmp_path, kvdrift, "verify", "stores/quickstart")
    assert (
        behind_a_proxy(tmp_path, programs / "python", "-c", "from schema import Schema; print(Schema(int).validate(7))")
        == "7\n"
    )


@pytest.mark.installed
def test_a_study_in_a_notebook(programs: Path, tmp_path: Path) -> None:
    """A cell shows the progress of each stage, and no warning."""
    behind_a_proxy(tmp_path, programs / "kvdrift", "init", "--example", "finite_state")
    behind_a_proxy(tmp_path, programs / "python", "-c", NOTEBOOK)
    cells = json.loads((tmp_path / "made.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = cells[1]["outputs"]
    assert [output for output in outputs if output.get("name") == "stderr"] == []
    lines = ["".join(output["data"]["text/plain"]) for output in outputs if output["output_type"] == "display_data"]
    assert any(line.startswith("evaluation documents: 24 of 24") for line in lines), lines
    assert "".join(outputs[-1]["data"]["text/plain"]).startswith("PosixPath(")
    assert cells[2]["outputs"]
