"""Every benchmark runs at its smallest sizes and prints its table. The measured numbers mean nothing there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.measurement import benchmark_parser, run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STUDY = ("--strata=2", "--documents=4", "--replicates=4", "--horizon=8")
SMALLEST = {
    "analysis": (*STUDY, "--draws=200"),
    "commits": ("--workers=2", "--commits=1", "--at-once"),
    "families": ("--small", "--names", "llama-1b", "gpt-oss", "gemma-4", "--horizon=6"),
    "freshness": ("--seconds=3", "--no-peer"),
    "generation": ("--entries=128", "--replicates=2", "--horizon=4", "--repetitions=1"),
    "head_budgets": ("--preset=small", "--entries=256", "--replicates=2", "--horizon=4", "--repetitions=1"),
    "presses": (
        "--model=kvdrift/tiny", '--settings={{"cache": "DynamicCache"}}', "--prompt=192", "--replicates=2", "--horizon=4",
    ),
    "scale": ("--events=20e3",),
    "store": ("--units", "50", "100"),
    "streams": ("--replicates=10", "--horizon=20"),
    "synthetic_study": ("{folder}/store", *STUDY),
}  # fmt: skip


def test_all_are_tried() -> None:
    programs = {path.stem for path in BENCHMARKS.glob("*.py") if "benchmark_parser(" in path.read_text()}
    assert programs - {"measurement"} == {*SMALLEST, "served"}  # tests/vllm tries the last


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SMALLEST if name != "streams"])
def test_it_runs(name: str, tmp_path: Path) -> None:
    sizes = [size.format(folder=tmp_path) for size in SMALLEST[name]]
    command = [sys.executable, "-m", f"benchmarks.{name}", *sizes, "--json"]
    ended = subprocess.run(command, cwd=BENCHMARKS.parent, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    printed = json.loads(ended.stdout)
    assert printed["rows"]
    if name in {"analysis", "scale"}:
        assert any(row["peer"] and row["ratio"] > 0 for row in printed["rows"])


@pytest.mark.slow
def test_it_prints_a_table_or_an_object() -> None:
    command = [sys.executable, "-m", "benchmarks.streams", *SMALLEST["streams"]]
    found = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert found["benchmark"] == "streams"
    assert all(f"{row['part']} " in table for row in found["rows"])
    assert any(row["peer"] and row["ratio"] > 0 for row in found["rows"])


def test_a_long_group_of_facts_has_a_line_for_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of groups are printed as words."""
    operations = {f"aten::op_{number}": {"launches": number, "a_layer": 1.0} for number in range(9)}
    for options in ([], ["--json"]):
        monkeypatch.setattr("sys.argv", ["profile", *options])
        run(benchmark_parser("profile", "-"), "steps", lambda *_: [([], {"copies": 2, "by_operation": operations})])
    table, printed = capsys.readouterr().out.split("\n{")
    assert json.loads("{" + printed)["by_operation"] == operations
    assert table.startswith("profile\ncopies: 2\nby operation:\n")
    assert all(f"\n  {name}: {cost}" in table for name, cost in operations.items())
