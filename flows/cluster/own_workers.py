"""The module that ``local:N`` workers load first: it keeps them from printing messages and from ending by Ctrl-C.

Workers share the command's output, and the command prints all messages. At Ctrl-C the command ends its workers.
"""

from __future__ import annotations

import logging
import signal

logging.getLogger().addHandler(logging.NullHandler())  # Beam's import warns, and would otherwise set up a handler
logging.getLogger("distributed").setLevel(logging.CRITICAL)


def dask_setup(_worker: object) -> None:
    """Ignore SIGINT; Dask calls this in the main thread of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
