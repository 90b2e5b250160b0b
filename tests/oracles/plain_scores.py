"""Scores of continuations by plain loops over decoded text: the benchmarks' rules, and spans by decoding every part.

The two functions of RULER's scores are those of the benchmark (NVIDIA/RULER, ``scripts/eval/synthetic/constants.py``),
for one prediction and as a fraction. HELMET's rule (princeton-nlp/HELMET, ``data.py``, ``default_post_process``) is
written word by word; it takes the better of a prediction and of the line after its first "Answer:".
"""

from __future__ import annotations

import re
import string
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


def post_processed(pred: str) -> str:
    """Return what RULER scores of a prediction (``scripts/eval/evaluate.py``)."""
    return "".join("\n" if letter < " " else letter for letter in pred.strip()).strip()


def normal(text: str) -> str:
    """Return a text word by word, as SQuAD's evaluation compares it."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    parts = re.findall(r"\w+|\W+", bare)
    return " ".join("".join(" " if part in {"a", "an", "the"} else part for part in parts).split())


def substring_exact_match(pred: str, ref: Sequence[str]) -> float:
    return max(float(normal(r) in normal(pred)) for r in ref)


def helmet_score(pred: str, ref: Sequence[str]) -> float:
    """Return HELMET's score of a prediction, of which it also scores the line after the first opening."""
    _, opening, rest = pred.partition(next(iter(re.findall("answer:", pred, re.IGNORECASE)), "\0"))
    line = (rest if opening else pred).partition("\n")[0].strip()
    line = line[len("answer:") :] if line.lower().startswith("answer:") else line
    return max(substring_exact_match(pred, ref), substring_exact_match(line.strip(), ref))


SCORES = {"all": string_match_all, "part": string_match_part, "normalized": substring_exact_match}


def up_to_eos(tokens: Sequence[int], eos: int) -> list[int]:
    found = list(tokens)
    return found[: found.index(eos)] if eos in found else found


def plain_span(tokens: Sequence[int], answers: Sequence[str], scoring: str, decode: Decode) -> tuple[int, int] | None:
    """Return the first and last token needed to state the answers; each answer is stated once in the text."""
    fold = normal if scoring == "normalized" else str.lower
    whole = fold(decode(tokens))
    stated = [fold(answer) for answer in answers if fold(answer) in whole]
    if not stated:
        return None

    def enough(text: str) -> bool:
        return (all if scoring == "all" else any)(answer in fold(text) for answer in stated)

    last = next(n for n in range(1, len(tokens) + 1) if enough(decode(tokens[:n])))
    if scoring != "all":
        stated = [answer for answer in stated if answer in fold(decode(tokens[:last]))]
    first = max(n for n in range(last) if all(answer in fold(decode(tokens[n:])) for answer in stated))
    return first + 1, last
