"""Score answers on a decoded text, and find the places that state them (``docs/intervals.md``).

Each task is scored by its benchmark's own rule. RULER (NVIDIA/RULER: ``scripts/eval/synthetic/constants.py``) searches
the text for its answers without regard to case: ``all`` is the share of answers that occur, for needles, variables and
words; ``part`` is 1 if any answer occurs, for questions. (RULER first strips white space around a continuation and
turns its control characters into line feeds. That changes no score unless an answer has such characters.) HELMET
(princeton-nlp/HELMET: ``utils.py``, ``substring_exact_match_score`` with ``normalize_answer``) searches the text for
the answers of its questions, and also ignores punctuation, articles and repeated white space: ``normalized`` is 1 if
any answer occurs.

A continuation is decoded up to its EOS, without the prompt and without special tokens. The token of a character is
found by decoding beginnings of the continuation, since a byte-level tokenizer may need several tokens for a letter.

The records of an answer are the places of a prompt that state the answer; a compressed cache may have lost them. The
search for records ignores what the document's scoring ignores, and also white space, which the texts of single tokens
do not determine. If the prompt does not state an answer as a whole (a chain of assignments, for example), the answer is
cut into the longest pieces of two words or more that the prompt states, and all of its pieces are needed. A piece that
the prompt states several times has several records, any of which is enough.
"""

from __future__ import annotations

import bisect
import re
import string
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Final

from kvdrift.schema.document import ALL_ANSWERS, ANY_ANSWER, NORMALIZED
from kvdrift.schema.token_texts import whole_texts

_NEEDLES = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3")
_RULES: dict[str, dict[str, str]] = {
    "ruler": dict.fromkeys((*_NEEDLES, "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"), ALL_ANSWERS)
    | dict.fromkeys(("qa_1", "qa_2"), ANY_ANSWER),
    "helmet": dict.fromkeys(("nq", "triviaqa", "hotpotqa", "popqa"), NORMALIZED),
}
_PUNCTUATION = frozenset(string.punctuation)  # ASCII only
_ARTICLE = re.compile(r"\b(a|an|the)\b")
Tokens = tuple[int, ...]

Decode = Callable[[Sequence[Tokens]], list[str]]
"""A function that decodes several continuations at once."""


def task_scoring(source: str, task: str) -> str | None:
    """Return the scoring rule of a task, for documents that name no rule themselves; None if the task is not scored.

    A benchmark's task without a rule here is not scored, such as HELMET's citations, which another model judges. The
    rule of the embedded tasks and of JSON Lines is ``all``: a right continuation states the whole list of answers.
    """
    rules = _RULES.get(source)
    return ALL_ANSWERS if rules is None else rules.get(task)


def score_text(text: str, answers: Sequence[str], scoring: str) -> float:
    """Return the score of a decoded text, 0..1; a right text scores exactly 1."""
    searched = folded(text, scoring)
    occurs = [folded(answer, scoring) in searched for answer in answers]
    return sum(occurs) / len(occurs) if scoring == ALL_ANSWERS else float(any(occurs))


def answer_characters(text: str, answers: Sequence[str], scoring: str) -> tuple[int, int] | None:
    """Return the range of characters that states the answers, as (start, end) of a slice; None if no answer occurs.

    The range covers the first occurrence of each answer or, if the rule asks for any one answer, the occurrence that
    ends first.
    """
    lowered = text.lower()
    searched, places = _normalized(text) if scoring == NORMALIZED else (lowered, range(len(lowered)))
    spans = []
    for answer in answers:
        wanted = folded(answer, scoring)
        first = searched.find(wanted)
        if first >= 0:
            spans.append((places[first], places[first + len(wanted) - 1] + 1))
    if not spans:
        return None
    if scoring == ALL_ANSWERS:
        begin, end = min(begin for begin, _ in spans), max(end for _, end in spans)
    else:
        begin, end = min(spans, key=lambda span: (span[1], span[0]))
    if len(lowered) != len(text):  # some letters have more than one in lower case
        ends = list(accumulate(len(letter.lower()) for letter in text))
        begin = sum(at <= begin for at in ends)
        end = sum(at < end for at in ends) + 1
    return begin, end


def folded(text: str, scoring: str) -> str:
    """Return a text or an answer in the form in which a scoring rule compares it."""
    return _normalized(text)[0] if scoring == NORMALIZED else text.lower()


def _normalized(text: str) -> tuple[str, list[int]]:
    """Return a text as SQuAD's evaluation normalizes it, and the place in ``text.lower()`` of each resulting character.

    Four steps follow each other: the text is put in lower case, ASCII punctuation is removed, each article becomes
    white space, and each run of white space becomes one space. The place of a space is that of the letter before it.
    """
    lowered = text.lower()
    kept = [place for place, letter in enumerate(lowered) if letter not in _PUNCTUATION]
    bare = "".join(lowered[place] for place in kept)
    words = list(re.finditer(r"\S+", _ARTICLE.sub(lambda article: " " * len(article[0]), bare)))
    places = [kept[at] for word in words for at in (*range(*word.span()), word.end() - 1)]
    return " ".join(word[0] for word in words), places[:-1]


