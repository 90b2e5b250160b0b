"""The interface of every kind of server: its report of itself, and the law after some tokens, which must be whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvdrift.generator.engines.http.connection import Connection
from kvdrift.generator.engines.http.settings import ServerSettings
from kvdrift.schema.errors import InputError, OperationError

PROBE = (
    "The quick brown fox jumps over 13 lazy dogs; naïve café, Straße, Ωμέγα, Привет, 你好, こんにちは, 🙂\n\t"
    'x = [1, 2.5]; don\'t <b>stop</b> -- "quoted" #42 https://example.org/?q=1'
)
"""A text whose tokens distinguish two tokenizers."""


@dataclass(frozen=True)
class ServerFacts:
    """A server's report of itself.

    Attributes:
        said: Facts that determine its laws, as far as it reports them; another value is another identity.
        beside: Other facts, such as the number of slots.
        vocabulary: V.
        positions: The largest number of tokens, prompt and generated tokens; 0 if it does not say.
        eos_tokens: Tokens that end a text; () if it does not say.
        tokenizer_sha256: SHA-256 of its report about its tokenizer; None if it reports nothing.
        slots: The number of streams whose caches it keeps; 0 if it has no slots to choose.
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
        """The path that answers once the server is ready."""

    def facts(self, connection: Connection, settings: ServerSettings, where: str) -> ServerFacts:
        """Ask a server for its report of itself."""


class LawApi(Api, Protocol):
    """A kind of server that computes a law from a whole history."""

    def law(self, connection: Connection, facts: ServerFacts, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the logarithms of the next token's probabilities, float32 [V]."""


def whole_law(tokens: Sequence[Any], logarithms: Sequence[Any], vocabulary: int, where: str) -> NDArray[np.float32]:
    """Return logarithms of probabilities, float32 [V], from those of token ids in any order; errors say ``where``.

    A logarithm that is None is that of probability 0, since JSON has no infinity and servers write null.
    """
    nulls = sum(value is None for value in logarithms)
    try:
        ids = np.array(tokens, dtype=np.int64)
        values = np.array([-np.inf if value is None else value for value in logarithms], dtype=np.float64)
    except (TypeError, ValueError):
        raise OperationError(f"{where}: the server's log-probabilities are no numbers") from None
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise InputError(
            f"{where}: the server has token {int(ids.max())}, and the vocabulary has {vocabulary:,}: a side's settings "
            "say how many there are by vocabulary"
        )
    if unknown := int(np.isnan(values).sum()):
        raise OperationError(f"{where}: {unknown:,} of the server's log-probabilities are NaN; a law has numbers")
    law = np.full(vocabulary, np.nan)
    law[ids] = values
    if missing := int(np.isnan(law).sum()):
        raise InputError(
            f"{where}: the server returned {vocabulary - missing:,} of {vocabulary:,} log-probabilities; a law needs "
            "all of them: vLLM has them with --max-logprobs -1, and a server that cannot return them all can be "
            'compared at temperature 0, with api = "openai"'
        )
    with np.errstate(over="ignore"):
        total = float(np.exp(law).sum())
    if not abs(total - 1) < 1e-2:
        of_nulls = f", with 0 for {nulls:,} that are null" if nulls else ""
        raise OperationError(
            f"{where}: the server's probabilities sum to {total:.4g}{of_nulls}: they are not those of a law"
        )
    return law.astype(np.float32)
