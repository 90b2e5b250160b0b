"""What a document is: one tokenized prompt, the statistical unit of every study (definitions, "Objects")."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

SPLITS = ("development", "evaluation")


@dataclass(frozen=True)
class Document:
    """One tokenized prompt of n tokens.

    ``tokens`` are the prompt's token ids in order, without any generated token. ``cluster`` is what makes documents
    dependent (several prompts made from one question share it); a document without such a tie is its own cluster.
    ``answers`` holds whatever the source knows of the right continuation, for people to read; no estimator uses it.
    """

    doc: str
    stratum: str
    cluster: str
    task: str
    source: str
    tokens: tuple[int, ...]
    answers: tuple[str, ...] = field(default=())

    @property
    def prompt_tokens(self) -> int:
        """The prompt's true length n, in tokens."""
        return len(self.tokens)

    @property
    def prompt_sha256(self) -> str:
        """SHA-256 of the token ids as little-endian int32, in hexadecimal."""
        return hashlib.sha256(np.asarray(self.tokens, dtype="<i4").tobytes()).hexdigest()


DEVELOPMENT_FRACTION = 0.25


def split_of(cluster: str) -> str:
    """The split a cluster belongs to: a fixed function of its name, so that no document can change sides.

    The first 8 bytes of the cluster's SHA-256, read as a fraction of 2**64, fall below ``DEVELOPMENT_FRACTION`` for
    development clusters.
    """
    position = int.from_bytes(hashlib.sha256(cluster.encode()).digest()[:8], "big") / 2**64
    return "development" if position < DEVELOPMENT_FRACTION else "evaluation"


def part_of(cluster: str, parts: int) -> int:
    """The part, 1 to ``parts``, that a cluster belongs to: independent of its split, and as fixed as that.

    Studies that take different parts of one source share no cluster.
    """
    return int.from_bytes(hashlib.sha256(cluster.encode()).digest()[8:16], "big") % parts + 1
