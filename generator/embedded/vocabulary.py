"""The 256 readable symbols of the embedded model: their ids, their text, and nothing about how documents use them."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken
from transformers import Qwen2Tokenizer

PAD, BOS, EOS, QUESTION, ANSWER, RECORD, MARK, END = range(8)

KEYS = 64
VALUES = 64
FILLERS = 120

FIRST_KEY = 8
FIRST_VALUE = FIRST_KEY + KEYS
FIRST_FILLER = FIRST_VALUE + VALUES
SIZE = FIRST_FILLER + FILLERS

_SPECIALS = ("<pad>", "<bos>", "<eos>", "Q", "A", "REC", "?", ";")
_ONSETS = ("b", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "w")
_RIMES = ("an", "el", "im", "or", "un", "ay", "eth", "osk")

SYMBOLS: tuple[str, ...] = (
    *_SPECIALS,
    *(f"k{number:02d}" for number in range(KEYS)),
    *(f"v{number:02d}" for number in range(VALUES)),
    *(onset + rime for onset in _ONSETS for rime in _RIMES),
)

_IDS = {symbol: token for token, symbol in enumerate(SYMBOLS)}


def is_key(token: int) -> bool:
    """Whether a token id is one of the 64 keys."""
    return FIRST_KEY <= token < FIRST_VALUE


def to_text(tokens: Iterable[int]) -> str:
    """Token ids as their symbols, separated by single spaces."""
    return " ".join(SYMBOLS[token] for token in tokens)


def to_tokens(text: str) -> tuple[int, ...]:
    """Symbols separated by white space as token ids; ``ValueError`` names the first symbol that does not exist."""
    tokens = []
    for symbol in text.split():
        if symbol not in _IDS:
            raise ValueError(f"{symbol!r} is not one of the {SIZE} symbols of the embedded vocabulary")
        tokens.append(_IDS[symbol])
    return tuple(tokens)


def build_tokenizer() -> Qwen2Tokenizer:
    """A Hugging Face tokenizer whose ids are these symbols and whose decoded text is ``to_text``, spaces and all.

    Transformers gives every folder with a Qwen2 configuration the Qwen2 tokenizer class, a byte-pair one; so each
    symbol is an added token that byte pairs never touch, spelled with the space before it except for the three in
    brackets. Text without such a spelling has no id and is dropped; ``to_tokens`` refuses it instead.
    """
    spellings = [symbol if symbol.startswith("<") else f" {symbol}" for symbol in SYMBOLS]
    tokenizer = Qwen2Tokenizer(
        vocab={spelling: token for token, spelling in enumerate(spellings)},
        merges=[],
        # The class would add an unknown token of its own as a 257th symbol.
        unk_token=SYMBOLS[PAD],
        bos_token=SYMBOLS[BOS],
        eos_token=SYMBOLS[EOS],
        pad_token=SYMBOLS[PAD],
    )
    bracketed = {SYMBOLS[PAD], SYMBOLS[BOS], SYMBOLS[EOS]}
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=text in bracketed) for text in spellings])
    return tokenizer
