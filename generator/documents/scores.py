"""Score continuations against their document's answers, using only the tokenizer.

A continuation is decoded up to its EOS, without the prompt and without special tokens. The token of a character is
found by decoding beginnings of the continuation, since a byte-level tokenizer may need several tokens for a letter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from generator.documents.answers import answer_characters, score_text

Tokens = tuple[int, ...]
Decode = Callable[[Sequence[Tokens]], list[str]]
"""A function that decodes several continuations at once."""


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

    Args:
        tokens: The continuation.
        text: The decoded continuation.
        answers: The document's answers.
        scoring: The rule that scores the answers.
        decode: Decodes beginnings of the continuation.
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