@dataclass(frozen=True)
class PairScore:
    """The scores of a pair of continuations, and the positions, from 1, of X's tokens that state the answers."""

    score_x: float
    score_y: float
    span_first: int | None
    span_last: int | None


def score_pairs(
    pairs: Sequence[tuple[Tokens, Tokens]], answers: Sequence[str], scoring: str, decode: Decode
) -> list[PairScore]:
    """Return the scores of pairs of continuations of a document, X and Y up to their EOS.

    Equal continuations are decoded once; many are equal, since a replicate's X is the same under every action.
    """
    distinct = list(dict.fromkeys(tokens for pair in pairs for tokens in pair))
    texts = dict(zip(distinct, decode(distinct), strict=True)) if distinct else {}
    scores = {tokens: score_text(text, answers, scoring) for tokens, text in texts.items()}
    spans = {x: token_span(x, texts[x], answers, scoring, decode) for x, _ in pairs}
    return [PairScore(scores[x], scores[y], *(spans[x] or (None, None))) for x, y in pairs]


def token_span(
    tokens: Tokens, text: str, answers: Sequence[str], scoring: str, decode: Decode
) -> tuple[int, int] | None:
    """Return the first and last position, from 1, of the tokens that state the answers; None if no answer occurs.

    ``text`` is the text of all ``tokens``; ``decode`` returns the texts of beginnings of ``tokens``.
    """
    characters = answer_characters(text, answers, scoring)
    if characters is None:
        return None

    def beginning(count: int) -> str:
        return text if count == len(tokens) else decode([tokens[:count]])[0]

    def begun(count: int) -> int:
        """Return how many letters of the text the first ``count`` tokens contain, completely or in part."""
        return len(beginning(count))

    def settled(count: int) -> int:
        """Return how many letters of the text the first ``count`` tokens contain completely."""
        pairs = zip(beginning(count), text, strict=False)
        return sum(1 for _ in takewhile(lambda letters: letters[0] == letters[1], pairs))

    begin, end = characters
    positions = range(1, len(tokens) + 1)
    first = positions[bisect_left(positions, begin + 1, key=begun)]
    last = positions[bisect_left(positions, end, key=settled)]
    return first, last


MOST_PLACES: Final = 16
"""The most places of one piece; a text that occurs more often, such as a common word, is no record."""


_Place = tuple[int, int]  # an occurrence in a text without white space: its first character, and its end


@dataclass(frozen=True)
class Record:
    """A place where a prompt states an answer or a piece of one."""

    answer: int  # number of the answer in the document's list, from 0
    piece: int  # number of the piece of the answer, from 0
    first: int  # the first token of the place, from 1
    last: int  # the last token of the place


def find_records(tokens: Sequence[str], answers: Sequence[str], scoring: str) -> list[Record]:
    """Return the places where a prompt states a document's answers, sorted by answer, piece of the answer, and place.

    ``tokens`` are the texts of the prompt's tokens, each decoded alone; ``scoring`` is the rule for the answers. A
    record has all tokens of its characters. An answer that the prompt does not state as a whole is cut into the longest
    pieces of two words or more that the prompt states. An answer or a piece that the prompt states more than
    ``MOST_PLACES`` times has no records.
    """
    whole = whole_texts(tokens)
    ignored = str.maketrans("", "", string.punctuation if scoring == NORMALIZED else "")
    plain = ["".join(token.lower().translate(ignored).split()) for token in whole]
    text, ends = "".join(plain), list(accumulate(map(len, plain)))
    between = "(?:a|an|the)*" if scoring == NORMALIZED else ""  # the words of an answer

    def at(character: int) -> int:
        return bisect.bisect_right(ends, character) + 1

    def first(character: int) -> int:
        token = at(character)
        while token > 1 and not whole[token - 2]:  # the text before is the beginning of this character
            token -= 1
        return token

    def wanted(words: Sequence[str]) -> re.Pattern[str]:
        return re.compile(between.join(map(re.escape, words)))

    records = []
    for number, answer in enumerate(answers):
        for piece, places in enumerate(_pieces(text, folded(answer, scoring).split(), wanted)):
            records += [Record(number, piece, first(begin), at(end - 1)) for begin, end in places]
    return records


def _pieces(text: str, words: Sequence[str], wanted: Callable[[Sequence[str]], re.Pattern[str]]) -> list[list[_Place]]:
    """Cut an answer, the list ``words``, into pieces that a text contains; return the places of each piece.

    An answer that the text contains as a whole is one piece. ``text`` has no white space; ``wanted`` turns a list of
    words into a pattern that finds them there, one directly after the other.
    """
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
    """Return the first ``MOST_PLACES`` + 1 places of a piece in a text, or all if there are fewer; they may overlap."""
    places, begin = list[_Place](), 0
    while len(places) <= MOST_PLACES and (match := piece.search(text, begin)):
        places.append(match.span())
        begin = match.start() + 1
    return places
