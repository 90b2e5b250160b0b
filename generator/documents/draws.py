"""The random draws of generated documents, the same under every version of numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from kvdrift.schema.keyed_random import keyed_generator

_T = TypeVar("_T")


class DocumentDraws:
    """A random stream that is a function of its parts alone."""

    def __init__(self, *parts: str | int) -> None:
        self._random = keyed_generator("\0".join(map(str, parts)))

    def below(self, bound: int) -> int:
        """Draw an integer from 0 to ``bound`` - 1."""
        return int(self._random.random() * bound)

    def chosen(self, population: Sequence[_T], count: int) -> list[_T]:
        """Draw ``count`` different members of ``population``, in random order."""
        if count > len(population):
            raise ValueError(f"cannot draw {count} of {len(population)}")
        order = np.argsort(self._random.random(len(population)), kind="stable")[:count]
        return [population[position] for position in order.tolist()]

    def shuffled(self, items: Sequence[_T]) -> list[_T]:
        """Return all items in random order."""
        return self.chosen(items, len(items))

    def letters(self, alphabet: str, length: int) -> str:
        """Draw a word of random letters."""
        return "".join(alphabet[position] for position in (self._random.random(length) * len(alphabet)).astype(int))

    def different_letters(self, alphabet: str, length: int, count: int) -> list[str]:
        """Draw ``count`` different words of random letters."""
        words: dict[str, None] = {}
        while len(words) < count:
            words[self.letters(alphabet, length)] = None
        return list(words)
