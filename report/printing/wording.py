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
    "divergence_probability": "P(τ ≤ H) is the share of continuations that part within {horizon} tokens",
    "mean_entry": "Mean τ is the mean position at which these continuations part",
    "exposure": "E is the share of positions after the first mismatch, up to the horizon",
    "exposure_written": "“E, written” is this share of the positions up to the later end of both texts",
    "accuracy": "Accuracy of Y is the mean score of {other}’s answers",
    "lost_share": "Lost share is the share of {whole}’s right answers that {other} loses",
}


def meanings(whole: str, other: str, horizon: str, quantities: Collection[str]) -> str:
    """Explain the columns of ranked actions in sentences, for readers who have not met the symbols.

    Both sides are given in words, and the horizon as it stands in a sentence, such as ``H = 64``.
    """
    said = [
        text.format(whole=whole, other=other, horizon=horizon) for name, text in _MEANINGS.items() if name in quantities
    ]
    return " ".join(f"{one}." for one in said)
