"""The user's Prefect server, if one is named: whether it answers, its failures in one line, and Prefect's settings."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pydantic import ValidationError

from kvdrift.schema.errors import InputError, OperationError, first_line
from kvdrift.schema.proxies import past_proxies

_SETTINGS = {  # lines of a run go to its page on the server; Prefect's own lines stay off the terminal
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_ROOT_LEVEL": "CRITICAL",
    "PREFECT_INTERNAL_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL": "INFO",
    "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "INFO",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}


@contextmanager
def named_server() -> Iterator[bool]:
    """Prepare Prefect for flows inside the block if the environment or the active Prefect profile names a server.

    All other settings of the user stay. After the block the environment, the root logger and Prefect's settings are as
    before.

    Yields:
        Whether a server is named.

    Raises:
        OperationError: The server does not answer, or fails inside the block.
    """
    added = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
    with _logging(), _environment(added | past_proxies(os.environ)):
        url = api_url()
        if url is None:
            yield False
            return
        from prefect.logging.configuration import setup_logging  # noqa: PLC0415

        with answering(url):
            setup_logging()  # again, since Prefect reads its levels only when it is imported
            yield True


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
