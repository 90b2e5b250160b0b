"""Prefect as a study uses it: a server that the user names, settings that it refuses, and tries after errors."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.house import ROOT
from fixtures.refusals import refused
from fixtures.small_study import run_of, write_study
from fixtures.study_files import load_study

from kvdrift.flows.orchestration.flow_run import may_pass
from kvdrift.flows.run.study import run_studies
from kvdrift.schema.errors import ControlError, DamagedStoreError, InputError, OperationError

ASKING = """
from kvdrift.flows.orchestration.server import named_server
from kvdrift.schema.errors import KvdriftError
try:
    with named_server():
        print("entered")
except KvdriftError as error:
    print(error)
"""


def asked(folder: Path, **settings: str) -> tuple[str, str]:
    """Return what a process of its own prints about its server, and its messages; Prefect reads its settings once."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PREFECT_HOME": str(folder), "PYTHONPATH": str(ROOT)} | settings
    done = subprocess.run(
        [sys.executable, "-c", ASKING], capture_output=True, text=True, check=True, env=environment, cwd=folder
    )
    return done.stdout, done.stderr


def test_a_setting_that_prefect_refuses_is_named(tmp_path: Path) -> None:
    line, _ = asked(tmp_path, PREFECT_LOGGING_LEVEL="NOPE")
    assert line.startswith("PREFECT_LOGGING_LEVEL = NOPE: ")
    assert "'CRITICAL'" in line


@pytest.mark.slow
def test_a_server_of_the_users_profile_is_taken(tmp_path: Path) -> None:
    """If that server does not answer, nothing is run elsewhere: one line names the server."""
    profile = 'active = "mine"\n\n[profiles.mine]\nPREFECT_API_URL = "http://127.0.0.1:9/api"\n'
    (tmp_path / "profiles.toml").write_text(profile)
    line, messages = asked(tmp_path)
    assert messages == ""
    assert line.startswith("the Prefect server at http://127.0.0.1:9/api ")
    assert "(ConnectError: " in line


def test_a_named_server_that_does_not_answer_leaves_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents and actions of a store would bind later study files, though nothing was generated."""
    from prefect.context import refresh_global_settings_context  # noqa: PLC0415

    run = run_of(load_study(write_study(tmp_path)), tmp_path / "store")
    begun = list[bool]()
    with monkeypatch.context() as named:
        named.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
        line = refused(run_studies, [run], lambda: begun.append(True), error=OperationError)
    refresh_global_settings_context()  # else Prefect keeps the address for the tests that follow
    assert line.startswith("the Prefect server at http://127.0.0.1:9/api ")
    assert begun == []
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (InputError("study.toml: mistaken"), False),
        (ControlError("a control is not 0"), False),
        (DamagedStoreError("commits are lost"), False),
        (OperationError("no endpoint is left"), True),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True),
    ],
)
def test_what_a_person_has_to_mend_is_not_tried_again(error: Exception, again: bool) -> None:  # noqa: FBT001
    from prefect.states import Failed  # noqa: PLC0415

    assert may_pass(None, None, Failed(data=error)) is again
