"""Find the records of answers: the places of a prompt that state an answer, which a compressed cache may have lost.

The search ignores what the document's scoring ignores, and white space, since single tokens do not determine it. If the
prompt does not state an answer as a whole, such as a chain of assignments, the answer is cut into the longest pieces of
two words or more that the prompt states; the answer needs all its pieces. A piece that the prompt states several times
has several records, any of which is enough.
"""

from __future__ import annotations

import bisect
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from kvdrift.generator.documents.answers import folded
from kvdrift.schema.document import NORMALIZED

MOST_PLACES: Final = 16
"""The most places of one piece; a text that occurs more often, such as a common word, is no record."""


_Place = tuple[int, int]  # the first character of a text without white space, and the end


@dataclass(frozen=True)
class Record:
    """A place where a prompt states an answer or a piece of one."""

    answer: int  # number of the answer in the document's list, from 0
    piece: int  # number of the piece of the answer, from 0
    first: int  # the first token of the place, from 1
    last: int  # the last token of the place


def find_records(tokens: Sequence[str], answers: Sequence[str], scoring: str) -> list[Record]:
    """Return the records of a document's answers, by answer, piece and place.

    ``tokens`` are the texts of the prompt's tokens, each decoded alone; ``scoring`` is the rule for the answers.
    An answer that the prompt does not state, or states too often, has no records.
    """
    ignored = str.maketrans("", "", string.punctuation if scoring == NORMALIZED else "")
    plain = ["".join(token.lower().translate(ignored).split()) for token in tokens]
    text, ends = "".join(plain), list(accumulate(map(len, plain)))
    between = "(?:a|an|the)*" if scoring == NORMALIZED else ""  # the words of an answer

    def at(character: int) -> int:
        return bisect.bisect_right(ends, character) + 1

    def wanted(words: Sequence[str]) -> re.Pattern[str]:
        return re.compile(between.join(map(re.escape, words)))

    found = []
    for number, answer in enumerate(answers):
        for piece, places in enumerate(_pieces(text, folded(answer, scoring).split(), wanted)):
            found += [Record(number, piece, at(begin), at(end - 1)) for begin, end in places]
    return found


def _pieces(text: str, words: Sequence[str], wanted: Callable[[Sequence[str]], re.Pattern[str]]) -> list[list[_Place]]:
    """Cut an answer into pieces that a text contains, ignoring white space; return the places of each piece."""
    if not words:
        return []
    if whole := _occurrences(text, wanted(words)):
        return [whole] if len(whole) <= MOST_PLACES else []
    pieces, first = [], 0
    while first < len(words) - 1:
        last = first + 2
        while last <= len(words) and wanted(words[first:last]).search(text):
            last += 1
        if last - 1 - first >= 2:
            places = _occurrences(text, wanted(words[first : last - 1]))
            pieces += [places] if len(places) <= MOST_PLACES else []
        first = max(last - 1, first + 1)
    return pieces


def _occurrences(text: str, piece: re.Pattern[str]) -> list[_Place]:
    """Return the first places of a piece, overlapping ones included, and one more than ``MOST_PLACES`` at most."""
    places, begin = list[_Place](), 0
    while len(places) <= MOST_PLACES and (found := piece.search(text, begin)):
        places.append(found.span())
        begin = found.start() + 1
    return places
