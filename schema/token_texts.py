r"""The texts of tokens that need not be whole characters.

A tokenizer of bytes writes one character with several tokens. The text of such a token has the bytes that are no
character by themselves in hexadecimal, such as ``\xE9``, in capitals. ``whole_texts`` puts the characters together.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

BYTE: Final = r"\\x[89A-F][0-9A-F]"
"""A pattern for one byte that is no character by itself, as texts of tokens have it."""

# Inside this module such a byte is one sign, as Python's ``surrogateescape`` has it.
_SIGN = re.compile("[\udc80-\udcff]")
_CHARACTER = re.compile(
    "[\udcc2-\udcdf][\udc80-\udcbf]|[\udce0-\udcef][\udc80-\udcbf]{2}|[\udcf0-\udcf4][\udc80-\udcbf]{3}"
)


def text_of_bytes(data: bytes) -> str:
    """Decode a token's bytes; those that are no character by themselves are written in hexadecimal."""
    return _written(data.decode(errors="surrogateescape"))


def whole_texts(texts: Sequence[str]) -> list[str]:
    """Put the characters together whose bytes several tokens share; joined, the returned texts are the whole text.

    ``texts`` has the text of each token alone. A character and what its tokens have beside it move to the last of these
    tokens; the text of the others is empty. Bytes that make no character stay as they are.
    """
    whole = [re.sub(BYTE, _as_sign, text) for text in texts]
    ends, text = list(accumulate(map(len, whole))), "".join(whole)
    for found in _CHARACTER.finditer(text):
        first, last = (bisect_right(ends, at) for at in (found.start(), found.end() - 1))
        try:
            character = found[0].encode(errors="surrogateescape").decode()
        except UnicodeDecodeError:
            continue
        if first < last:  # else the token's text has these letters and digits themselves
            moved = "".join(whole[first : last + 1]).replace(found[0], character, 1)
            whole[first : last + 1] = [*[""] * (last - first), moved]
    return list(map(_written, whole))


def shown_texts(texts: Sequence[str]) -> list[str]:
    """Return how tokens are shown one by one: a character at the last of its tokens, the others as their bytes."""
    return [whole or alone for whole, alone in zip(whole_texts(texts), texts, strict=True)]


def _as_sign(byte: re.Match[str]) -> str:
    return bytes.fromhex(byte[0][2:]).decode(errors="surrogateescape")


def _written(text: str) -> str:
    return _SIGN.sub(lambda sign: f"\\x{ord(sign[0]) - 0xDC00:X}", text)
