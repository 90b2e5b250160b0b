"""Random draws that make up a generated document: a function of named parts, the same under every numpy."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

_T = TypeVar("_T")


class Draws:
    """A stream keyed by the BLAKE2b digest of its parts.

    Only ``Generator.random`` of Philox is used, whose stream is fixed across versions of numpy.
    """

    def __init__(self, *parts: str | int) -> None:
        digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=16).digest()
        self._random = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))

    def below(self, bound: int) -> int:
        """A whole number from 0 to ``bound`` - 1."""
        return int(self._random.random() * bound)

    def chosen(self, population: Sequence[_T], count: int) -> list[_T]:
        """``count`` different members of ``population``, in random order."""
        if count > len(population):
            raise ValueError(f"{count} of {len(population)}")
        order = np.argsort(self._random.random(len(population)), kind="stable")[:count]
        return [population[position] for position in order.tolist()]

    def shuffled(self, items: Sequence[_T]) -> list[_T]:
        """All of ``items`` in random order."""
        return self.chosen(items, len(items))

    def letters(self, alphabet: str, length: int) -> str:
        """A word of random letters."""
        return "".join(alphabet[position] for position in (self._random.random(length) * len(alphabet)).astype(int))

    def different_letters(self, alphabet: str, length: int, count: int) -> list[str]:
        """``count`` different words of random letters."""
        words: dict[str, None] = {}
        while len(words) < count:
            words[self.letters(alphabet, length)] = None
        return list(words)
