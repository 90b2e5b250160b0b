"""Measure the time and bytes of a position on a server, before a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvdrift.generator.engines.http.engine import ServerSide

_POSITIONS = 8


@dataclass(frozen=True)
class PositionCost:
    """The cost of one stream on one server: seconds to read the prompt once, and seconds and bytes of a position."""

    side: ServerSide
    prompt_seconds: float
    seconds: float
    bytes: float

    @property
    def words(self) -> str:
        """The cost in words."""
        server = self.side.server
        slots = f", {server.slots} slots" if server.slots else ""
        version = next((str(server.said[key]) for key in ("build_info", "version") if server.said.get(key)), "")
        named = f"{self.side.connection.url} ({' '.join([str(server.said['server']), version]).strip()}{slots})"
        return (
            f"{named}: {1000 * self.prompt_seconds:,.1f} ms to read the prompt, and {1000 * self.seconds:,.1f} ms and "
            f"{self.bytes / 1024:,.1f} KiB a position of one stream"
        )


def position_cost(side: ServerSide, tokens: Sequence[int]) -> PositionCost:
    """Measure a prompt and some positions of one stream."""
    session, began = side.open(0), time.perf_counter()
    law = session.prefill(tokens)
    prompt_seconds = time.perf_counter() - began
    stream, received, began = session.fork(), side.connection.received, time.perf_counter()
    for _ in range(_POSITIONS):
        (law,) = session.step([stream], [int(law.argmax())])
    seconds = (time.perf_counter() - began) / _POSITIONS
    session.close()
    return PositionCost(side, prompt_seconds, seconds, (side.connection.received - received) / _POSITIONS)
