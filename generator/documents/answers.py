"""Score answers on a decoded text, and find the places that state them (definitions, "Answers").

RULER (NVIDIA/RULER: ``scripts/eval/synthetic/constants.py``) searches its answers in the text without regard to case:
``all`` is the share of answers that occur, for needles, variables and words; ``part`` is 1 if any answer occurs, for
questions.

A continuation is decoded up to its EOS, without the prompt and without special tokens. The token of a character is
found by decoding beginnings of the continuation, since a byte-level tokenizer may need several tokens for a letter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

from schema.document import ALL_ANSWERS, ANY_ANSWER

_QUESTIONS = {"ruler": ("qa_1", "qa_2"), "helmet": ("nq", "triviaqa", "hotpotqa", "popqa")}
_CITATIONS = {"helmet": ("asqa", "qampari")}  # which are judged by more than whether an answer occurs
Tokens = tuple[int, ...]

Decode = Callable[[Sequence[Tokens]], list[str]]
"""A function that decodes several continuations at once."""


def task_scoring(source: str, task: str) -> str | None:
    """Return how the answers of a task are scored if the document does not say; None if they are not scored.

    The answers of a question are alternatives, any of which is right. HELMET's citations are not scored. In all other
    tasks, such as the embedded tasks and JSON Lines, a right continuation states the whole list of answers.
    """
    if task in _CITATIONS.get(source, ()):
        return None
    return ANY_ANSWER if task in _QUESTIONS.get(source, ()) else ALL_ANSWERS


def score_text(text: str, answers: Sequence[str], scoring: str) -> float:
    """Return the score of a decoded text, 0..1; a right text scores exactly 1."""
    lowered = text.lower()
    occurs = [answer.lower() in lowered for answer in answers]
    return float(any(occurs)) if scoring == ANY_ANSWER else sum(occurs) / len(occurs)


def answer_characters(text: str, answers: Sequence[str], scoring: str) -> tuple[int, int] | None:
    """Return the range of characters that states the answers, as first and end; None if no answer occurs.

    Each answer counts at its first occurrence. If any answer is enough, the answer that ends first counts.
    """
    lowered = text.lower()
    spans = []
    for answer in answers:
        wanted = answer.lower()
        begin = lowered.find(wanted)
        if begin >= 0:
            spans.append((begin, begin + len(wanted)))
    if not spans:
        return None
    if scoring == ANY_ANSWER:
        begin, end = min(spans, key=lambda span: (span[1], span[0]))
    else:
        begin, end = min(begin for begin, _ in spans), max(end for _, end in spans)
    if len(lowered) != len(text):  # some letters have more than one in lower case
        ends = list(accumulate(len(letter.lower()) for letter in text))
        begin = sum(at <= begin for at in ends)
        end = sum(at < end for at in ends) + 1
    return begin, end


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

    Equal continuations are decoded once, since X is the same under every action.
    """
    distinct = list(dict.fromkeys(tokens for pair in pairs for tokens in pair))
    texts = dict(zip(distinct, decode(distinct), strict=True)) if distinct else {}
    scores = {tokens: score_text(text, answers, scoring) for tokens, text in texts.items()}
    spans = {x: token_span(x, texts[x], answers, scoring, decode) for x, _ in pairs}
    return [PairScore(scores[x], scores[y], *(spans[x] or (None, None))) for x, y in pairs]


def token_span(
    tokens: Tokens, text: str, answers: Sequence[str], scoring: str, decode: Decode
) -> tuple[int, int] | None:
    """Return the first and last position, from 1, of the tokens that state the answers; None if there are none.

    ``text`` is the decoded continuation; ``decode`` decodes its beginnings.
    """
    characters = answer_characters(text, answers, scoring)
    if characters is None:
        return None

    def beginning(count: int) -> str:
        return text if count == len(tokens) else decode([tokens[:count]])[0]

    def begun(count: int) -> int:
        """Return how many letters the first ``count`` tokens are a part of."""
        return len(beginning(count))

    def settled(count: int) -> int:
        """Return how many letters of the text the first ``count`` tokens contain completely."""
        both = zip(beginning(count), text, strict=False)
        return sum(1 for _ in takewhile(lambda letters: letters[0] == letters[1], both))

    begin, end = characters
    positions = range(1, len(tokens) + 1)
    first = positions[bisect_left(positions, begin + 1, key=begun)]
    last = positions[bisect_left(positions, end, key=settled)]
    return first, last
