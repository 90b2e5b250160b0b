"""How Prefect runs here: quiet, without telemetry, on the user's server if there is one, else on a temporary one."""

from __future__ import annotations

import os
from pathlib import Path

_QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_ROOT_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_SERVER_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_ENABLED": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
}


def configure_prefect(home: Path) -> None:
    """Set Prefect's environment before its first import; whatever the user has set stays.

    ``home`` holds the temporary server's database, one per store, so that studies running at once do not lock each
    other out. Users who set PREFECT_API_URL have their own server, and their runs appear there.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if "PREFECT_API_URL" not in os.environ:
        os.environ.setdefault("PREFECT_HOME", str(home))
