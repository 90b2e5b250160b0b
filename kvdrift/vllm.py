"""A logits processor of vLLM that hands next-token distributions to kvdrift, and appends the tokens that it answers.

Start the server with ``--logits-processors kvdrift.vllm:Distributions``. This module is all that kvdrift needs there:
in the server's environment ``pip install --no-deps kvdrift`` is enough. It belongs to vLLM's V1 model runner and to a
server of one worker.

The worker listens at ``KVDRIFT_LISTEN`` (HOST:PORT, 127.0.0.1:8790 by default). A message is a line of JSON; those with
"bytes" are followed by that many bytes. kvdrift names itself, {"client": NAME}, and then sends requests over HTTP that
have its NAME, the number of a group, and the group's streams. Each request of a group decodes one stream. The worker
sends the distributions of all streams of the group after every step, and waits for a token for each. A stream whose
group is not complete in a step is sent and ended: kvdrift goes on with its whole history in a new request.

Nothing waits for ever. A client that is gone, or silent for ``KVDRIFT_WAIT`` seconds (60 by default), is dropped, and
its requests end. A client whose connection is closed asks again.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

KEY = "kvdrift"  # under vllm_xargs of a request
ASKED = "?"  # its value in a request that asks where the worker listens
_ACCEPT, _CONNECTED = 5.0, 0.05  # seconds: for all connections that came, for the next one: a client connects first
_LINE, _GROUPS = 1 << 24, 8
_GATE = -1  # in place of a stream's number


def _listens_at() -> tuple[str, int]:
    host, _, port = os.environ.get("KVDRIFT_LISTEN", "127.0.0.1:8790").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"KVDRIFT_LISTEN = {os.environ['KVDRIFT_LISTEN']!r}: write HOST:PORT, such as 127.0.0.1:8790")
    return host, int(port)


def prompt_digest(tokens: Sequence[int]) -> str:
    """Return the name by which a request's stream is found: SHA-256 of its prompt's token ids."""
    return hashlib.sha256(np.asarray(tokens, dtype=np.int64).tobytes()).hexdigest()


class _ClientGoneError(Exception):
    """A client closed its connection, or was silent for too long."""


class _Client:
    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._lines = connection, connection.makefile("rb")
        self.groups: dict[int, _Group] = {}

    def receive(self, seconds: float) -> dict[str, Any]:
        """Return the next message, which must come within some seconds."""
        try:
            self._socket.settimeout(max(seconds, 0.001))
            message = json.loads(self._lines.readline(_LINE))
        except (OSError, ValueError):
            raise _ClientGoneError from None
        if not isinstance(message, dict):
            raise _ClientGoneError
        return message

    def send(self, message: dict[str, Any], content: bytes, seconds: float) -> None:
        """Send a message and the bytes that follow it."""
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(json.dumps(message).encode() + b"\n" + content)
        except OSError:
            raise _ClientGoneError from None

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@dataclass(eq=False)
class _Group:
    """Streams that are decoded in the same steps; ``free`` has the numbers of those without a request, by prompt."""

    number: int
    client: _Client | None
    known: list[list[int]]  # of each stream: the tokens to append before kvdrift is asked for the next
    free: dict[str, list[int]]
    stop: int  # the token that ends a request
    ended: set[int] = field(default_factory=set)
    tokens: dict[int, int | None] = field(default_factory=dict)  # answers: the next token of a stream, or None to end

    @property
    def waiting(self) -> int:
        """How many streams of the group wait for kvdrift's tokens once they have appended what is known."""
        return sum(bool(known) for stream, known in enumerate(self.known) if stream not in self.ended)


@dataclass(eq=False)
class _Row:
    """A request of kvdrift in the batch: stream ``stream`` of a group, or ``_GATE`` of a group without streams."""

    group: _Group
    stream: int
    digest: str
    output: list[int]  # the tokens appended so far; the engine extends the list
    resumed: bool  # its entries were discarded: a step may decode a part of its tokens
    first: np.ndarray | None = None  # log-probabilities [V] after the last part of the prompt that was read

    @property
    def ended(self) -> bool:
        return self.stream in self.group.ended


