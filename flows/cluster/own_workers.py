"""The preload of ``local:N`` workers: they share the command's output, and leave messages to the command.

Ctrl-C, too, is left to the command, which then ends the workers.
"""

from __future__ import annotations

import logging
import signal

logging.getLogger().addHandler(logging.NullHandler())  # Beam's import warns, and would otherwise set up a handler
logging.getLogger("distributed").setLevel(logging.CRITICAL)


def dask_setup(_worker: object) -> None:
    """Ignore SIGINT; Dask calls this in the main thread of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
