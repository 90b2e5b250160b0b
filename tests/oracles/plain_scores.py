"""Scores of continuations by plain loops over decoded text: RULER's own functions, and spans by decoding every part.

The two functions of scores are those of the benchmark (NVIDIA/RULER, ``scripts/eval/synthetic/constants.py``), for one
prediction and as a fraction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

RULER_TASKS = {
    "niah_single_1": "all", "niah_single_2": "all", "niah_single_3": "all", "niah_multikey_1": "all",
    "niah_multikey_2": "all", "niah_multikey_3": "all", "niah_multivalue": "all", "niah_multiquery": "all",
    "vt": "all", "cwe": "all", "fwe": "all", "qa_1": "part", "qa_2": "part",
}  # fmt: skip


def string_match_part(pred: str, ref: Sequence[str]) -> float:
    return max([1.0 if r.lower() in pred.lower() else 0.0 for r in ref])


def string_match_all(pred: str, ref: Sequence[str]) -> float:
    return sum([1.0 if r.lower() in pred.lower() else 0.0 for r in ref]) / len(ref)


SCORES = {"all": string_match_all, "part": string_match_part}


def up_to_eos(tokens: Sequence[int], eos: int) -> list[int]:
    found = list(tokens)
    return found[: found.index(eos)] if eos in found else found


def plain_span(tokens: Sequence[int], answers: Sequence[str], scoring: str, decode: Decode) -> tuple[int, int] | None:
    """Return the first and last token needed to state the answers; each answer is stated once in the text."""
    whole = decode(tokens).lower()
    stated = [answer.lower() for answer in answers if answer.lower() in whole]
    if not stated:
        return None

    def enough(text: str) -> bool:
        return (any if scoring == "part" else all)(answer in text.lower() for answer in stated)

    last = next(n for n in range(1, len(tokens) + 1) if enough(decode(tokens[:n])))
    if scoring == "part":
        stated = [answer for answer in stated if answer in decode(tokens[:last]).lower()]
    first = max(n for n in range(last) if all(answer in decode(tokens[n:]).lower() for answer in stated))
    return first + 1, last
