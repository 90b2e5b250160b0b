"""Our top-level packages have plain names; another distribution of the same name in front of ours would break us."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGES = ("schema", "log", "ingestion", "generator", "transforms", "sql", "stats", "report", "verification", "flows")


def shadowed() -> str | None:
    """Say which of our packages is found elsewhere than beside ``kvdrift``; None if none is.

    It imports none of them, so that it can be asked before they are.
    """
    home = Path(__file__).resolve().parent.parent
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if origin is None or origin.parent.parent != home:
            where = origin or "nowhere"
            return (
                f"package '{name}' is found at {where}, not beside kvdrift in {home}: another distribution shadows it; "
                "uninstall that one, or use an environment of kvdrift's own"
            )
    return None
