"""Another Python of ours: what it is started with."""

from __future__ import annotations

import os
import sys


def own_environment() -> dict[str, str]:
    """Return the environment in which a Python that is started finds the modules that this one does."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)  # noqa: PTH109 - '' stands for it
    return os.environ | {"PYTHONPATH": paths}
