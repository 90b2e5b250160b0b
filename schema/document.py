"""A document: one tokenized prompt, the statistical unit of every study."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

SPLITS = ("development", "evaluation")
ALL_ANSWERS = "all"  # a document's answers are scored by the share that occurs
ANY_ANSWER = "part"  # or by whether any answer occurs
NORMALIZED = "normalized"  # as ANY_ANSWER, without case, punctuation, articles and repeated white space
SCORINGS = (ALL_ANSWERS, ANY_ANSWER, NORMALIZED)


@dataclass(frozen=True)
class Turn:
    """The tokens of one message in a prompt that a chat template wrote."""

    role: str  # such as system, user, assistant or tool
    first: int  # the position of the turn's first token, from 1


@dataclass(frozen=True)
class Document:
    """One tokenized prompt of n tokens.

    Attributes:
        doc: The document's id, unique within a study and model.
        cluster: The name of a group of dependent documents, such as several prompts made from one question. A document
            that depends on no other document is a cluster of its own.
        tokens: The prompt's token ids in order, without any generated token.
        answers: The texts that a right continuation states; empty if the source does not know them.
        scoring: The rule that scores the answers, one of ``SCORINGS``; empty without answers.
        templated: Whether the model's chat template wrote the prompt.
        turns: The turns of a templated prompt in order. If the template writes the header of the answer's turn, that
            turn is the last.
        control_tokens: The tokenizer's control tokens that stand in the user's text. A template keeps them as text;
            without a template they act as control tokens of the prompt.
    """

    doc: str
    stratum: str
    cluster: str
    task: str
    source: str
    tokens: tuple[int, ...]
    answers: tuple[str, ...] = field(default=())
    scoring: str = ""
    templated: bool = False
    turns: tuple[Turn, ...] = ()
    control_tokens: tuple[str, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """The prompt's true length n, in tokens."""
        return len(self.tokens)

    @property
    def prompt_sha256(self) -> str:
        """SHA-256 of the token ids as little-endian int32, in hexadecimal."""
        return hashlib.sha256(np.asarray(self.tokens, dtype="<i4").tobytes()).hexdigest()


DEVELOPMENT_FRACTION = 0.25


def hash_position(cluster: str) -> float:
    """Return the first 8 bytes of the SHA-256 of a cluster's name, read as a fraction of 2**64."""
    return int.from_bytes(hashlib.sha256(cluster.encode()).digest()[:8], "big") / 2**64


def split_of(cluster: str) -> str:
    """Return the split that a cluster belongs to by the hash of its name.

    Clusters whose ``hash_position`` is below ``DEVELOPMENT_FRACTION`` are development clusters.
    """
    return "development" if hash_position(cluster) < DEVELOPMENT_FRACTION else "evaluation"


def part_of(cluster: str, parts: int) -> int:
    """Return the part, 1 to ``parts``, of a cluster: a fixed function of its name, independent of its split.

    Studies that take different parts of one source share no cluster.
    """
    return int.from_bytes(hashlib.sha256(cluster.encode()).digest()[8:16], "big") % parts + 1
