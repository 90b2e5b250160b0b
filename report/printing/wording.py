"""Words for a list, and for a number of things."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def listed(parts: Sequence[str]) -> str:
    """Join words: ``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def counted(number: int, noun: str) -> str:
    """Write a number of things: ``one pair``, ``12 pairs``."""
    word = _WORDS[number] if number < len(_WORDS) else f"{number:,}"
    return f"{word} {noun}{'' if number == 1 else 's'}"


def capital(text: str) -> str:
    """Capitalize the first letter of a text."""
    return text[:1].upper() + text[1:]


_MEANINGS = {
    "mismatch": "R is the share of positions whose token differs from that of {whole}",
    "divergence_probability": "P(τ ≤ H) the share of continuations that part within {horizon} tokens",
    "mean_entry": "mean τ the position where these part",
    "exposure": "E the share of positions after that, up to the horizon",
    "exposure_written": "E, written the same up to the later end of both texts",
    "accuracy": "accuracy of Y the mean score of {other}’s answers",
    "lost_share": "lost share the share of the right answers of {whole} that it loses",
}


def meanings(whole: str, other: str, horizon: str, quantities: Collection[str]) -> str:
    """Explain the columns of ranked actions in a sentence, for readers who have not met the symbols.

    Both sides are given in words, and the horizon as it stands in a sentence, such as ``H = 64``.
    """
    said = [
        text.format(whole=whole, other=other, horizon=horizon) for name, text in _MEANINGS.items() if name in quantities
    ]
    return f"{', '.join(said[:-1])}, and {said[-1]}."
