"""If one change on the disk fails, or a listing lacks a file, nothing acknowledged is missing, and a second run ends well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from faults.outcomes import MENDED, SURVIVED, tell
from fixtures.house import ROOT

PROGRAMS = Path(__file__).with_name("disk")
TRIED = 2  # trials of each way in the default suite
PROCESSES = 2


def start(library: Path, program: str, *arguments: object) -> subprocess.Popen[str]:
    environment = os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join((str(ROOT), f"{ROOT}/tests"))}
    command = [sys.executable, PROGRAMS / program, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def outcomes(*programs: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Return the outcomes of the trials of programs, all of which must end well."""
    found = []
    with ThreadPoolExecutor() as readers:  # a pipe that nobody reads stops who writes
        for program, (out, err) in zip(programs, readers.map(subprocess.Popen.communicate, programs), strict=True):
            assert program.returncode == 0, err
            found += [json.loads(line) for line in out.splitlines()]
    return found


def test_commits_with_failing_changes(library: Path, tmp_path: Path) -> None:
    """A few changes are tried, chosen anew if the program's changes differ."""
    found = outcomes(start(library, "failing_commits.py", tmp_path, TRIED))
    assert len(found) == 4 * TRIED + 1
    assert [trial for trial in found if trial["outcome"] not in {SURVIVED, MENDED}] == []


@pytest.mark.slow
def test_every_change_of_a_study_failing(library: Path, tmp_path: Path) -> None:
    outcomes(start(library, "failing_study.py", tmp_path))
    found = outcomes(*(start(library, "failing_study.py", tmp_path, share, PROCESSES, 1) for share in range(PROCESSES)))
    tell(
        "each change of a study on the disk: killed at it, half done, full from it on, failing",
        (trial["outcome"] for trial in found),
    )
    assert [trial for trial in found if trial["outcome"] not in {SURVIVED, MENDED}] == []


def test_listings_that_lack_a_file(library: Path, tmp_path: Path) -> None:
    """Whichever listing lacks a file, no log is called damaged, the store opens, and each commit counts once."""
    program = start(library, "incomplete_listings.py", tmp_path / "store")
    out, err = program.communicate()
    assert program.returncode == 0, err
    assert out.split() == ["faults", "1", "open", "1", *(word for at in range(1, 6) for word in ("commit", str(at)))]
