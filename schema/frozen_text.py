"""The text of a frozen plan and its hash, which depends on decisions and not on measured seconds.

A plan's JSON has a key ``measured`` with all measured seconds, nested like the plan itself. Two runs never measure the
same seconds, so the hash leaves this key out. A plan without this key is hashed as a whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

MEASURED = "measured"


def frozen_text(content: dict[str, Any]) -> str:
    """Write a plan's content as canonical JSON."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def frozen_sha256(text: str) -> str:
    """Return the SHA-256 of a frozen plan's text without the measured seconds."""
    try:
        content = json.loads(text)
        if isinstance(content, dict) and MEASURED in content:
            del content[MEASURED]
            text = frozen_text(content)
    except ValueError:  # not frozen by kvdrift, but every text has a hash
        pass
    return hashlib.sha256(text.encode()).hexdigest()


def wanted_documents(content: Mapping[str, Any]) -> dict[str, int]:
    """Return how many evaluation documents a plan needs in each stratum: N, less those removed and not replaced."""
    count = int(content["documents_per_stratum"])
    frozen, forgotten = (content.get(name, {}).get("evaluation", {}) for name in ("documents", "forgotten"))
    return {
        stratum: count - min(forgotten.get(stratum, 0), max(0, count - len(frozen.get(stratum, ()))))
        for stratum in content["strata"]
    }


def with_measured(content: dict[str, Any]) -> dict[str, Any]:
    """Return a plan's content with the measured seconds merged into their places."""
    rest = {name: value for name, value in content.items() if name != MEASURED}
    merged: dict[str, Any] = _merged(rest, content.get(MEASURED, {}))
    return merged


def _merged(value: Any, more: Any) -> Any:
    """Return nested JSON with the entries of ``more`` added; a list of ``more`` may be shorter than its counterpart."""
    if isinstance(value, dict) and isinstance(more, dict):
        return value | {name: _merged(value[name], inner) if name in value else inner for name, inner in more.items()}
    if isinstance(value, list) and isinstance(more, list):
        return [_merged(item, inner) for item, inner in zip(value, more, strict=False)] + value[len(more) :]
    return more
