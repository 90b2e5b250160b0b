"""What every kind of server is asked for: what it says of itself, and the law after some tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from generator.engines.http.connection import Connection
from generator.engines.http.settings import ServerSettings

PROBE = (
    "The quick brown fox jumps over 13 lazy dogs; naïve café, Straße, Ωμέγα, Привет, 你好, こんにちは, 🙂\n\t"
    'x = [1, 2.5]; don\'t <b>stop</b> -- "quoted" #42 https://example.org/?q=1'
)
"""A text by whose tokens two tokenizers are told apart."""


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself.

    Attributes:
        said: What decides its laws, as far as it says so: another value is another identity.
        beside: What else it says, such as how many slots it has.
        vocabulary: V.
        positions: The largest number of tokens, prompt and generated ones; 0 if it does not say.
        eos_tokens: Tokens that end a text, ascending.
        tokenizer_sha256: SHA-256 of what it says of its tokenizer; None if it says nothing.
        slots: How many streams it keeps caches of; 0 if it has none to choose.
    """

    said: Mapping[str, Any]
    vocabulary: int
    positions: int
    eos_tokens: tuple[int, ...]
    tokenizer_sha256: str | None
    slots: int = 0
    beside: Mapping[str, Any] = field(default_factory=dict)


class Api(Protocol):
    """One kind of server."""

    @property
    def health(self) -> str:
        """The path that answers if the server is ready."""

    def facts(self, connection: Connection, settings: ServerSettings, where: str) -> ServerFacts:
        """Ask a server what it is."""


class LawApi(Api, Protocol):
    """A kind of server that computes a law from a whole history."""

    def law(self, connection: Connection, facts: ServerFacts, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the logarithms of the next token's probabilities, float32 [V].

        Raises:
            InputError: Some are missing.
        """
