"""``docs/notebook.ipynb`` runs beside a store, with DuckDB and matplotlib and without a module of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from fixtures.house import PACKAGES, ROOT

NOTEBOOK = json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))


def test_it_has_no_outputs_that_could_be_old() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["metadata"]["kernelspec"]["name"]) == (4, "python3")
    for cell in NOTEBOOK["cells"]:
        assert cell["cell_type"] in {"markdown", "code"}
        assert cell.get("outputs", []) == []


def test_it_runs_with_duckdb_alone(finished: Path, tmp_path: Path) -> None:
    code = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    after = f"""
figure.savefig("figure.png")
curves = {{line.get_label(): max(line.get_ydata()) for line in axes.get_lines()}}
truth = dict(catalog.sql("select action, 100 * divergence_probability from summary where not control").fetchall())
assert curves.keys() == truth.keys()
assert all(abs(curves[action] - share) < 1e-9 for action, share in truth.items())
import sys
assert {{name.partition(".")[0] for name in sys.modules}}.isdisjoint({PACKAGES!r})
"""  # noqa: S608 - our own words
    done = subprocess.run(
        [sys.executable, "-I", "-c", "\n".join([*code, after])], cwd=tmp_path, capture_output=True, text=True,
        check=False, env=os.environ | {"STORE": str(finished), "MPLBACKEND": "agg"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "recent-half" in done.stdout
    assert (tmp_path / "figure.png").stat().st_size > 5000
