"""The README's statements about ``studies/frontier.toml``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.house import ROOT

from log.store import Store
from sql.catalog import open_views

SAID = {"int8": "8 bits", "int4": "4 bits", "snapkv-half": "half of the entries"}


@pytest.mark.slow
def test_the_frontier_is_as_the_readme_has_it(tmp_path: Path) -> None:
    """Numbers agree within the widths of intervals: processors round 16 bits differently, as the README says."""
    study = ROOT / "studies" / "frontier.toml"
    command = [sys.executable, "-m", "kvdrift", "run", study, "--store", tmp_path / "store"]
    subprocess.run(command, check=True, timeout=1800, capture_output=True)
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    with open_views(Store.open(tmp_path / "store")) as views:
        rows = {row["action"]: row for row in views.rows("summary").to_pylist()}
        widths = {
            row["action"]: row["high"] - row["low"]
            for row in views.rows("estimates", quantity="mismatch", stratum="pooled", split="evaluation").to_pylist()
        }
        distance = {row["action"]: row["rollout_tv"] for row in views.rows("decomposition", stratum="pooled",
                                                                           split="evaluation").to_pylist()}  # fmt: skip
    for action, words in SAID.items():
        found = re.search(rf"{words} \((\d+)%.*?\).*?([\d.]+)%", readme)
        assert found is not None, action
        assert float(found[1]) == round(100 * rows[action]["cache_share"]), action
        assert abs(float(found[2]) / 100 - rows[action]["mismatch"]) < widths[action], action
    found = re.search(r"the noise floor, disagrees on ([\d.]+)%", readme)
    assert found is not None
    assert abs(float(found[1]) / 100 - rows["noise-floor"]["mismatch"]) < widths["noise-floor"]
    assert distance["int8"] < distance["int4"] < distance["int2"]
    assert rows["full"]["mismatch"] == 0
