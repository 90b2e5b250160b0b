"""The Prefect server of a run: quiet, without telemetry; the user's server if one is named, else our server.

Our server lives in a thread of this process. Prefect's temporary server is a process that outlives a killed parent;
our server ends with the study, however that ends, and starts in a fraction of the time.

Prefect makes a database by running all past migrations, which takes seconds in the first run of every store. So a
copy of the first database, still without runs, is kept in the user's cache, and later databases are copies of it. If
the kept database cannot be written or read, Prefect makes a new database.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
import sqlite3
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from kvdrift.schema.errors import InputError, OperationError, first_line
from kvdrift.schema.proxies import past_proxies
from kvdrift.sql.empty_views import cache_folder

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
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",  # no flow here has any; they take seconds
}
_ON_THE_USERS_SERVER = {  # lines of a run go to its page there; Prefect's lines still stay off the terminal
    "PREFECT_INTERNAL_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL": "INFO",
    "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "INFO",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}
_START_SECONDS = 120.0
_STOP_SECONDS = 10.0
_LONGEST_PATH = 504  # bytes: SQLite's 512, less those of "-journal"
_LEAST_DISK = 8 << 20  # bytes, about the size of a new database

DATABASE: Final = "prefect.db"
"""The file in the server's home, unless the user's settings name another database."""


@contextmanager
def orchestration(home: Path) -> Iterator[bool]:
    """Provide a Prefect server for the flows that run inside the block.

    If the environment or the active Prefect profile names a server, runs appear there; all other settings of the user
    stay. After the block the environment, the root logger and Prefect's settings are as before.

    Args:
        home: folder of our server's database: one for each store, so that concurrent studies do not lock each other
            out. A second run in the same store, and a store whose path is too long, have a temporary database.

    Yields:
        Whether the server is the user's.
    """
    with _logging(), _environment(_not_set(_QUIET) | past_proxies(os.environ)):
        if url := api_url():
            from prefect.logging.configuration import setup_logging  # noqa: PLC0415

            with _environment(_not_set(_ON_THE_USERS_SERVER)), answering(url):
                setup_logging()  # again, since Prefect reads its levels only when it is imported
                yield True
        else:
            has_home = "PREFECT_HOME" in os.environ
            with (
                _environment(_not_set(_ON_OUR_SERVER)),
                nullcontext() if has_home else own_home(home) as server_home,
                _environment({} if server_home is None else {"PREFECT_HOME": str(server_home)}),
                _own_server(server_home) as url,
                _environment({"PREFECT_API_URL": url}),
                failing_in_one_line(),
            ):
                yield False


def check_named_server() -> None:
    """Check that the user's server answers, if the environment or the active Prefect profile names one.

    Raises:
        OperationError: The server does not answer.
    """
    with _logging(), _environment(_not_set(_QUIET) | past_proxies(os.environ)):
        if url := api_url():
            with answering(url):
                pass


@contextmanager
def answering(url: str) -> Iterator[None]:
    """Check that the user's server answers; turn failures of the server within the block into errors of one line."""
    import httpx  # noqa: PLC0415 - if there is a server
    from prefect.client.orchestration import get_client  # noqa: PLC0415
    from prefect.exceptions import PrefectException, PrefectHTTPStatusError  # noqa: PLC0415

    with get_client(sync_client=True) as client:
        fault = client.api_healthcheck()
    if fault is not None:
        raise OperationError(
            f"the Prefect server at {url} does not answer ({_reason(fault)}); start it, or run without it: "
            "PREFECT_API_URL= kvdrift run …; `prefect config view` shows where the address is set"
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


@contextmanager
def failing_in_one_line() -> Iterator[None]:
    """Explain failures of our server within the block, since Prefect's errors give only the request."""
    from prefect.exceptions import PrefectException, PrefectHTTPStatusError  # noqa: PLC0415

    try:
        yield
    except (PrefectException, PrefectHTTPStatusError) as error:
        fault = _database_fault() or f"the orchestration server failed ({first_line(error)})"
        raise OperationError(f"{fault}; run the same command again to go on") from error


@contextmanager
def own_home(home: Path) -> Iterator[Path]:
    """Give a folder for a server's database that no other server uses: ``home``, or a temporary folder.

    Two servers that make a database in one folder at the same time break it, so ``home`` is locked; the lock ends with
    its process. The folder is temporary if ``home`` is locked already, or its path is too long for SQLite.
    """
    if len(os.fsencode(home.resolve() / DATABASE)) > _LONGEST_PATH:
        with _temporary_home() as folder:
            yield folder
        return
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another server holds the lock, or the file system has no locks
            with _temporary_home() as folder:
                yield folder
        else:
            yield home


@contextmanager
def _temporary_home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvdrift-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the block; Prefect reads its settings again before and after."""
    with importing_prefect():
        from prefect.context import refresh_global_settings_context  # noqa: PLC0415 - only if a study runs

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
    """Restore the root logger's level and handlers after the block, since Prefect changes them."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


@contextmanager
def importing_prefect() -> Iterator[None]:
    """Turn Prefect's refusal of a setting, which it reads when it is imported, into a line that names the setting.

    Prefect's warnings are ignored, such as that its home folder cannot be written: no run here needs that folder.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ValidationError as error:
        refused = error.errors()[0]
        value = str(refused["input"])
        named = [name for name, text in os.environ.items() if name.startswith("PREFECT_") and text == value]
        where = named[0] if named else f"Prefect's setting {'.'.join(map(str, refused['loc']))}"
        raise InputError(
            f"{where} = {value}: {refused['msg']}; `prefect config view` shows Prefect's settings"
        ) from error


def api_url() -> str | None:
    """Return the address of the server that the environment or the active Prefect profile names."""
    with importing_prefect():
        from prefect.settings import get_current_settings  # noqa: PLC0415

    url = get_current_settings().api.url
    return None if url is None else str(url)


@contextmanager
def _own_server(home: Path | None) -> Iterator[str]:
    """Run a server in a thread during the block; yield its address. ``home`` is None if PREFECT_HOME was set before."""
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
            wait_until_started(server, thread)
            if home is not None and made_here:
                keep(home)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        finally:
            # Events that no server takes would otherwise be retried for minutes when the process ends. In a thread of
            # its own, since Prefect only returns a coroutine if an event loop runs, as in a notebook.
            drain = threading.Thread(target=EventsWorker.drain_all, kwargs={"timeout": _STOP_SECONDS, "at_exit": False})
            drain.start()
            drain.join()
            server.should_exit = True
            thread.join(timeout=_STOP_SECONDS if server.started else 0)  # an interrupted start is not waited for


def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    """Run the server in its thread; a server abandoned while it starts finds its socket closed, and says nothing."""
    try:
        server.run(sockets=[listener])
    except OSError:
        if not server.should_exit:
            raise


def wait_until_started(server: object, thread: threading.Thread) -> None:
    """Wait until our server takes requests."""
    end = time.monotonic() + _START_SECONDS
    while not getattr(server, "started", False):
        if not thread.is_alive() or time.monotonic() > end:
            if fault := _database_fault():
                raise OperationError(fault)
            raise OperationError("the orchestration server did not start; set PREFECT_API_URL to use another server")
        time.sleep(0.02)


def _database_fault() -> str | None:
    """Return why the disk cannot take our server's database, in words; None if it can."""
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


def copy_kept(home: Path) -> bool:
    """Copy the database in the user's cache to ``home``, unless there is one; return whether ``home`` has one now."""
    place = home / DATABASE
    if place.exists():
        return True
    aside = home / f".{DATABASE}.{uuid.uuid4().hex}"
    try:
        shutil.copyfile(_kept(), aside)
        if not _is_whole(aside):
            return False
        aside.replace(place)
    except OSError:
        return False
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
    return True


def keep(home: Path) -> None:
    """Copy the database that a server has just made in ``home``, still without runs, to the user's cache."""
    if not (home / DATABASE).is_file():
        return
    kept = _kept()
    aside = kept.with_name(f".{kept.name}.{uuid.uuid4().hex}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(home / DATABASE)) as made, closing(sqlite3.connect(aside)) as copy:
            made.backup(copy)
        aside.replace(kept)
    except (OSError, sqlite3.Error):  # the cache cannot be written: Prefect makes each store's database
        pass
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def _kept() -> Path:
    """Return the path, in the user's cache, of an empty database for the installed version of Prefect."""
    from prefect import __version__  # noqa: PLC0415 - only if a study runs

    return cache_folder() / f"prefect-{__version__}.db"


def _is_whole(path: Path) -> bool:
    """Return whether a file is a sound, migrated database; a power cut may have left half a file."""
    try:
        with closing(sqlite3.connect(path)) as connection:
            (revisions,) = connection.execute("select count(*) from alembic_version").fetchone()
            return bool(revisions) and connection.execute("pragma quick_check").fetchone() == ("ok",)
    except sqlite3.Error:
        return False
