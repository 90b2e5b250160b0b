"""Prefect as a study uses it: the choice of a server, its database and the files left behind, and limits of its cache."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from fixtures.refusals import refused
from fixtures.small_study import write_study
from fixtures.study_files import load_study

from kvdrift.flows.generate.local import LocalGenerator
from kvdrift.flows.generate.storing import storing
from kvdrift.flows.orchestration import server
from kvdrift.flows.orchestration.flow_run import as_stage, as_task, may_pass
from kvdrift.flows.orchestration.server import DATABASE, copy_kept, failing_in_one_line, keep, orchestration, own_home
from kvdrift.flows.run.study import run_studies
from kvdrift.flows.run.study_run import StudyRun
from kvdrift.schema.errors import ControlError, DamagedStoreError, InputError, OperationError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def home(unbroken: tuple[Path, str, str], tmp_path: Path) -> Path:
    """A folder with the database that Prefect takes seconds to make, as a run has left it in its store."""
    return Path(shutil.copytree(unbroken[0] / ".prefect", tmp_path / "home"))


@pytest.mark.slow
def test_the_environment_is_as_before(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREFECT_HOME", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    from prefect.settings import get_current_settings  # noqa: PLC0415

    with orchestration(home):
        assert get_current_settings().home == home
        assert str(get_current_settings().api.url).startswith("http://127.0.0.1:")
        assert (home / "prefect.db").is_file()
    assert dict(os.environ) == before
    assert get_current_settings().home != home
    assert get_current_settings().api.url is None


@pytest.mark.slow
def test_who_interrupts_the_start_of_the_server_hears_nothing_of_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread finds its socket closed, and ends."""
    for name in ("PREFECT_HOME", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    said, begun = list[threading.ExceptHookArgs](), list[threading.Thread]()
    monkeypatch.setattr("threading.excepthook", said.append)

    def interrupted(_server: object, thread: threading.Thread) -> None:
        begun.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr("kvdrift.flows.orchestration.server.wait_until_started", interrupted)
    with pytest.raises(KeyboardInterrupt), orchestration(home):
        pass
    (thread,) = begun
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert said == []


def test_a_setting_that_prefect_refuses_is_named(tmp_path: Path) -> None:
    """Prefect reads its settings when it is imported, so this is a process of its own."""
    text = (
        "import sys; from pathlib import Path; from kvdrift.flows.orchestration.server import orchestration\n"
        "from kvdrift.schema.errors import InputError\n"
        "try:\n    orchestration(Path(sys.argv[1])).__enter__()\nexcept InputError as error:\n    print(error)\n"
    )
    command = [sys.executable, "-c", text, tmp_path]
    named = os.environ | {"PREFECT_LOGGING_LEVEL": "NOPE"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=named)
    assert done.stdout.startswith("PREFECT_LOGGING_LEVEL = NOPE: ")
    assert "'CRITICAL'" in done.stdout


def test_no_two_servers_share_a_database(tmp_path: Path) -> None:
    """Two runs of one study start at once; servers take seconds to start, so the real risk is at the start."""
    with own_home(tmp_path / "home") as first:
        with own_home(tmp_path / "home") as second:
            assert first == tmp_path / "home"
            assert second.is_dir()
            assert second != first
        assert not second.exists()
    with own_home(tmp_path / "home") as again:
        assert again == first


@pytest.mark.parametrize("length", [504, 505])
def test_a_database_whose_path_is_too_long_is_elsewhere(tmp_path: Path, length: int) -> None:
    parts = "/".join("x" * 99 for _ in range(6))
    home = Path(f"{tmp_path}/{parts}"[: length - len(DATABASE) - 2] + "y")
    with own_home(home) as folder:
        assert (folder == home) == (length == 504)
        with closing(sqlite3.connect(folder / DATABASE)) as connection:
            connection.execute("create table t (i integer)")
    assert folder.exists() == (length == 504)


def test_a_server_without_space_names_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect reports its request to the server, but not why the request failed."""
    from prefect.exceptions import PrefectException  # noqa: PLC0415

    def ask() -> None:
        with failing_in_one_line():
            message = "Server error '500 Internal Server Error'"
            raise PrefectException(message)

    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    assert refused(ask, error=OperationError).startswith("the orchestration server failed")
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    line = refused(ask, error=OperationError)
    assert line.startswith("No space left")
    assert str(tmp_path) in line


@pytest.mark.slow
def test_a_server_of_the_users_profile_is_taken(tmp_path: Path) -> None:
    """If that server does not answer, nothing is run elsewhere: one line names the server."""
    (tmp_path / "profiles.toml").write_text(
        'active = "mine"\n\n[profiles.mine]\nPREFECT_API_URL = "http://127.0.0.1:9/api"\n'
    )
    program = (
        "import pathlib\n"
        "from kvdrift.flows.orchestration.server import orchestration\n"
        "from kvdrift.schema.errors import OperationError\n"
        "try:\n"
        "    with orchestration(pathlib.Path('not-made')):\n"
        "        print('entered')\n"
        "except OperationError as error:\n"
        "    print(error)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PREFECT_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert done.stdout.startswith("the Prefect server at http://127.0.0.1:9/api ")
    assert "(ConnectError: " in done.stdout
    assert done.stderr == ""
    assert not (tmp_path / "not-made").exists()


def test_a_named_server_that_does_not_answer_leaves_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents and actions of a store would bind later study files, though nothing was generated."""
    from prefect.context import refresh_global_settings_context  # noqa: PLC0415

    run = StudyRun(load_study(write_study(tmp_path)), str(tmp_path / "store"), storing(LocalGenerator()))
    begun = list[bool]()
    with monkeypatch.context() as named:
        named.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
        line = refused(run_studies, [run], lambda: begun.append(True), error=OperationError)
    refresh_global_settings_context()  # else Prefect keeps the address for the tests that follow
    assert line.startswith("the Prefect server at http://127.0.0.1:9/api ")
    assert begun == []
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_a_stage_runs_as_often_as_the_flow_says(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's setting of persisted results would let Prefect serve the second derivation from its cache."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_RESULTS_PERSIST_BY_DEFAULT", "true")
    run = StudyRun(load_study(write_study(tmp_path)), str(tmp_path / "store"), storing(LocalGenerator()))
    calls = []
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    with orchestration(home):
        from prefect import flow  # noqa: PLC0415

        def derive(one: StudyRun) -> int:
            calls.append(one.location)
            return len(calls)

        @flow(name="twice")
        def twice() -> list[int]:
            stage = as_task(derive)
            return [stage(run), stage(run)]

        assert twice() == [1, 2]

        @flow(name="idle")
        def idle() -> list[tuple[str, str, str | None]]:
            """Return the states of a stage that has nothing to do, and of a stage that has work."""
            states = (as_stage(one, "all is there")(run, return_state=True) for one in (lambda _: 0, lambda _: 3))
            return [(state.type.value, state.name, state.message) for state in states]

        assert idle() == [("COMPLETED", "Skipped", "all is there"), ("COMPLETED", "Completed", None)]
    assert len(calls) == 2
    assert (root.level, root.handlers) == (level, handlers)  # the caller's logs are heard again


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


@pytest.fixture
def made(unbroken: tuple[Path, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of a server that has run, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copytree(unbroken[0] / ".prefect", tmp_path / "made"))


def new_home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    return home


def content(home: Path) -> list[str]:
    with closing(sqlite3.connect(home / DATABASE)) as connection:
        return list(connection.iterdump())


def kept_file(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "cache" / "kvdrift").iterdir()
    return file


def test_a_kept_database_is_copied_into_homes_without_one(made: Path, tmp_path: Path) -> None:
    home = new_home(tmp_path)
    assert not copy_kept(home), "none is kept yet"
    keep(made)
    assert copy_kept(home)
    assert content(home) == content(made)
    assert [path.name for path in home.iterdir()] == [DATABASE]
    kept_file(tmp_path).unlink()
    assert copy_kept(home), "it has one"


@pytest.mark.parametrize("length", [0, 11, 500_000])
def test_a_kept_database_that_is_not_whole_is_left_alone(made: Path, tmp_path: Path, length: int) -> None:
    keep(made)
    kept = kept_file(tmp_path)
    assert kept.stat().st_size > length
    kept.write_bytes(kept.read_bytes()[:length])
    home = new_home(tmp_path)
    assert not copy_kept(home)
    assert list(home.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_no_fault(made: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    keep(made)
    assert not copy_kept(new_home(tmp_path))


def test_a_home_without_the_file_keeps_nothing(made: Path, tmp_path: Path) -> None:
    """Prefect's settings name another database."""
    (made / DATABASE).unlink()
    keep(made)
    assert not (tmp_path / "cache").exists()
    assert not (made / DATABASE).exists()


@pytest.mark.parametrize("there", [False, True])
def test_a_database_that_a_server_has_made_is_kept(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    """The server itself does not start here."""
    kept: list[Path] = []
    monkeypatch.setattr(server, "copy_kept", lambda _: there)
    monkeypatch.setattr(server, "keep", kept.append)
    for name in ("_serve", "wait_until_started"):
        monkeypatch.setattr(server, name, lambda *_: None)
    with server._own_server(Path("home")) as address:
        assert address.startswith("http://127.0.0.1:")
        assert kept == ([] if there else [Path("home")])
