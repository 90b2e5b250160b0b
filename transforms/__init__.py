"""Derive trajectories and steps from events: pure functions, the Beam pipeline around them, and its live form.

Users of Beam import its transforms from here: ``from kvdrift.transforms import DeriveTrajectories``.
"""

from __future__ import annotations

import importlib
from typing import Any

_TRANSFORMS = {
    "AssembleReplicates": "replicates",
    "DeriveTrajectories": "replicates",
    "ReadEvents": "stored",
    "WriteDerived": "stored",
    "WriteReplicates": "stored",
}


def __getattr__(name: str) -> Any:
    """Import a transform when it is first used, since importing Beam takes half a second."""
    if name not in _TRANSFORMS:
        raise AttributeError(f"module 'transforms' has no attribute '{name}'")
    return getattr(importlib.import_module(f"kvdrift.transforms.streams.{_TRANSFORMS[name]}"), name)
