"""The conversation of a row of a JSON Lines file: ``messages`` and ``tools``, in the form of chat templates."""

from __future__ import annotations

import json
from typing import Any

from kvdrift.generator.documents.conversations import ASSISTANT, SYSTEM, TOOL, USER, Conversation
from kvdrift.generator.documents.files import SourceRow

_ROLES = (SYSTEM, USER, ASSISTANT, TOOL)
_ANSWERED = (USER, TOOL)


def read_conversation(row: SourceRow) -> Conversation:
    """Return the row's conversation; an error names the message and its field.

    Fields without a value are left out, and others that are not checked here reach the template as they are.
    """
    messages = row.rows("messages")
    if not messages:
        raise row.error("field 'messages': the list is empty")
    for message in messages:
        _check(message)
    if (last := messages[-1].text("role")) not in _ANSWERED:
        raise messages[-1].error(
            f"field 'role': the model answers the last message, which is the {last}'s and must be of "
            f"{' or '.join(_ANSWERED)}; leave it out{', or give its text as answers' if last == ASSISTANT else ''}"
        )
    for name in ("messages", "tools"):
        row.encodable(name, json.dumps(row.fields.get(name), ensure_ascii=False))
    tools = [tool.fields for tool in row.rows("tools")] if row.has("tools") else None
    return Conversation([_present(message.fields) for message in messages], tools)


def _check(message: SourceRow) -> None:
    if (role := message.text("role")) not in _ROLES:
        raise message.error(f"field 'role': '{role}' must be {', '.join(_ROLES[:-1])} or {_ROLES[-1]}")
    calls = role == ASSISTANT and message.has("tool_calls")
    if calls:
        message.rows("tool_calls")
    if not calls or message.has("content"):
        message.text("content")


def _present(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value is not None}
