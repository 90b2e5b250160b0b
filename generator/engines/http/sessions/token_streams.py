"""The tokens of a session's streams; base of the sessions with all kinds of servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvdrift.generator.engines.http.apis.api import ServerFacts
from kvdrift.generator.engines.http.connection import Connection

Tokens = tuple[int, ...]


class TokenStreams:
    """Keeps the tokens of each open stream of a session, by stream number.

    ``read_back`` asks the server for its report, and raises an error if it is another server than before.
    """

    def __init__(self, connection: Connection, facts: ServerFacts, read_back: Callable[[], Mapping[str, Any]]) -> None:
        self._connection, self._facts, self._read_back = connection, facts, read_back
        self._prompt: Tokens = ()
        self._streams: dict[int, Tokens] = {}
        self._next = 0

    @property
    def read_back(self) -> Mapping[str, Any]:
        """Return the server's present report of itself."""
        return self._read_back()

    def fork(self, stream: int | None = None) -> int:
        """Open a stream that continues another stream, or the prompt; return its number."""
        self._next += 1
        self._streams[self._next] = self._prompt if stream is None else self._streams[stream]
        return self._next

    def drop(self, stream: int) -> None:
        """Close a stream."""
        del self._streams[stream]

    def close(self) -> None:
        """Forget the streams."""
        self._streams = {}
