"""Every benchmark runs at its smallest sizes and prints its table. The measured numbers mean nothing there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STUDY = ("--strata=2", "--documents=4", "--replicates=4", "--horizon=8")
SMALLEST = {
    "analysis": (*STUDY, "--draws=200"),
    "commits": ("--workers=2", "--commits=1", "--at-once"),
    "families": ("--small", "--names", "llama-1b", "gpt-oss", "gemma-4", "--horizon=6"),
    "freshness": ("--seconds=3",),
    "generation": ("--entries=128", "--replicates=2", "--horizon=4", "--repetitions=1"),
    "presses": (
        "--model=kvdrift/tiny", '--settings={"cache": "DynamicCache"}', "--prompt=192", "--replicates=2", "--horizon=4",
    ),
    "scale": ("--events=20e3",),
    "store": ("--units", "50", "100"),
}  # fmt: skip


def test_all_are_tried() -> None:
    programs = {path.stem for path in BENCHMARKS.glob("*.py") if "benchmark_parser(" in path.read_text()}
    assert programs - {"measurement"} == {*SMALLEST, "served"}  # tests/vllm tries the last


def ended(name: str, *options: str) -> str:
    command = [sys.executable, "-m", f"benchmarks.{name}", *SMALLEST[name], *options]
    done = subprocess.run(command, cwd=BENCHMARKS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_it_runs(name: str) -> None:
    printed = json.loads(ended(name, "--json"))
    assert printed["benchmark"] == name
    assert printed["rows"]
    if name in {"analysis", "scale"}:
        assert any(row["peer"] and row["ratio"] > 0 for row in printed["rows"])
    if name == "scale":
        table = ended(name)
        assert all(f"{row['part']} " in table for row in printed["rows"])
