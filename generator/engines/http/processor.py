"""The connection to ``kvdrift.vllm:Distributions`` inside a vLLM: messages, and the requests that they are about.

The protocol is described in ``kvdrift/vllm.py``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import queue
import re
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import httpx
import numpy as np

from kvdrift.generator.engines.http.connection import Connection, LostServerError
from kvdrift.schema.errors import InputError, OperationError

_LISTENS = re.compile(r"kvdrift\.vllm listens at (\S+?):(\d+)")
_ASKED: Final = "?"  # in place of a request: where the processor listens
_EVERYWHERE: Final = ("0.0.0.0", "127.0.0.1", "localhost", "::", "[::]")  # noqa: S104 - names of the server's own host
_CONNECT, _POLL = 10.0, 1.0  # seconds
_COMPLETIONS: Final = "/v1/completions"

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class ProcessorFacts:
    """What the processor reports about its server.

    Attributes:
        vocabulary: V, the number of tokens.
        sequences: The most requests in a step.
        budget: The most tokens in a step.
        block: The tokens of a block of the prefix cache; 0 without a prefix cache.
    """

    vocabulary: int
    sequences: int
    budget: int
    block: int


class ProcessorConnection:
    """A connection to the processor of a server that serves ``model`` with up to ``positions`` tokens.

    Raises:
        InputError: The server has no processor, or the processor cannot be reached.
        LostServerError: The server was gone, and is back.
    """

    def __init__(self, connection: Connection, model: str, positions: int) -> None:
        self._http, self._model, self._positions = connection, model, positions
        self._socket = self._connected()
        self._client = secrets.token_hex(8)
        self._groups = itertools.count(1)
        self._posts: dict[int, _Post] = {}
        self._messages: queue.SimpleQueue[tuple[dict[str, Any], bytes] | None] = queue.SimpleQueue()
        self.close = weakref.finalize(self, _close, self._socket)
        threading.Thread(target=_read, args=(self._socket, self._messages), daemon=True).start()
        self._write({"client": self._client})

    def gate(self, stop: int) -> tuple[int, ProcessorFacts]:
        """Make the engine wait until ``answer`` ends stream 0 of the gate: requests sent meanwhile begin in one step.

        Returns the number of the gate, which is a group, and the facts about the server.
        """
        gate = self._post([[0 if stop else 1]], [], stop, 1)
        while "gate" not in (message := self.receive(gate)[0]):
            pass
        return gate, ProcessorFacts(**message["gate"])

    def request(self, prompts: Sequence[Tokens], known: Sequence[Sequence[int]], stop: int) -> int:
        """Send requests that are decoded together, and return their group's number.

        Each has a prompt and the tokens that are appended to the prompt before the first answer. Token ``stop`` ends a
        request.
        """
        streams = [[_digest(prompt), tokens] for prompt, tokens in zip(prompts, known, strict=True)]
        room = self._positions - max(map(len, prompts))
        return self._post([list(prompt) for prompt in prompts], streams, stop, room)

    def answer(self, group: int, tokens: Mapping[int, int | None]) -> None:
        """Send the next tokens of streams of a group, by the stream's place in the group; None ends a stream.

        Raises:
            LostServerError: The server was gone, and is back; or its processor has closed the connection.
        """
        self._write({"group": group, "tokens": tokens})

    def receive(self, group: int) -> tuple[dict[str, Any], bytes]:
        """Return the next message about a group, and the bytes that follow the message.

        Raises:
            LostServerError: The connection or the server was gone, or the group's requests ended without a message.
            OperationError: Nothing came for as long as ``timeout`` under ``model.requests`` says.
        """
        began, post = time.monotonic(), self._posts[group]
        while True:
            over = post.done
            try:
                found = self._messages.get(timeout=_POLL)
            except queue.Empty:
                self._check(post, over=over, since=began)
                continue
            if found is None:
                self._http.check_alive()
                raise LostServerError
            if found[0].get("group") == group:
                self._http.received += len(found[1])
                return found

    def _check(self, post: _Post, *, over: bool, since: float) -> None:
        """Raise an error if the server will send no more messages about a group; ``over``: its requests have ended."""
        post.check()
        self._http.check_alive()
        if over:
            raise LostServerError
        if time.monotonic() - since > self._http.timeout:
            raise OperationError(
                f"{self._http.url}: no distribution for {self._http.timeout} s; write a longer timeout under "
                "model.requests"
            )

    def _post(self, prompts: Sequence[Sequence[int]], streams: Sequence[Any], stop: int, tokens: int) -> int:
        """Send the requests of a new group, each for up to ``tokens`` tokens, and return the group's number."""
        group = next(self._groups)
        asked = {"client": self._client, "group": group, "streams": streams, "stop": stop}
        body = _body(self._model, prompts, tokens, json.dumps(asked)) | {"stop_token_ids": [stop]}
        self._posts = {number: post for number, post in self._posts.items() if not post.done}
        self._posts[group] = _Post(self._http, body)
        return group

    def _connected(self) -> socket.socket:
        found = _LISTENS.search(self._http.optional(_COMPLETIONS, _body(self._model, [[1]], 1, _ASKED)).text)
        if found is None:
            raise InputError(
                f"{self._http.url}: the server has no processor of kvdrift: start it with --logits-processors "
                "kvdrift.vllm:Distributions, or leave processor out of the settings"
            )
        host = httpx.URL(self._http.url).host if found[1] in _EVERYWHERE else found[1]
        try:
            connected = socket.create_connection((host, int(found[2])), timeout=_CONNECT)
        except OSError as error:
            self._http.check_alive()
            raise InputError(
                f"{self._http.url}: its processor does not answer at {host}:{found[2]}: {error.strerror or error}; "
                "KVDRIFT_LISTEN of the server is where it listens"
            ) from None
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connected

    def _write(self, message: Mapping[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._http.check_alive()
            raise LostServerError from None


class _Post:
    """Requests under way, in a thread."""

    def __init__(self, connection: Connection, body: Mapping[str, Any]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._send, args=(connection, body), daemon=True)
        self._thread.start()

    def _send(self, connection: Connection, body: Mapping[str, Any]) -> None:
        try:
            connection.ask_once(_COMPLETIONS, body, waits=True)
        except BaseException as error:  # noqa: BLE001 - raised where the answer is awaited
            self._error = error

    @property
    def done(self) -> bool:
        """Whether the requests have ended."""
        return not self._thread.is_alive()

    def check(self) -> None:
        """Raise the error with which the requests ended, if any."""
        if self.done and self._error is not None:
            raise self._error


def _read(connected: socket.socket, messages: queue.SimpleQueue[tuple[dict[str, Any], bytes] | None]) -> None:
    """Put the messages of a connection into a queue, and None after the last one."""
    with suppress(OSError, ValueError, KeyError), connected.makefile("rb") as lines:
        while line := lines.readline():
            message = json.loads(line)
            content = lines.read(message["bytes"])
            if len(content) < message["bytes"]:
                break
            messages.put((message, content))
    messages.put(None)


def _close(connected: socket.socket) -> None:
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
    connected.close()


def _body(model: str, prompts: Sequence[Sequence[int]], tokens: int, asked: str) -> dict[str, Any]:
    """Return the body of requests that let a server append up to ``tokens`` tokens to each prompt."""
    return {
        "model": model, "prompt": prompts, "max_tokens": tokens, "temperature": 0.0, "repetition_penalty": 1.0,
        "ignore_eos": True, "vllm_xargs": {"kvdrift": asked},
    }  # fmt: skip


def _digest(tokens: Tokens) -> str:
    """Return the name of a prompt in messages, as the processor computes it: SHA-256 of its int64 ids."""
    return hashlib.sha256(np.asarray(tokens, dtype=np.int64).tobytes()).hexdigest()
