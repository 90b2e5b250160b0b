"""Sessions that send each stream's whole history with every request, for servers without slots and greedy servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvdrift.generator.engines.http.apis.api import LawApi, ServerFacts
from kvdrift.generator.engines.http.apis.openai import OpenAi
from kvdrift.generator.engines.http.connection import Connection
from kvdrift.generator.engines.http.sessions.token_streams import Tokens, TokenStreams


class _Histories(TokenStreams):
    """Streams that ask for every law with the whole history."""

    def prefill(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Take a prompt, and return the law after it."""
        self._prompt, self._streams = tuple(tokens), {}
        return self._law(self._prompt)

    def step(self, streams: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append one token to each of some streams, and return the logarithms of the next laws, [streams, V]."""
        for stream, token in zip(streams, tokens, strict=True):
            self._streams[stream] = (*self._streams[stream], token)
        found = self._connection.at_once([self._streams[stream] for stream in streams], self._law)
        return np.stack(found)

    def prompt_bytes(self) -> None:
        """Return None, since no such server reports the bytes of a prompt."""

    def _law(self, history: Tokens) -> NDArray[np.float32]:
        raise NotImplementedError


class LawSession(_Histories):
    """Whole laws; each law is one request with the whole history."""

    def __init__(
        self, connection: Connection, api: LawApi, facts: ServerFacts, read_back: Callable[[], Mapping[str, Any]]
    ) -> None:
        super().__init__(connection, facts, read_back)
        self._api = api

    def _law(self, history: Tokens) -> NDArray[np.float32]:
        return self._api.law(self._connection, self._facts, history)


class GreedySession(_Histories):
    """Greedy laws: all probability is on the token that the server writes at temperature 0.

    A request lets the server write ``ahead`` tokens. While a stream continues with the tokens that the server wrote, no
    further request is made. If it continues with another token, the server is asked for the tokens after that one.
    """

    def __init__(
        self, connection: Connection, api: OpenAi, facts: ServerFacts, ahead: int,
        read_back: Callable[[], Mapping[str, Any]],
    ) -> None:  # fmt: skip
        super().__init__(connection, facts, read_back)
        self._api, self._ahead = api, ahead
        self._written: dict[Tokens, int] = {}  # the next token after each history of this prompt

    def prefill(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Take a prompt, and return the law after it."""
        self._written = {}
        return super().prefill(tokens)

    def _law(self, history: Tokens) -> NDArray[np.float32]:
        if history not in self._written:
            tokens, ended = self._api.written(self._connection, self._facts, history, self._ahead)
            if ended and (not tokens or tokens[-1] not in self._facts.eos_tokens):
                tokens.append(self._facts.eos_tokens[0])  # servers leave out the token by which a text ends
            for place, token in enumerate(tokens):
                self._written[history + tuple(tokens[:place])] = token
        law = np.zeros(self._facts.vocabulary, dtype=np.float32)
        law[self._written[history]] = 1.0
        return law
