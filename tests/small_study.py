"""A study small enough to run in tests: two strata of the embedded source, short horizon, few replicates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TEXT = """
[study]
name = "small"
horizon = 12
seed = 3

[model]
id = "kvdrift/tiny"

[[documents]]
source = "embedded"
tasks = ["needle"]
length = 384
stratum = "needle"
development = 2
evaluation = 3

[[documents]]
source = "embedded"
tasks = ["variable_tracking"]
length = 384
stratum = "tracking"
development = 2
evaluation = 3

[[actions]]
name = "snapkv-half"
selector = "snapkv"
keep = "1/2"

[[actions]]
name = "recent-half"
selector = "recent"
keep = "1/2"

[plan]
baseline = "snapkv-half"
primary = ["gap", "mismatch"]
replicates = 5
documents = 3
development_replicates = 4
draws = 200
exploratory_draws = 100
"""


def write_study(folder: Path, *changes: tuple[str, str]) -> Path:
    """The study file, with some of its text replaced; every replacement must apply."""
    text = TEXT
    for old, new in changes:
        if old not in text:
            message = f"{old!r} is not in the study"
            raise ValueError(message)
        text = text.replace(old, new, 1)
    path = folder / "small.toml"
    path.write_text(text)
    return path


def start_command(*arguments: str | Path) -> subprocess.Popen[str]:
    """``kvdrift`` with these arguments in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "kvdrift", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_command(*arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a whole run."""
    process = start_command(*arguments)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err
