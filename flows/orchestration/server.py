"""How Prefect runs here: quiet, without telemetry, on the user's server if there is one, else on one of our own.

Our own server lives in a thread of this process. Prefect's temporary server is a process that outlives a killed
parent; this one ends with the study, whatever ends it, and starts in a fraction of the time.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from flows.orchestration.new_database import copy_kept, keep
from schema.errors import OperationError, first_line

if TYPE_CHECKING:
    import uvicorn

_QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_ROOT_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_SERVER_LEVEL": "CRITICAL",
}
_ON_OUR_SERVER = {
    "PREFECT_LOGGING_TO_API_ENABLED": "false",
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",  # no flow here has any, and a new database takes seconds more
}
_ON_THE_USERS_SERVER = {  # what a run says is for its page there, and still nothing of Prefect's for the terminal
    "PREFECT_INTERNAL_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL": "INFO",
    "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "INFO",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}
_START_SECONDS = 120.0
_STOP_SECONDS = 10.0
_LEAST_DISK = 8 << 20  # bytes; its database takes about one when it is new


@contextmanager
def orchestration(home: Path) -> Iterator[bool]:
    """Give the flows run inside the block a Prefect server.

    Users whose environment or active Prefect profile names a server have their own, and their runs appear there;
    whatever else they set stays. The environment, the root logger and Prefect's settings are as before after the
    block.

    Args:
        home: where our own server keeps its database: one per store, so that studies running at once do not lock each
            other out. A second run beside this store's first keeps one of its own, as long as it runs.

    Yields:
        Whether the server is the user's.

    """
    with _logging(), _environment(_not_set(_QUIET)):
        if url := api_url():
            with _environment(_not_set(_ON_THE_USERS_SERVER)), answering(url):
                _set_up_logging()
                yield True
        else:
            given = "PREFECT_HOME" in os.environ
            with (
                _environment(_not_set(_ON_OUR_SERVER)),
                nullcontext() if given else _own_home(home) as own,
                _environment({} if own is None else {"PREFECT_HOME": str(own)}),
                _own_server(own) as url,
                _environment({"PREFECT_API_URL": url}),
                _failing_in_one_line(),
            ):
                yield False


@contextmanager
def answering(url: str) -> Iterator[None]:
    """A block that needs the user's server: that it does not answer, or fails, is one line."""
    import httpx  # noqa: PLC0415 - if there is a server
    from prefect.client.orchestration import get_client  # noqa: PLC0415
    from prefect.exceptions import PrefectException, PrefectHTTPStatusError  # noqa: PLC0415

    with get_client(sync_client=True) as client:
        fault = client.api_healthcheck()
    if fault is not None:
        raise OperationError(
            f"the Prefect server at {url} does not answer ({_reason(fault)}); `prefect server start` starts one on "
            "this machine, and `prefect config view` says where the address is from"
        )
    try:
        yield
    except (PrefectException, PrefectHTTPStatusError, httpx.HTTPError) as error:
        raise OperationError(
            f"the Prefect server at {url} failed ({_reason(error)}); call the command again"
        ) from error


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}" if str(error).strip() else type(error).__name__


def _not_set(wanted: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _set_up_logging() -> None:
    """Have Prefect, which reads it when it is imported, read anew how loud its logs are."""
    from prefect.logging.configuration import setup_logging  # noqa: PLC0415

    setup_logging()


@contextmanager
def _failing_in_one_line() -> Iterator[None]:
    """A block with our own server: when that fails, Prefect says how it was asked, and not why it failed."""
    from prefect.exceptions import PrefectException, PrefectHTTPStatusError  # noqa: PLC0415 - where a study runs

    try:
        yield
    except (PrefectException, PrefectHTTPStatusError) as error:
        fault = _database_fault() or f"the orchestration server failed ({first_line(error)})"
        raise OperationError(f"{fault}; run the same command again to go on") from error


@contextmanager
def _own_home(home: Path) -> Iterator[Path]:
    """Give a folder for a server's database that no other server has: this one, or a temporary one.

    Two servers that make their database in one folder at once break it; the lock ends with its process.
    """
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another server has it, or the file system has no locks
            with tempfile.TemporaryDirectory(prefix="kvdrift-", ignore_cleanup_errors=True) as folder:
                yield Path(folder)
        else:
            yield home


@contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, and have Prefect read its settings anew before and after."""
    from prefect.context import refresh_global_settings_context  # noqa: PLC0415 - imported where a study runs

    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    refresh_global_settings_context()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        refresh_global_settings_context()


@contextmanager
def _logging() -> Iterator[None]:
    """Give the root logger its level and handlers back after the block: Prefect sets them for its own logs."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


def api_url() -> str | None:
    """Return the address of the server that the environment or the active Prefect profile names."""
    from prefect.settings import get_current_settings  # noqa: PLC0415

    url = get_current_settings().api.url
    return None if url is None else str(url)


@contextmanager
def _own_server(home: Path | None) -> Iterator[str]:
    """A server in a thread, for the block; yields its address.

    Args:
        home: where it has its database; None if the user has set that.

    """
    import uvicorn  # noqa: PLC0415
    from prefect.events.worker import EventsWorker  # noqa: PLC0415
    from prefect.server.api.server import create_app  # noqa: PLC0415

    with socket.create_server(("127.0.0.1", 0)) as listener:
        configuration = uvicorn.Config(create_app(ephemeral=True), log_level="critical", log_config=None)
        server = uvicorn.Server(configuration)
        made_here = home is not None and not copy_kept(home)
        thread = threading.Thread(target=_serve, args=(server, listener), daemon=True, name="prefect server")
        thread.start()
        try:
            _wait_for(server, thread)
            if home is not None and made_here:
                keep(home)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        finally:
            # Events that find no server any more would be tried again at the end of the process, for minutes.
            EventsWorker.drain_all(timeout=_STOP_SECONDS, at_exit=False)
            server.should_exit = True
            thread.join(timeout=_STOP_SECONDS if server.started else 0)  # who interrupts its start does not wait for it


def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    """Run the server in its thread; one that is left while it starts finds its socket closed, and says nothing."""
    try:
        server.run(sockets=[listener])
    except OSError:
        if not server.should_exit:
            raise


def _wait_for(server: object, thread: threading.Thread) -> None:
    end = time.monotonic() + _START_SECONDS
    while not getattr(server, "started", False):
        if not thread.is_alive() or time.monotonic() > end:
            if fault := _database_fault():
                raise OperationError(fault)
            raise OperationError("the orchestration server did not start; set PREFECT_API_URL to use another one")
        time.sleep(0.02)


def _database_fault() -> str | None:
    """Say why the disk does not take the database of our own server; None if it does."""
    home = Path(os.environ.get("PREFECT_HOME", Path.home()))
    fault = "the disk is full"
    try:
        with tempfile.TemporaryFile(dir=home) as file:
            file.write(bytes(1 << 16))
        if shutil.disk_usage(home).free >= _LEAST_DISK:
            return None
    except OSError as error:
        fault = error.strerror or first_line(error)
    return f"{fault}: the orchestration server cannot keep its database in {home}"
