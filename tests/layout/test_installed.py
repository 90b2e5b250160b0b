"""The wheel as a stranger has it: an environment of its own, an empty folder, a proxy that does not answer, a notebook.

``make installed`` runs this, in about ten minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.house import ROOT

pytestmark = pytest.mark.installed

NOTEBOOK = """
import sys
import nbformat
from nbclient import NotebookClient

cells = ["import kvdrift", "kvdrift.run('finite_state.toml')", "kvdrift.run('finite_state.toml', dry_run=True)"]
made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
NotebookClient(made, timeout=600).execute()
nbformat.write(made, "made.ipynb")
"""


def ran(folder: Path, *command: str | Path, code: int = 0) -> str:
    """Run a command of the environment in a folder, behind a proxy that does not answer; return its output."""
    proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9")
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "OMP_NUM_THREADS"}}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=environment | proxies, timeout=1200
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the programs of an environment with the wheel, PyPI's ``schema``, and what runs notebooks."""
    folder = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "venv", folder / "environment"], check=True)
    pip = [folder / "environment" / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "schema", "ipykernel", "nbclient", wheel], check=True, cwd=folder)
    return folder / "environment" / "bin"


def test_the_quickstart_in_an_empty_folder(programs: Path, tmp_path: Path) -> None:
    kvdrift = programs / "kvdrift"
    ran(tmp_path, kvdrift, "init", "--example", "quickstart")
    page = ran(tmp_path, kvdrift, "run", "quickstart.toml").splitlines()[-1].removeprefix("report: ")
    assert "<h1" in (tmp_path / page).read_text(encoding="utf-8")
    query = "select action from decomposition where split = 'evaluation' and stratum = 'pooled' order by mismatch"
    rows = json.loads(ran(tmp_path, kvdrift, "sql", "stores/quickstart", query, "--format", "json"))
    assert rows[0] == {"action": "full"}
    best, worst = (row["action"] for row in (rows[1], rows[-1]))
    gate = ("gate", "stores/quickstart", "--quantity", "mismatch", "--action", best, "--baseline", worst)
    assert "equivalent or better" in ran(tmp_path, kvdrift, *gate, "--margin", "0.01")
    assert "nothing to do" in ran(tmp_path, kvdrift, "run", "quickstart.toml")
    assert ran(tmp_path, kvdrift, "verify", "stores/quickstart")
    assert (
        ran(tmp_path, programs / "python", "-c", "from schema import Schema; print(Schema(int).validate(7))") == "7\n"
    )


def test_a_study_in_a_notebook(programs: Path, tmp_path: Path) -> None:
    """A cell shows the progress of each stage, and no warning."""
    ran(tmp_path, programs / "kvdrift", "init", "--example", "finite_state")
    ran(tmp_path, programs / "python", "-c", NOTEBOOK)
    cells = json.loads((tmp_path / "made.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = cells[1]["outputs"]
    assert [output for output in outputs if output.get("name") == "stderr"] == []
    lines = ["".join(output["data"]["text/plain"]) for output in outputs if output["output_type"] == "display_data"]
    assert any(line.startswith("evaluation documents: 24 of 24") for line in lines), lines
    assert "".join(outputs[-1]["data"]["text/plain"]).startswith("PosixPath(")
    assert cells[2]["outputs"]
