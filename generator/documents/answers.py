"""How answers are scored on a decoded text, and where a text states them (definitions, "Answers").

RULER (NVIDIA/RULER: ``scripts/eval/synthetic/constants.py``) looks for its answers in the text without regard to case:
``all`` is the share of answers that occur, for needles, variables and words; ``part`` is 1 if any does, for questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from schema.document import ALL_ANSWERS, ANY_ANSWER

_QUESTIONS = {"ruler": ("qa_1", "qa_2"), "helmet": ("nq", "triviaqa", "hotpotqa", "popqa")}
_CITATIONS = {"helmet": ("asqa", "qampari")}  # which are judged by more than whether an answer occurs


def task_scoring(source: str, task: str) -> str | None:
    """Return how answers of a source's task are scored, where the document does not say; None where they are not.

    The answers of a question are texts any of which is right. HELMET's citations are not scored. All others, such as
    those of the embedded tasks and of JSON Lines, are a list of what a right continuation states.
    """
    if task in _CITATIONS.get(source, ()):
        return None
    return ANY_ANSWER if task in _QUESTIONS.get(source, ()) else ALL_ANSWERS


def score_text(text: str, answers: Sequence[str], scoring: str) -> float:
    """Return the score of a decoded text, 0..1; right is exactly 1."""
    lowered = text.lower()
    occurs = [answer.lower() in lowered for answer in answers]
    return float(any(occurs)) if scoring == ANY_ANSWER else sum(occurs) / len(occurs)


def answer_characters(text: str, answers: Sequence[str], scoring: str) -> tuple[int, int] | None:
    """Return where a text states its answers: the first character, and the end; None where no answer occurs.

    Each answer counts where it occurs first. Where any of them is enough, the one that ends first is taken.
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
