"""What the workers of ``local:N`` load first: they write where the command does, and the command says what there is.

Ctrl-C, too, is for the command, which then ends them.
"""

from __future__ import annotations

import logging
import signal

logging.getLogger().addHandler(logging.NullHandler())  # Beam's import warns, and would set a handler up for it
logging.getLogger("distributed").setLevel(logging.CRITICAL)


def dask_setup(_worker: object) -> None:
    """Is called by Dask in the main thread of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
