"""Words of a list, and of a number of things."""

from __future__ import annotations

from collections.abc import Sequence

_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def listed(parts: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def counted(number: int, noun: str) -> str:
    """A number of things: ``one pair``, ``12 pairs``."""
    word = _WORDS[number] if number < len(_WORDS) else f"{number:,}"
    return f"{word} {noun}{'' if number == 1 else 's'}"


def capital(text: str) -> str:
    """A text with a capital at its beginning."""
    return text[:1].upper() + text[1:]
