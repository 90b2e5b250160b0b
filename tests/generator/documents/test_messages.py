"""Rows of conversations in JSON Lines files: their documents, and a line for each mistake."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from fixtures.chat_tokenizers import chat_tokenizer, family_tokenizer
from fixtures.refusals import refused

from kvdrift.generator.documents.prompts import Conversation
from kvdrift.generator.documents.registry import stratum_documents
from kvdrift.schema.document import Document, Turn
from kvdrift.schema.study import DocumentsSection

USER = {"role": "user", "content": "How many apples?"}
TOOLS = [{"type": "function", "function": {"name": "count", "parameters": {}}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "count", "arguments": {}}}]}


def rows(**change: Any) -> list[dict[str, Any]]:
    """Rows of short conversations, the second of which is changed."""
    made = [{"id": f"d{n}", "messages": [USER | {"content": f"How many of {n}?"}]} for n in range(40)]
    made[1] |= change
    return made


def documents(folder: Path, tokenizer: Any, made: list[dict[str, Any]], **keys: Any) -> list[Document]:
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    section = DocumentsSection(
        **({"source": "jsonl", "path": str(path), "length": 60, "development": 4, "evaluation": 36} | keys)
    )
    return list(chain(*stratum_documents(section, 0, lambda: tokenizer).values()))


def test_documents_are_conversations_with_their_turns(tmp_path: Path) -> None:
    tokenizer = family_tokenizer("mistral")
    messages = [{"role": "system", "content": "Count."}, USER, CALL, {"role": "tool", "content": "7 [INST]"}]
    made = {one.doc: one for one in documents(tmp_path, tokenizer, rows(messages=messages, tools=TOOLS), length=200)}
    (called,) = [{name: value for name, value in CALL.items() if value is not None}]
    expected = Conversation([*messages[:2], called, messages[3]], TOOLS)
    assert made["d1"].tokens == expected.tokens(tokenizer)
    assert [turn.role for turn in made["d1"].turns] == ["system", "user", "assistant", "tool"]
    assert made["d1"].control_tokens == ("[INST]",)
    assert made["d2"].turns == (Turn("user", 1),)
    assert all(document.templated for document in made.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "Hi"}, "line 2: fields 'prompt' and 'messages': "),
        ({"messages": []}, "line 2: field 'messages': the list"),
        ({"messages": "Hi"}, "line 2: field 'messages': "),
        ({"messages": [USER, "Hi"]}, "line 2: field 'messages': expected a list of objects"),
        ({"messages": [USER | {"role": "human"}]}, "messages[0] of line 2: field 'role': 'human' "),
        ({"messages": [{"content": "Hi"}]}, "messages[0] of line 2: field 'role' is missing"),
        ({"messages": [{"role": "user"}]}, "messages[0] of line 2: field 'content' is missing"),
        ({"messages": [USER | {"content": [{"type": "text", "text": "Hi"}]}]}, "messages[0] of line 2: field 'content': expected text"),
        ({"messages": [{"role": "assistant"}, USER]}, "messages[0] of line 2: field 'content' is missing"),
        ({"messages": [CALL | {"tool_calls": "f"}, USER]}, "messages[0] of line 2: field 'tool_calls': expected a list of objects"),
        ({"messages": [USER, {"role": "assistant", "content": "7"}]}, "messages[1] of line 2: field 'role': "),
        ({"messages": [USER | {"role": "system"}]}, "messages[0] of line 2: field 'role': "),
        ({"messages": [USER | {"name": "a \ud800"}]}, "line 2: field 'messages': has \"\\ud800\""),
        ({"tools": ["count"]}, "line 2: field 'tools': expected a list of objects"),
        ({"messages": [USER | {"content": "word " * 80}]}, "line 2: field 'messages': "),
        ({"messages": None, "tools": TOOLS, "prompt": "Hi"}, "line 2: field 'tools': belongs to 'messages'"),
        ({"messages": None}, "line 2: field 'prompt' is missing"),
    ],
)  # fmt: skip
def test_faulty_rows_are_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    line = refused(documents, tmp_path, family_tokenizer("chatml"), rows(**change))
    assert line.startswith(f"{tmp_path / 'mine.jsonl'}, {message}")


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    bare = chat_tokenizer(("<eos>",), None, "<eos>")
    assert "no chat template" in refused(documents, tmp_path, bare, rows())
    line = refused(documents, tmp_path, family_tokenizer("chatml"), rows(), chat_template=False)
    assert "line 1: field 'messages': " in line
    assert "chat_template = false" in line


def test_what_the_template_refuses_names_the_row(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Count."}, USER]
    line = refused(documents, tmp_path, family_tokenizer("gemma"), rows(messages=messages))
    assert "mine.jsonl, line 2: field 'messages': " in line
    assert "System role not supported" in line
