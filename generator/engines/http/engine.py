"""The adapter of servers: a side is one server, which reports about itself before and after each document."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from kvdrift.generator.engines.engine import Capabilities, Session, Side, SideFacts
from kvdrift.generator.engines.http.apis import LlamaServer, OpenAi, ServerFacts, Sglang, Vllm
from kvdrift.generator.engines.http.connection import (
    LLAMA_SERVER,
    OPENAI,
    SGLANG,
    VLLM,
    Connection,
    Requests,
    ServerSettings,
)
from kvdrift.generator.engines.http.sessions import GreedySession, LawSession, SlotSession
from kvdrift.schema.errors import InputError, OperationError
from kvdrift.schema.study import HTTP

_STREAMS = 2  # of a replicate on one side
_MOST_HISTORIES = 64  # streams at once of a server that has no slots

_APIS: dict[str, LlamaServer | Vllm | Sglang | OpenAi] = {
    LLAMA_SERVER: LlamaServer(),
    VLLM: Vllm(),
    SGLANG: Sglang(),
    OPENAI: OpenAi(),
}


@dataclass(frozen=True)
class Servers:
    """Servers over HTTP, with limits on requests."""

    requests: Requests

    def description(self) -> Mapping[str, Any]:
        """Describe the client; each side describes its own server."""
        return {"engine": HTTP, "library": f"httpx {httpx.__version__}", "environment": {}}

    def side(self, url: str, settings: Mapping[str, Any], where: str) -> ServerSide:
        """Make a side of the server at an address."""
        own = ServerSettings.of(settings, where)
        connection = Connection(url, self.requests, _APIS[own.api].health)
        facts = _facts(connection, own, where)
        side = ServerSide(connection, own, facts, where)
        connection.on_return = side.check_same
        return side


@dataclass(frozen=True)
class ServerSide(Side):
    """One server: its connection, the study file's settings of it, and its report of itself; ``where`` names the side.

    ``part`` is the number of this side's share of the slots, from 0, and the number of equal shares.
    """

    connection: Connection
    settings: ServerSettings
    server: ServerFacts
    where: str
    part: tuple[int, int] = (0, 1)

    @property
    def facts(self) -> SideFacts:
        """The server's facts about its model."""
        own = self.server
        return SideFacts(own.vocabulary, own.positions, own.eos_tokens, own.tokenizer_sha256)

    @property
    def requested(self) -> Mapping[str, Any]:
        """The study file's settings of the server."""
        return self.settings.requested

    @property
    def reported(self) -> Mapping[str, Any]:
        """The reported facts that determine the server's laws."""
        return self.server.reported

    @property
    def capabilities(self) -> Capabilities:
        """The side's capabilities; rows are not invariant, since the server chooses which requests share a batch."""
        streams = len(self._slots) if self.server.slots else _MOST_HISTORIES
        return Capabilities(row_invariant=False, most_streams=streams, full_laws=self.settings.api != OPENAI)

    def ending(self, eos_tokens: tuple[int, ...]) -> ServerSide:
        """Return the same side with the study's tokens that end a text."""
        return replace(self, server=replace(self.server, eos_tokens=eos_tokens))

    def halves(self) -> tuple[ServerSide, ServerSide]:
        """Return two sides with half of the slots each, which share no stream."""
        return replace(self, part=(0, 2)), replace(self, part=(1, 2))

    def open(self, entries: int) -> Session:  # noqa: ARG002 - a server has the room that it has
        """Open a session; the server must be the same as before."""
        self.check_same()
        api, read_back = self._api, self._read_back
        if isinstance(api, LlamaServer):
            return SlotSession(self.connection, api, self.server, self._slots, read_back)
        if isinstance(api, OpenAi):
            return GreedySession(self.connection, api, self.server, self.settings.ahead, read_back)
        return LawSession(self.connection, api, self.server, read_back)

    def check_same(self) -> None:
        """Raise an error if the server is not the same as before."""
        now = _facts(self.connection, self.settings, self.where)
        before = {**self.server.reported, "tokenizer": self.server.tokenizer_sha256}
        for name, value in {**now.reported, "tokenizer": now.tokenizer_sha256}.items():
            if value != before.get(name):
                raise OperationError(
                    f"{self.where}: the server at {self.connection.url} is another one than before: {name} was "
                    f"{before.get(name)}, and is {value}; start the first one again and run the same command, or redo "
                    "the action"
                )

    def _read_back(self) -> Mapping[str, Any]:
        self.check_same()
        return {**self.server.reported, **self.server.beside}

    @property
    def _api(self) -> LlamaServer | Vllm | Sglang | OpenAi:
        return _APIS[self.settings.api]

    @property
    def _slots(self) -> range:
        which, parts = self.part
        share = self.server.slots // parts
        return range(which * share, (which + 1) * share)


def _facts(connection: Connection, settings: ServerSettings, where: str) -> ServerFacts:
    """Return a server's report of itself; an answer of unknown form becomes an error about the kind of server."""
    try:
        return _APIS[settings.api].facts(connection, settings, where)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{where}: {connection.url} does not answer as {settings.api} does: {type(error).__name__}: {error}"
        ) from None


def check_slots(side: ServerSide, where: str) -> None:
    """Raise an error if a server with slots has too few: each replicate has two streams of a side."""
    needed = _STREAMS * side.part[1]
    if 0 < side.server.slots < needed:
        floor = " of the reference, and two of the floor" if side.part[1] > 1 else ""
        raise InputError(
            f"{where}: {side.connection.url} has {side.server.slots} slots, and needs {needed}: a replicate has two "
            f"streams{floor}; start it with --parallel {max(2 * needed, 8)}"
        )


def check_same_model(action: str, reference: ServerSide, side: ServerSide) -> None:
    """Raise an error if a server reports another width or number of weights than the reference: another model."""
    for name, what in (("n_embd", "channels"), ("n_params", "weights")):
        ours, theirs = reference.reported.get(name), side.reported.get(name)
        if None not in (ours, theirs) and ours != theirs:
            raise InputError(
                f"action '{action}': the model at {side.connection.url} has {theirs:,} {what}, that of the reference "
                f"{ours:,}: it is another model, and its texts would part for that alone"
            )


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
        version = next((str(server.reported[key]) for key in ("build_info", "version") if server.reported.get(key)), "")
        named = f"{self.side.connection.url} ({' '.join([str(server.reported['server']), version]).strip()}{slots})"
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
