"""``docs/notebook.ipynb`` runs beside a store, with DuckDB and matplotlib and without a module of ours."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.house import ROOT

from website.notebook import executed
from website.pages import notebook_page

NUMBERS = json.loads((ROOT / "docs" / "numbers.json").read_text(encoding="utf-8"))["quickstart"]
NOTEBOOK = json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))


def test_its_outputs_are_those_of_the_quickstart() -> None:
    """``website.notebook`` writes them: a table whose numbers ``docs/numbers.json`` has too, and a figure."""
    assert (NOTEBOOK["nbformat"], NOTEBOOK["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert {cell["cell_type"] for cell in NOTEBOOK["cells"]} == {"markdown", "code"}
    first, table, figure = (cell["outputs"] for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code")
    assert first == []
    rows = [re.findall(r"[\w.-]+", line) for line in table[0]["text"] if "half" in line or "128" in line]
    assert len(rows) == 3
    for action, _, *values in rows:
        expected = [NUMBERS[action][name] for name in ("mismatch", "mean_entry", "accuracy")]
        assert [float(value) for value in values] == pytest.approx(expected, abs=1e-6)
    assert base64.b64decode(figure[0]["data"]["image/png"]).startswith(b"\x89PNG")


def test_outputs_are_written_of_any_store(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE", "")
    made = executed(json.loads(json.dumps(NOTEBOOK)), str(finished))
    first, table, figure = (cell["outputs"] for cell in made["cells"] if cell["cell_type"] == "code")
    assert first == []
    assert "recent-half" in "".join(table[0]["text"])
    assert [output["output_type"] for output in figure] == ["display_data"]
    assert figure[0]["data"]["image/png"] != NOTEBOOK["cells"][-2]["outputs"][0]["data"]["image/png"]
    page = notebook_page(json.dumps(made))
    assert "```text\n┌" in page
    assert f"(data:image/png;base64,{figure[0]['data']['image/png']})" in page


@pytest.mark.slow
def test_it_runs_with_duckdb_alone(finished: Path, tmp_path: Path) -> None:
    code = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    after = """
figure.savefig("figure.png")
curves = {line.get_label(): max(line.get_ydata()) for line in axes.get_lines()}
truth = dict(catalog.sql("select action, 100 * divergence_probability from summary where not control").fetchall())
assert curves.keys() == truth.keys()
assert all(abs(curves[action] - share) < 1e-9 for action, share in truth.items())
import sys
assert "kvdrift" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", "\n".join([*code, after])], cwd=tmp_path, capture_output=True, text=True,
        check=False, env=os.environ | {"STORE": str(finished), "MPLBACKEND": "agg"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "recent-half" in done.stdout
    assert (tmp_path / "figure.png").stat().st_size > 5000
