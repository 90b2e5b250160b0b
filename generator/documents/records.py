"""Find the records of answers: the places of a prompt that state an answer, which a compressed cache may have lost.

The search ignores case, as scoring does, and ignores white space, since single tokens do not determine it. If the
prompt does not state an answer as a whole, such as a chain of assignments, the answer is cut into the longest pieces of
two words or more that the prompt states; the answer needs all its pieces. A piece that the prompt states several times
has several records, any of which is enough.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

MOST_PLACES: Final = 16
"""The most places of one piece; a text that occurs more often, such as a common word, is no record."""


@dataclass(frozen=True)
class Record:
    """A place where a prompt states an answer or a piece of one."""

    answer: int  # number of the answer in the document's list, from 0
    piece: int  # number of the piece of the answer, from 0
    first: int  # the first token of the place, from 1
    last: int  # the last token of the place


def find_records(tokens: Sequence[str], answers: Sequence[str]) -> list[Record]:
    """Return the records of a document's answers, by answer, piece and place.

    ``tokens`` are the texts of the prompt's tokens, each decoded alone. An answer that the prompt does not state, or
    states too often, has no records.
    """
    plain = [_plain(token) for token in tokens]
    text, ends = "".join(plain), list(accumulate(map(len, plain)))

    def at(character: int) -> int:
        return bisect.bisect_right(ends, character) + 1

    found = []
    for number, answer in enumerate(answers):
        for piece, words in enumerate(_pieces(text, answer)):
            places = [(at(begin), at(begin + len(words) - 1)) for begin in _occurrences(text, words)]
            found += [Record(number, piece, first, last) for first, last in places]
    return found


def _plain(text: str) -> str:
    return "".join(text.lower().split())


def _pieces(text: str, answer: str) -> list[str]:
    """Cut an answer into pieces that a text contains, ignoring white space."""
    words = [_plain(word) for word in answer.split()]
    if not words:
        return []
    whole = "".join(words)
    if whole in text:
        return [whole] if _is_rare(text, whole) else []
    pieces, first = [], 0
    while first < len(words) - 1:
        last = first + 2
        while last <= len(words) and "".join(words[first:last]) in text:
            last += 1
        piece = "".join(words[first : last - 1])
        if last - 1 - first >= 2 and _is_rare(text, piece):
            pieces.append(piece)
        first = max(last - 1, first + 1)
    return pieces


def _is_rare(text: str, piece: str) -> bool:
    return sum(1 for _ in _occurrences(text, piece)) <= MOST_PLACES


def _occurrences(text: str, piece: str) -> Iterator[int]:
    begin = text.find(piece)
    while begin >= 0:
        yield begin
        begin = text.find(piece, begin + len(piece))
