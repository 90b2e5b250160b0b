"""Our top-level packages have plain names; another distribution of the same name in front of ours would break us."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from schema.errors import OperationError

PACKAGES = ("schema", "log", "ingestion", "generator", "transforms", "sql", "stats", "report", "verification", "flows")


def check_not_shadowed() -> None:
    """Check that our packages are imported from beside ``kvdrift``.

    Raises:
        OperationError: one of them is found elsewhere.

    """
    home = Path(__file__).resolve().parent.parent
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if origin is None or origin.parent.parent != home:
            where = origin or "nowhere"
            raise OperationError(
                f"package '{name}' is found at {where}, not beside kvdrift in {home}: another distribution shadows it; "
                "uninstall that one, or use an environment of kvdrift's own"
            )
