"""Answers of gates on a study's page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvdrift.report.gates import GATES, gates_block, record_gate


def gate_answer(margin: float = 0.02, decision: str = "worse", **changed: Any) -> dict[str, Any]:
    own = {"quantity": "mismatch", "action": "a", "baseline": "b", "stratum": "pooled", "margin": margin, "level": 0.95}
    return own | {"decision": decision, "versions": {"events": 3}, "estimate": 0.1} | changed


def page(folder: Path) -> str:
    return (folder / "index.html").read_text(encoding="utf-8")


def test_each_question_has_its_newest_answer(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(f"<header>{gates_block(tmp_path)}</header>", encoding="utf-8")
    assert "<li>" not in page(tmp_path)
    assert record_gate(tmp_path, gate_answer(), "worse: <b>1</b>") == tmp_path / "index.html"
    record_gate(tmp_path, gate_answer(0.1), "unresolved: 2")
    record_gate(tmp_path, gate_answer(), "equivalent or better: 3")
    text = page(tmp_path)
    assert text.count("<li>") == 2
    assert text.index("unresolved: 2") < text.index("equivalent or better: 3")
    assert "worse: " not in text
    assert text.startswith("<header><!-- gates -->")
    assert text.endswith("<!-- end of gates -->\n</header>")
    assert gates_block(tmp_path) in text, "a page that is written again has them too"
    assert [gate["margin"] for gate in json.loads((tmp_path / GATES).read_text(encoding="utf-8"))] == [0.1, 0.02]


def test_names_are_no_markup(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(gates_block(tmp_path), encoding="utf-8")
    record_gate(tmp_path, gate_answer(), "<script>")
    assert "<li>&lt;script&gt;</li>" in page(tmp_path)


def test_pages_that_show_no_gates_stay(tmp_path: Path) -> None:
    assert record_gate(tmp_path, gate_answer(), "a") is None
    (tmp_path / "index.html").write_text("<p>older</p>", encoding="utf-8")
    assert record_gate(tmp_path, gate_answer(), "a") is None
    assert page(tmp_path) == "<p>older</p>"
    assert not (tmp_path / GATES).exists()
    (tmp_path / GATES).write_text("[1", encoding="utf-8")
    assert "<li>" not in gates_block(tmp_path)
