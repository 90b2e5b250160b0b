"""The adapter of servers: a side is one server, which reports about itself before and after each document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import httpx

from kvdrift.generator.engines.engine import Capabilities, Session, SideFacts
from kvdrift.generator.engines.http.apis.api import ServerFacts
from kvdrift.generator.engines.http.apis.llama_server import LlamaServer
from kvdrift.generator.engines.http.apis.openai import OpenAi
from kvdrift.generator.engines.http.apis.sglang import Sglang
from kvdrift.generator.engines.http.apis.vllm import Vllm
from kvdrift.generator.engines.http.connection import Connection
from kvdrift.generator.engines.http.sessions.histories import GreedySession, LawSession
from kvdrift.generator.engines.http.sessions.slots import SlotSession
from kvdrift.generator.engines.http.settings import LLAMA_SERVER, OPENAI, SGLANG, VLLM, Requests, ServerSettings
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
class ServerSide:
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
    def asked(self) -> Mapping[str, Any]:
        """The study file's settings of the server."""
        return self.settings.asked

    @property
    def said(self) -> Mapping[str, Any]:
        """The reported facts that determine the server's laws."""
        return self.server.said

    @property
    def capabilities(self) -> Capabilities:
        """The side's capabilities; rows are not invariant, since the server chooses which requests share a batch."""
        streams = len(self._slots) if self.server.slots else _MOST_HISTORIES
        return Capabilities(row_invariant=False, most_streams=streams, full_laws=self.settings.api != OPENAI)

    @property
    def weights_sha256(self) -> None:
        """None, since no server reports its weights."""

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

    def cache_bytes(self, entries: int) -> int:  # noqa: ARG002 - it is in the server's memory
        """Return 0: the cache takes no memory of this machine."""
        return 0

    def weight_bytes(self) -> int:
        """Return 0: the weights take no memory of this machine."""
        return 0

    def check_same(self) -> None:
        """Raise an error if the server is not the same as before."""
        now = _facts(self.connection, self.settings, self.where)
        before = {**self.server.said, "tokenizer": self.server.tokenizer_sha256}
        for name, value in {**now.said, "tokenizer": now.tokenizer_sha256}.items():
            if value != before.get(name):
                raise OperationError(
                    f"{self.where}: the server at {self.connection.url} is another one than before: {name} was "
                    f"{before.get(name)}, and is {value}; start the first one again and run the same command, or redo "
                    "the action"
                )

    def _read_back(self) -> Mapping[str, Any]:
        self.check_same()
        return {**self.server.said, **self.server.beside}

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
        ours, theirs = reference.said.get(name), side.said.get(name)
        if None not in (ours, theirs) and ours != theirs:
            raise InputError(
                f"action '{action}': the model at {side.connection.url} has {theirs:,} {what}, that of the reference "
                f"{ours:,}: it is another model, and its texts would part for that alone"
            )
