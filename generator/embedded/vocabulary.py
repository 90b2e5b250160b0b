"""The 256 readable symbols of the embedded model, with their ids."""

from __future__ import annotations

from collections.abc import Iterable

PAD, BOS, EOS, QUESTION, ANSWER, RECORD, MARK, END = range(8)

KEY_COUNT = 64
VALUE_COUNT = 64
FILLER_COUNT = 120

FIRST_KEY = 8
FIRST_VALUE = FIRST_KEY + KEY_COUNT
FIRST_FILLER = FIRST_VALUE + VALUE_COUNT
SIZE = FIRST_FILLER + FILLER_COUNT

_SPECIALS = ("<pad>", "<bos>", "<eos>", "Q", "A", "REC", "?", ";")
_ONSETS = ("b", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "w")
_RIMES = ("an", "el", "im", "or", "un", "ay", "eth", "osk")

SYMBOLS: tuple[str, ...] = (
    *_SPECIALS,
    *(f"k{number:02d}" for number in range(KEY_COUNT)),
    *(f"v{number:02d}" for number in range(VALUE_COUNT)),
    *(onset + rime for onset in _ONSETS for rime in _RIMES),
)

_IDS = {symbol: token for token, symbol in enumerate(SYMBOLS)}


def is_key(token: int) -> bool:
    """Return whether a token id is one of the 64 keys."""
    return FIRST_KEY <= token < FIRST_VALUE


def to_text(tokens: Iterable[int]) -> str:
    """Return the symbols of token ids, separated by single spaces."""
    return " ".join(SYMBOLS[token] for token in tokens)


def to_tokens(text: str) -> tuple[int, ...]:
    """Return the ids of symbols that are separated by white space."""
    return tuple(_IDS[symbol] for symbol in text.split())