class Distributions(LogitsProcessor):  # type: ignore[misc]
    """Hands float32 log-probabilities of all V tokens to kvdrift, and forces the tokens that kvdrift answers.

    Requests without ``kvdrift`` under ``vllm_xargs`` are not touched. The logarithms are those of the model's own
    logits: before penalties, temperature, top-k and top-p.
    """

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Check the request's value for kvdrift, in the server's front end.

        Raises:
            ValueError: The value has another form, or asks where the worker listens, which the message says.
        """
        value = (sampling_params.extra_args or {}).get(KEY)
        if value == ASKED:
            host, port = _listens_at()
            raise ValueError(f"kvdrift.vllm listens at {host}:{port}")
        if value is not None:
            try:
                request = json.loads(value)
                _group_of(request, None)
                str(request["client"])
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"vllm_xargs.{KEY}: no request of kvdrift: {type(error).__name__}: {error}") from None

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:  # noqa: ARG002 - vLLM's
        parallel = vllm_config.parallel_config
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if (size := getattr(parallel, name, 1)) > 1:
                raise ValueError(f"kvdrift.vllm: {name} is {size}: distributions are handed over by a single worker")
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        self._facts = {
            "vocabulary": vllm_config.model_config.get_vocab_size(),
            "sequences": scheduler.max_num_seqs, "budget": scheduler.max_num_batched_tokens,
            "block": cache.block_size if cache.enable_prefix_caching else 0,
        }  # fmt: skip
        self._seconds = float(os.environ.get("KVDRIFT_WAIT", "60"))
        host, port = _listens_at()
        try:
            self._listener = socket.create_server((host, port), backlog=16)
        except OSError as error:
            raise ValueError(f"KVDRIFT_LISTEN: {host}:{port}: {error.strerror}; each server needs its own") from None
        self._clients: dict[str, _Client] = {}
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """Return False: the processor decides which token is taken."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow kvdrift's requests through the rows of the batch."""
        if batch_update is None:
            return
        for place in batch_update.removed:
            self._leave(place)
        for place, params, prompt, output in batch_update.added:
            self._leave(place)
            value = (params.extra_args or {}).get(KEY)
            if value is not None:
                self._rows[place] = self._joined(json.loads(value), prompt or [], output)
        for first, second, direction in batch_update.moved:
            one, other = self._rows.pop(first, None), self._rows.pop(second, None)
            if one is not None:
                self._rows[second] = one
            if other is not None and direction == MoveDirectionality.SWAP:
                self._rows[first] = other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Send the distributions of kvdrift's rows, and force the tokens that it answers; logits [rows, V]."""
        if not self._rows:
            return logits
        forced: dict[int, int] = {}
        steps: dict[_Group, list[int]] = defaultdict(list)
        for place, row in self._rows.items():
            group, appended = row.group, len(row.output)
            forced[place] = group.stop
            if row.ended or not group.known:
                continue
            known = group.known[row.stream]
            if appended == 0:  # the logits may be those after a part of the prompt: the last ones count
                row.first = None if known else _logarithms(logits[place : place + 1])[0]
                forced[place] = known[0] if known else int(group.stop == 0)
            elif row.resumed or not known or appended >= len(known):
                steps[group].append(place)
            else:
                forced[place] = known[appended]
        for row in self._rows.values():
            if not row.group.known and not row.ended:
                self._guarded(row.group, partial(self._hold, row.group))
        for group, places in steps.items():
            self._guarded(group, partial(self._step, group, places, logits, forced))
        logits[list(forced)] = -torch.inf
        logits[list(forced), list(forced.values())] = 0.0
        return logits

    def _step(self, group: _Group, places: list[int], logits: torch.Tensor, forced: dict[int, int]) -> None:
        """Send what the rows ``places`` of a group have, and put the tokens to append into ``forced``."""
        rows = {place: self._rows[place] for place in places}
        lost = [row.stream for row in rows.values() if row.resumed]
        read = [row for row in rows.values() if not row.resumed and not group.known[row.stream]]
        decoded = {place: row for place, row in rows.items() if not row.resumed and group.known[row.stream]}
        live = len(decoded) == group.waiting
        group.ended.update(lost, (row.stream for row in read), () if live else (r.stream for r in decoded.values()))
        if lost:
            self._send(group, {"lost": lost})
        if read:
            first = np.stack([row.first for row in read if row.first is not None])
            self._send(group, {"streams": [row.stream for row in read], "live": False}, first)
        if decoded:
            streams = [row.stream for row in decoded.values()]
            self._send(group, {"streams": streams, "live": live}, _logarithms(logits[list(decoded)]))
        if live:
            for place, row in decoded.items():
                token = self._token(group, row.stream)
                if token is None or token == group.stop:
                    group.ended.add(row.stream)
                else:
                    forced[place] = token

    def _hold(self, group: _Group) -> None:
        """Make the engine wait at a gate until kvdrift answers: requests that come meanwhile begin in one step."""
        group.ended.add(_GATE)
        self._send(group, {"gate": self._facts})
        self._token(group, 0)

    def _token(self, group: _Group, stream: int) -> int | None:
        """Wait for kvdrift's next token of a stream, and return the token; None ends the stream."""
        deadline = time.monotonic() + self._seconds
        while stream not in group.tokens:
            if group.client is None:
                raise _ClientGoneError
            message = group.client.receive(deadline - time.monotonic())
            answered = group.client.groups.get(message["group"])
            for number, token in message["tokens"].items():
                if token is not None and not 0 <= token < self._facts["vocabulary"]:
                    raise _ClientGoneError
                if answered is not None:
                    answered.tokens[int(number)] = token
        return group.tokens.pop(stream)

    def _send(self, group: _Group, message: dict[str, Any], rows: np.ndarray | None = None) -> None:
        if group.client is None:
            raise _ClientGoneError
        content = b"" if rows is None else rows.tobytes()
        group.client.send({"group": group.number, **message, "bytes": len(content)}, content, self._seconds)

    def _guarded(self, group: _Group, action: Callable[[], None]) -> None:
        """Do something with a group's client; if the client is gone, or writes another form, end all its streams."""
        try:
            action()
        except (_ClientGoneError, AttributeError, KeyError, TypeError, ValueError):
            client = group.client
            self._clients = {name: known for name, known in self._clients.items() if known is not client}
            if client is not None:
                client.close()
            for row in self._rows.values():
                if row.group.client is client:
                    row.group.ended.update(range(_GATE, len(row.group.known)))
                    row.group.client = None

    def _joined(self, request: dict[str, Any], prompt: Sequence[int], output: list[int]) -> _Row:
        """Return the row of a request that joins the batch."""
        client = self._client(request["client"])
        group = client.groups.get(request["group"]) if client else None
        if group is None:
            group = _group_of(request, client)
            if client is not None:
                client.groups[group.number] = group
                for old in sorted(client.groups)[:-_GROUPS]:
                    del client.groups[old]
        digest = prompt_digest(prompt)
        free = group.free.get(digest)
        stream = free.pop(0) if free else _GATE
        if client is None or (group.known and stream == _GATE):
            group.ended.add(stream)
        return _Row(group, stream, digest, output, resumed=bool(output))

    def _leave(self, place: int) -> None:
        """Forget a row; its stream can join again if it has not ended."""
        row = self._rows.pop(place, None)
        if row is not None and row.stream != _GATE and not row.ended:
            row.group.free[row.digest].insert(0, row.stream)

    def _client(self, name: str) -> _Client | None:
        """Return the client of a name, which has connected before its requests; None if there is none."""
        deadline = time.monotonic() + _ACCEPT
        while name not in self._clients:
            self._listener.settimeout(_CONNECTED)
            try:
                client = _Client(self._listener.accept()[0])
            except OSError:
                return None
            try:
                self._clients[str(client.receive(min(1.0, deadline - time.monotonic())).get("client"))] = client
            except _ClientGoneError:
                client.close()
        return self._clients[name]


def _group_of(request: dict[str, Any], client: _Client | None) -> _Group:
    """Return the group that a request describes: its streams' prompts and known tokens, or none for a gate."""
    free: dict[str, list[int]] = defaultdict(list)
    known = []
    for stream, (digest, tokens) in enumerate(request.get("streams", [])):
        free[str(digest)].append(stream)
        known.append([int(token) for token in tokens])
    return _Group(int(request["group"]), client, known, free, int(request["stop"]))


def _logarithms(logits: torch.Tensor) -> np.ndarray:
    """Return log-probabilities of logits, float32 [rows, V], on the host."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32).cpu().numpy()
