"""The floor of an engine: a second run of the reference that shares nothing with the first.

If the adapter promises ``row_invariant``, every distance of the floor must be exactly 0.

A second cache alone would repeat the reference's calls row for row and show no difference. Each stream therefore has a
double beside it, which is decoded and ignored. Calls then have twice as many rows, as calls of an action with parted
pairs have, and entries lie in other places. The remaining difference is that of batches and of the placement of
entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvdrift.generator.engines.engine import Capabilities, Session, Side, SideFacts


@dataclass(frozen=True)
class Again:
    """A side in whose sessions every stream has a double."""

    side: Side

    @property
    def facts(self) -> SideFacts:
        """The facts of the side."""
        return self.side.facts

    @property
    def asked(self) -> Mapping[str, Any]:
        """The settings of the side."""
        return self.side.asked

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the side, with half as many streams."""
        own = self.side.capabilities
        return Capabilities(own.row_invariant, own.most_streams // 2, own.full_laws)

    @property
    def said(self) -> Mapping[str, Any]:
        """The report of the side."""
        return self.side.said

    @property
    def weights_sha256(self) -> str | None:
        """The weights' SHA-256 of the side."""
        return self.side.weights_sha256

    def open(self, entries: int) -> Session:
        """Open a session whose cache has room for streams and doubles."""
        return _Doubled(self.side.open(2 * entries))

    def cache_bytes(self, entries: int) -> int:
        """Return the bytes of the cache, including the doubles."""
        return self.side.cache_bytes(2 * entries)

    def weight_bytes(self) -> int:
        """Return the bytes of the side's weights, which are in memory once."""
        return self.side.weight_bytes()


class _Doubled:
    """A session in which every stream has a double; the double of stream s is opened before it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._double: dict[int, int] = {}

    @property
    def read_back(self) -> Mapping[str, Any]:
        return self._session.read_back

    def prefill(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self._double = {}
        return self._session.prefill(tokens)

    def fork(self, stream: int | None = None) -> int:
        double = self._session.fork(stream)
        new = self._session.fork(stream)
        self._double[new] = double
        return new

    def drop(self, stream: int) -> None:
        self._session.drop(self._double.pop(stream))
        self._session.drop(stream)

    def step(self, streams: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
        doubles = [self._double[stream] for stream in streams]
        return self._session.step([*doubles, *streams], [*tokens, *tokens])[len(doubles) :]

    def prompt_bytes(self) -> int | None:
        return self._session.prompt_bytes()

    def close(self) -> None:
        self._session.close()
