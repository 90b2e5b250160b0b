"""The frozen plan as readable rows, whatever its JSON holds: a key per line, a list of objects as a small table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from report.numbers import MISSING

_FIRST = ("replicates", "documents_per_stratum", "baseline", "actions", "target_half_width", "reachable", "reason",
          "alpha", "level", "draws", "exploratory_draws", "expected_seconds")  # fmt: skip


@dataclass(frozen=True)
class PlanRow:
    """A key with its value as text, or with a table of objects."""

    key: str
    text: str = ""
    heads: tuple[str, ...] = ()
    lines: tuple[tuple[str, ...], ...] = ()


def plan_rows(content: Any) -> list[PlanRow]:
    """Rows of any JSON value: what was chosen first, then the rest in stored order; nested keys are joined with ›."""
    if not isinstance(content, dict):
        return _rows(content, "plan")
    ordered = {name: content[name] for name in _FIRST if name in content} | content
    return _rows(ordered, "")


def plan_text(value: Any) -> str:
    """A value on one line."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}".replace("-", "−", 1) if value < 0 else f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(plan_text(entry) for entry in value) or MISSING
    if isinstance(value, dict):
        return "; ".join(f"{name}: {plan_text(entry)}" for name, entry in value.items()) or MISSING
    return str(value)


def _rows(content: Any, key: str) -> list[PlanRow]:
    if isinstance(content, dict):
        if not content:
            return [PlanRow(key, MISSING)]
        return [row for name, value in content.items() for row in _rows(value, _join(key, name))]
    if isinstance(content, list) and content and all(isinstance(entry, dict) for entry in content):
        return [_table(key, content)]
    return [PlanRow(key, plan_text(content))]


def _table(key: str, entries: list[dict[str, Any]]) -> PlanRow:
    heads = tuple(dict.fromkeys(name for entry in entries for name in entry))
    lines = tuple(tuple(plan_text(entry.get(name)) for name in heads) for entry in entries)
    return PlanRow(key, "", tuple(_words(head) for head in heads), lines)


def _join(key: str, name: str) -> str:
    return f"{key} › {_words(name)}" if key else _words(name)


def _words(name: str) -> str:
    return name.replace("_", " ")
