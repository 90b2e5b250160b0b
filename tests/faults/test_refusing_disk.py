"""If a disk is read-only, or full from some change on, one line says so, and nothing is half done."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from faults.disk.failing import How
from faults.disk.trials import fault_of_end
from faults.outcomes import SURVIVED, tell
from faults.test_system_calls import start
from fixtures.processes import run_command
from fixtures.small_study import run_of
from fixtures.stored_rows import rows
from fixtures.study_files import load_study

from kvdrift.flows.run import stages

FULL_FROM = (1, 400, 3300, 4700, 5300)  # of about 6,000 changes of a run, most of the orchestration's

pytestmark = pytest.mark.slow


def ended(program: subprocess.Popen[str]) -> tuple[int, str, list[str]]:
    """Return the exit code, standard output, and the command's own lines on standard error."""
    out, err = program.communicate(timeout=300)
    assert "Traceback" not in err
    return program.returncode, out, [line for line in err.splitlines() if line.startswith("kvdrift: ")]


def test_a_store_that_may_only_be_read(library: Path, finished_laws: Path, tmp_path: Path) -> None:
    store, study = Path(shutil.copytree(finished_laws / "store", tmp_path / "store")), finished_laws / "laws.toml"

    def call(*arguments: object) -> tuple[int, str, list[str]]:
        return ended(start(library, "failing_command.py", store, "READ_ONLY", 0, *arguments))

    readers = [
        call("status", store), call("sql", store, "select count(*) as n from events"), call("analyze", store),
        call("sql", store, "from estimates", "--checked"), call("report", store, "-o", tmp_path / "page"),
        call("verify", store), call("run", study, "--store", store, "--dry-run"), call("run", study, "--store", store),
        call("derive", store),
    ]  # fmt: skip
    assert [(code, said) for code, _, said in readers] == [(0, [])] * len(readers)
    assert (tmp_path / "page" / "index.html").is_file()
    shutil.rmtree(store / "report")
    redone = ("run", study, "--store", store, "--redo", "mixture")
    writers = [call("report", store), call(*redone), call("run", study, "--store", store)]
    for code, _, said in writers:
        assert code in {1, 2}
        assert len(said) == 1
        assert "ead-only file system" in said[0]
    assert rows(store) == rows(finished_laws / "store")
    tell("a store that may only be read: commands that read and that write", [SURVIVED] * (len(readers) + len(writers)))


def test_a_disk_that_is_full_amid_a_run(library: Path, finished_laws: Path, tmp_path: Path) -> None:
    """The database of the orchestration is on the same disk."""
    generated = run_of(load_study(finished_laws / "laws.toml"), tmp_path / "generated")
    stages.prepare(generated)
    outcomes = []
    for at in FULL_FROM:
        store = Path(shutil.copytree(tmp_path / "generated", tmp_path / str(at)))
        arguments = (store, "FULL", at, "run", finished_laws / "laws.toml", "--store", store)
        program = start(library, "failing_command.py", *arguments)
        out, err = program.communicate(timeout=300)
        fault = fault_of_end(How.FULL, program.returncode, out + err)
        if fault is None:
            assert run_command("run", finished_laws / "laws.toml", "--store", store)[0] == 0
            assert run_command("verify", store)[0] == 0
        outcomes.append(fault or SURVIVED)
    tell("the disk full from some change of a whole run on", outcomes)
    assert set(outcomes) == {SURVIVED}
