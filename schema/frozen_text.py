"""The text of a frozen plan, and its hash, which depends on what was decided and not on how long anything took.

A plan's JSON has under ``measured`` what was measured in seconds, at the places of the plan that it belongs to. No two
runs measure the same, so the hash leaves it out. Plans frozen before there was this key are hashed as a whole.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

MEASURED = "measured"


def frozen_text(content: dict[str, Any]) -> str:
    """Write a plan's content as canonical JSON."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def frozen_sha256(text: str) -> str:
    """Return the SHA-256 of a frozen plan's text, without what was measured."""
    try:
        content = json.loads(text)
        if isinstance(content, dict) and MEASURED in content:
            del content[MEASURED]
            text = frozen_text(content)
    except ValueError:  # not a plan that was frozen here; it has a hash all the same
        pass
    return hashlib.sha256(text.encode()).hexdigest()


def with_measured(content: dict[str, Any]) -> dict[str, Any]:
    """Return a plan's content with what was measured at the places that it belongs to, as older plans have it."""
    rest = {name: value for name, value in content.items() if name != MEASURED}
    merged: dict[str, Any] = _merged(rest, content.get(MEASURED, {}))
    return merged


def _merged(value: Any, more: Any) -> Any:
    """Nested JSON with more entries; lists are of equal length."""
    if isinstance(value, dict) and isinstance(more, dict):
        return value | {name: _merged(value[name], inner) if name in value else inner for name, inner in more.items()}
    if isinstance(value, list) and isinstance(more, list):
        return [_merged(one, inner) for one, inner in zip(value, more, strict=False)] + value[len(more) :]
    return more
