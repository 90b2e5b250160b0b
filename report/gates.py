"""Answers of ``kvdrift gate`` on a study's page, between two HTML comments; ``gates.json`` beside it keeps them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvdrift.log.delta.durability import replace_durably
from kvdrift.report.printing.html import rendered

GATES: Final = "gates.json"
_BEGIN, _END = "<!-- gates -->", "<!-- end of gates -->"
_QUESTION = ("quantity", "action", "baseline", "stratum", "margin", "level")


def gates_block(folder: Path) -> str:
    """Return the answers kept in a folder as HTML between two comments; without answers the comments alone."""
    return f"{_BEGIN}\n{rendered('gates', lines=[gate['line'] for gate in _kept(folder)])}{_END}\n"


def record_gate(folder: Path, answer: Mapping[str, Any], line: str) -> Path | None:
    """Write a gate's answer into the page of a folder; it replaces an earlier answer to the same question.

    ``answer`` has the question and its answer as ``kvdrift gate --json`` has them, ``line`` the answer in words. Return
    the page; None if the folder has no page that shows gates.

    Raises:
        OSError: The page cannot be written.
    """
    page = folder / "index.html"
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    before, mark, rest = text.partition(_BEGIN)
    if not mark or _END not in rest:
        return None
    question = {name: answer[name] for name in _QUESTION}
    others = [gate for gate in _kept(folder) if any(gate.get(name) != value for name, value in question.items())]
    gates = [*others, question | {"decision": answer["decision"], "versions": answer["versions"], "line": line}]
    _replace(folder / GATES, json.dumps(gates, ensure_ascii=False, indent=1) + "\n")
    after = rest.partition(f"{_END}\n")[2]
    _replace(page, before + gates_block(folder) + after)
    return page


def _kept(folder: Path) -> list[dict[str, Any]]:
    """Return the answers stored in a folder; none if the file of answers cannot be read."""
    try:
        content = json.loads((folder / GATES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    known = isinstance(content, list) and all(isinstance(gate, dict) and "line" in gate for gate in content)
    return content if known else []


def _replace(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.part")
    aside.write_text(text, encoding="utf-8", newline="\n")
    replace_durably(aside, path)
