"""Score answers on a decoded text, and find the places that state them (definitions, "Answers").

RULER (NVIDIA/RULER: ``scripts/eval/synthetic/constants.py``) searches its answers in the text without regard to case:
``all`` is the share of answers that occur, for needles, variables and words; ``part`` is 1 if any answer occurs, for
questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from schema.document import ALL_ANSWERS, ANY_ANSWER

_QUESTIONS = {"ruler": ("qa_1", "qa_2"), "helmet": ("nq", "triviaqa", "hotpotqa", "popqa")}
_CITATIONS = {"helmet": ("asqa", "qampari")}  # which are judged by more than whether an answer occurs


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
