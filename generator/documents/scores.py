"""Continuations scored against their document's answers, through the tokenizer alone.

A continuation is decoded up to its EOS, without the prompt and without special tokens. Which token a character belongs
to is found by decoding beginnings of the continuation: a byte-level tokenizer may need several tokens for a letter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from generator.documents.answers import answer_characters, score_text

Tokens = tuple[int, ...]
Decode = Callable[[Sequence[Tokens]], list[str]]
"""Decodes continuations, several at once."""


@dataclass(frozen=True)
class PairScore:
    """The scores of a pair of continuations, and the positions, from 1, of X's tokens that state its answers."""

    score_x: float
    score_y: float
    span_first: int | None
    span_last: int | None


def score_pairs(
    pairs: Sequence[tuple[Tokens, Tokens]], answers: Sequence[str], scoring: str, decode: Decode
) -> list[PairScore]:
    """Score pairs of continuations, X and Y up to their EOS, of a document.

    Each continuation is decoded once, however many pairs have it: X is the same under every action.
    """
    distinct = list(dict.fromkeys(tokens for pair in pairs for tokens in pair))
    texts = dict(zip(distinct, decode(distinct), strict=True)) if distinct else {}
    scores = {tokens: score_text(text, answers, scoring) for tokens, text in texts.items()}
    spans = {x: token_span(x, texts[x], answers, scoring, decode) for x, _ in pairs}
    return [PairScore(scores[x], scores[y], *(spans[x] or (None, None))) for x, y in pairs]


def token_span(
    tokens: Tokens, text: str, answers: Sequence[str], scoring: str, decode: Decode
) -> tuple[int, int] | None:
    """Return the first and the last position, from 1, of the tokens that state answers; None where none does.

    Args:
        tokens: the continuation.
        text: what it is decoded to.
        answers: the document's answers.
        scoring: how they are scored.
        decode: decodes beginnings of the continuation.

    """
    characters = answer_characters(text, answers, scoring)
    if characters is None:
        return None

    def beginning(count: int) -> str:
        return text if count == len(tokens) else decode([tokens[:count]])[0]

    def begun(count: int) -> int:
        """How many letters so many tokens are part of."""
        return len(beginning(count))

    def settled(count: int) -> int:
        """How many letters of the text they are the whole of."""
        both = zip(beginning(count), text, strict=False)
        return sum(1 for _ in takewhile(lambda letters: letters[0] == letters[1], both))

    begin, end = characters
    positions = range(1, len(tokens) + 1)
    first = positions[bisect_left(positions, begin + 1, key=begun)]
    last = positions[bisect_left(positions, end, key=settled)]
    return first, last
