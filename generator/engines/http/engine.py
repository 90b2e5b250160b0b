"""The adapter of servers: a side is one server, which reports about itself before and after each document.

A llama-server's tokenizer and chat template can write the prompts of a study.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx
from tokenizers import AddedToken

from kvdrift.generator.engines.engine import Capabilities, Room, Session, Side, SideFacts
from kvdrift.generator.engines.http.apis import KINDS, LlamaServer, OpenAi, ServerFacts, all_tokens
from kvdrift.generator.engines.http.connection import LLAMA_SERVER, OPENAI, Connection, Requests, ServerSettings
from kvdrift.generator.engines.http.sessions import DistributionSession, GreedySession, SlotSession
from kvdrift.generator.engines.http.steps import StepServer, StepSession
from kvdrift.schema.errors import InputError, KvdriftError, OperationError
from kvdrift.schema.study import HTTP, ModelSection

_STREAMS = 2  # of a replicate on one side
_MOST_HISTORIES = 64  # streams at once of a server that has no slots


@dataclass(frozen=True)
class Servers:
    """Servers over HTTP, with limits on requests."""

    requests: Requests
    decoding: list[StepServer] = field(default_factory=list)  # the servers that have kvdrift's processor

    def description(self) -> Mapping[str, Any]:
        """Describe the client; each side describes its own server."""
        return {"engine": HTTP, "library": f"httpx {httpx.__version__}", "environment": {}}

    def side(self, url: str, settings: Mapping[str, Any], where: str) -> ServerSide:
        """Make a side of the server at an address."""
        server_settings = ServerSettings.of(settings, where)
        connection = Connection(url, self.requests, KINDS[server_settings.api].health)
        facts = _facts(connection, server_settings, where)
        steps = None
        if server_settings.processor:
            steps = StepServer(connection, facts.reported["id"], facts.positions, self.decoding)
            if facts.vocabulary not in (0, steps.facts.vocabulary):
                raise InputError(
                    f"{where}: vocabulary = {facts.vocabulary}: the server has {steps.facts.vocabulary} tokens"
                )
            facts = replace(facts, vocabulary=steps.facts.vocabulary)
        side = ServerSide(connection, server_settings, facts, where, steps)
        connection.on_return = side.check_same
        return side


@dataclass(frozen=True)
class ServerSide(Side):
    """One server: its connection, the study file's settings of it, and its report of itself; ``where`` names the side.

    ``steps`` is the server's own decoding, if the server has kvdrift's processor. ``part`` is (i, n): the slots are
    divided into n equal shares, and this side has share i, counted from 0. ``entry_bytes`` are the bytes of a position
    in all layers, if they are known.
    """

    connection: Connection
    settings: ServerSettings
    server: ServerFacts
    where: str
    steps: StepServer | None = None
    part: tuple[int, int] = (0, 1)
    entry_bytes: int | None = None

    @property
    def facts(self) -> SideFacts:
        """The server's facts about its model."""
        server = self.server
        return SideFacts(server.vocabulary, server.positions, server.eos_tokens, server.tokenizer_sha256)

    @property
    def requested(self) -> Mapping[str, Any]:
        """The study file's settings of the server."""
        return self.settings.requested

    @property
    def reported(self) -> Mapping[str, Any]:
        """The reported facts that determine the server's distributions."""
        return self.server.reported

    @property
    def capabilities(self) -> Capabilities:
        """The side's capabilities: without ``row_invariant``, since the server chooses which requests share a batch."""
        streams = len(self._slots) if self.server.slots else _MOST_HISTORIES
        if self.steps is not None:
            streams = min(_MOST_HISTORIES, self.steps.facts.sequences // self.part[1])
        return Capabilities(row_invariant=False, most_streams=streams, full_distributions=self.settings.api != OPENAI)

    def ending(self, eos_tokens: tuple[int, ...]) -> ServerSide:
        """Return the same side with the study's tokens that end a text."""
        return replace(self, server=replace(self.server, eos_tokens=eos_tokens))

    def sized(self, configuration: Mapping[str, Any] | None) -> ServerSide:
        """Return the same side with the bytes of a position, if the server's memory agrees with a ``config.json``.

        A vLLM reports its bytes with an unused remainder of less than a block, and not the width of its numbers. The
        bytes are layers times KV heads times head size times 2 times a width of 1, 2 or 4 bytes, if that fits.
        """
        return replace(self, entry_bytes=_entry_bytes(self.server, configuration or {}))

    def halves(self) -> tuple[ServerSide, ServerSide]:
        """Return two sides with half of the slots each, which share no stream."""
        return replace(self, part=(0, 2)), replace(self, part=(1, 2))

    def open(self, room: Room) -> Session:  # noqa: ARG002 - a server has the room that it has
        """Open a session; the server must be the same as before."""
        self.check_same()
        api, about = KINDS[self.settings.api], (self.connection, self.server)
        if isinstance(api, LlamaServer):
            return SlotSession(*about, self._read_back, api, self._slots)
        if isinstance(api, OpenAi):
            return GreedySession(*about, self._read_back, partial(api.written, *about, self.settings.ahead))
        if self.steps is not None:
            return StepSession(*about, self._read_back, self.steps, self.entry_bytes)
        return DistributionSession(*about, self._read_back, partial(api.distribution, *about), self.entry_bytes)

    def check_same(self) -> None:
        """Raise an error if the server's report of itself is not that with which the side was made."""
        now = _facts(self.connection, self.settings, self.where)
        before = {**self.server.reported, "tokenizer": self.server.tokenizer_sha256}
        for name, value in {**now.reported, "tokenizer": now.tokenizer_sha256}.items():
            if value != before.get(name):
                raise OperationError(
                    f"{self.where}: the server at {self.connection.url} changed: {name} was "
                    f"{before.get(name)}, and is {value}; start the former server again and run the same command, or "
                    "redo the action"
                )

    def _read_back(self) -> Mapping[str, Any]:
        self.check_same()
        return {**self.server.reported, **self.server.beside}

    @property
    def _slots(self) -> range:
        which, parts = self.part
        share = self.server.slots // parts
        return range(which * share, (which + 1) * share)


def _entry_bytes(server: ServerFacts, configuration: Mapping[str, Any]) -> int | None:
    """Return the bytes of a position in all layers; None if a server's memory is unknown or not of this shape."""
    shape, memory = configuration.get("text_config", configuration), server.beside
    try:
        heads = shape.get("num_key_value_heads") or shape["num_attention_heads"]
        size = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
        numbers = 2 * shape["num_hidden_layers"] * heads * size
        tokens, block = memory["kv_cache_size_tokens"], int(server.reported["block_size"])
        blocks = memory["kv_cache_memory_bytes"] / numbers / block
    except (KeyError, TypeError, ValueError):
        return None
    return next((numbers * width for width in (4, 2, 1) if blocks // width == tokens // block), None)


def _facts(connection: Connection, settings: ServerSettings, where: str) -> ServerFacts:
    """Return a server's report of itself; an answer of unknown form becomes an error about the kind of server."""
    try:
        return KINDS[settings.api].facts(connection, settings, where)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{where}: {connection.url} does not answer as {settings.api} does: {type(error).__name__}: {error}; write "
            "the server's kind as api in the settings"
        ) from None


def check_slots(side: ServerSide, where: str) -> None:
    """Raise an error if a server has slots, but fewer than the two that a replicate needs for each side on it."""
    needed = _STREAMS * side.part[1]
    if 0 < side.server.slots < needed:
        floor = " of the reference, and two of the floor" if side.part[1] > 1 else ""
        raise InputError(
            f"{where}: {side.connection.url} has {side.server.slots} slots, and needs {needed}: a replicate has two "
            f"streams{floor}; start it with --parallel {max(2 * needed, 8)}"
        )


def check_same_model(action: str, reference: ServerSide, side: ServerSide) -> None:
    """Raise an error if the reference's server and that of ``side`` report different widths or numbers of weights."""
    for name, what in (("n_embd", "channels"), ("n_params", "weights")):
        ours, theirs = reference.reported.get(name), side.reported.get(name)
        if None not in (ours, theirs) and ours != theirs:
            raise InputError(
                f"action '{action}': the model at {side.connection.url} has {theirs:,} {what}, that of the reference "
                f"{ours:,}: it is another model, and its texts would diverge for that alone"
            )


_POSITIONS = 8


def position_cost(side: ServerSide, tokens: Sequence[int]) -> str:
    """Measure a server, and return in words the times to read the prompt ``tokens`` and for a position of a stream."""
    session, began = side.open(Room(0, 0, 0)), time.perf_counter()
    distribution = session.prefill(tokens)
    prompt_seconds = time.perf_counter() - began
    stream, received, began = session.fork(), side.connection.received, time.perf_counter()
    for _ in range(_POSITIONS):
        (distribution,) = session.step([stream], [int(distribution.argmax())])
    seconds = (time.perf_counter() - began) / _POSITIONS
    session.close()
    server, kib = side.server, (side.connection.received - received) / _POSITIONS / 1024
    slots = f", {server.slots} slots" if server.slots else ""
    version = next((str(server.reported[key]) for key in ("build_info", "version") if server.reported.get(key)), "")
    return (
        f"{side.connection.url} ({' '.join([str(server.reported['server']), version]).strip()}{slots}): "
        f"{1000 * prompt_seconds:,.1f} ms to read the prompt, and {1000 * seconds:,.1f} ms and {kib:,.1f} KiB a "
        "position of one stream"
    )


class ServerTokenizer:
    """The tokenizer of a llama-server, with the methods of transformers' tokenizers that documents use.

    ``vocabulary`` is the number of its tokens.
    """

    def __init__(self, connection: Connection, vocabulary: int) -> None:
        self._connection, self._vocabulary = connection, vocabulary
        properties = connection.ask("/props")
        self.chat_template: str | None = properties.get("chat_template") or None
        self._bos = str(properties.get("bos_token") or "")

    @functools.cached_property
    def bos_token_id(self) -> int | None:
        """The id of BOS; None if the server names no BOS, or one that is not a single token."""
        tokens = self(self._bos, add_special_tokens=False)["input_ids"] if self._bos else []
        return tokens[0] if len(tokens) == 1 else None

    @functools.cached_property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """The control tokens by id, in transformers' form: tokens that the server omits from its output."""
        tokens = all_tokens(self._connection, self._vocabulary)
        silent = sorted(entry["id"] for entry in tokens if not entry["token"] and not entry.get("bytes"))
        line = self("\n", add_special_tokens=False)["input_ids"]
        lines = [part for token in silent for part in (token, *line)]
        names = str(self._connection.ask("/detokenize", {"tokens": lines})["content"]).split("\n")
        named = zip(silent, map(str.strip, names[: len(silent)]), strict=True)
        return {token: AddedToken(name, special=True) for token, name in named if name}

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False, **_: bool
    ) -> Mapping[str, list[int]]:
        """Tokenize a text; the token ids are under ``input_ids``.

        Control tokens in the text are read as such, or with ``split_special_tokens`` like other text.
        """
        body = {"content": text, "add_special": add_special_tokens, "parse_special": not split_special_tokens}
        return {"input_ids": list(map(int, self._connection.ask("/tokenize", body)["tokens"]))}

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, add_generation_prompt: bool = False,
        tools: list[dict[str, Any]] | None = None, **variables: Any,
    ) -> str:  # fmt: skip
        """Write a conversation in the model's own form, by the server's template.

        The server leaves out the template's BOS if its tokenizer adds one; the returned text has BOS nevertheless.

        Raises:
            ValueError: The server does not write the conversation.
        """
        variables.pop("tokenize", None)
        body: dict[str, Any] = {"messages": conversation, "chat_template_kwargs": variables}
        body["add_generation_prompt"] = add_generation_prompt
        if tools is not None:
            body["tools"] = tools
        try:
            text = str(self._connection.ask("/apply-template", body)["prompt"])
        except KvdriftError as error:
            raise ValueError(str(error)) from None
        adds = self("", add_special_tokens=True)["input_ids"][:1] == [self.bos_token_id]
        return f"{self._bos}{text}" if adds and not text.startswith(self._bos) else text


def server_tokenizer(section: ModelSection) -> ServerTokenizer | None:
    """Return the tokenizer of a reference's server; None if the study file names another, or if the server has none.

    Only a llama-server has one here: it writes conversations without answering them, and tokenizes texts with and
    without control tokens.
    """
    if section.engine != HTTP or section.tokenizer is not None:
        return None
    settings = ServerSettings.of(section.settings or {}, "model.settings")
    if settings.api != LLAMA_SERVER:
        return None
    connection = Connection(section.url or "", Requests.of(section.requests or {}), LlamaServer.health)
    meta = (connection.optional_object("/v1/models").get("data") or [{}])[0].get("meta") or {}
    return ServerTokenizer(connection, settings.vocabulary or int(meta.get("n_vocab") or 0))
