"""How Prefect runs here: quiet, without telemetry, on the user's server if there is one, else on one of our own.

Our own server lives in a thread of this process. Prefect's temporary server is a process that outlives a killed
parent; this one ends with the study, whatever ends it, and starts in a fraction of the time.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from schema.errors import OperationError

_QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_ROOT_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_SERVER_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_ENABLED": "false",
}
_START_SECONDS = 120.0


@contextmanager
def orchestration(home: Path) -> Iterator[None]:
    """A Prefect server for the flows run inside the block; enter it before Prefect is first imported.

    ``home`` holds our own server's database, one per store, so that studies running at once do not lock each other
    out. Users who set PREFECT_API_URL have their own server, and their runs appear there; what else they set stays.
    OperationError if our own server does not start.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if "PREFECT_API_URL" in os.environ:
        yield
        return
    os.environ.setdefault("PREFECT_HOME", str(home))

    import uvicorn  # noqa: PLC0415 - after the environment is set, as Prefect below
    from prefect.server.api.server import create_app  # noqa: PLC0415
    from prefect.settings import PREFECT_API_URL, temporary_settings  # noqa: PLC0415

    with socket.create_server(("127.0.0.1", 0)) as listener:
        configuration = uvicorn.Config(create_app(ephemeral=True), log_level="critical", log_config=None)
        server = uvicorn.Server(configuration)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True, name="prefect server")
        thread.start()
        _wait_for(server, thread)
        try:
            with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{listener.getsockname()[1]}/api"}):
                yield
        finally:
            server.should_exit = True
            thread.join(timeout=10)


def _wait_for(server: object, thread: threading.Thread) -> None:
    end = time.monotonic() + _START_SECONDS
    while not getattr(server, "started", False):
        if not thread.is_alive() or time.monotonic() > end:
            raise OperationError("the orchestration server did not start; set PREFECT_API_URL to use another one")
        time.sleep(0.02)
