"""A check for other distributions whose top-level packages have the names of ours and come first on the path."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGES = ("schema", "log", "ingestion", "generator", "transforms", "sql", "stats", "report", "verification", "flows")


def shadowed() -> str | None:
    """Return a line that names one of our packages found elsewhere than beside ``kvdrift``; None if there is none.

    The function imports none of the packages, so that it can be called before they are imported.
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
