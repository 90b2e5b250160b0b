"""Names and texts as they stand in SQL."""

from __future__ import annotations


def quoted(identifier: str) -> str:
    """A name in double quotes."""
    return '"' + identifier.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A text in single quotes."""
    return "'" + text.replace("'", "''") + "'"
