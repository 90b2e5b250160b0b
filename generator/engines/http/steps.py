"""The streams of a vLLM that has ``kvdrift.vllm:Distributions``: its own decoding steps, all streams in one batch.

All sessions of one server share a ``StepServer``. While the streams that get a token are those that the server decodes,
each token is one more step of the server. In any other case, and after any loss, the server's requests are ended, and
each stream goes on in a new request with its whole history, most of which the server's prefix cache holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvdrift.generator.engines.http.apis import ServerFacts
from kvdrift.generator.engines.http.connection import Connection, LostServerError
from kvdrift.generator.engines.http.processor import ProcessorConnection, ProcessorFacts
from kvdrift.generator.engines.http.sessions import Tokens, TokenStreams
from kvdrift.schema.errors import OperationError

_SETTLE, _LONGEST_SETTLE = 0.02, 0.2  # seconds for requests to reach the engine while a gate holds it
_STARTS: Final = 50  # in a row that gave no distribution

Row = NDArray[np.float32]


class _Stream:
    """A stream of a session, by identity."""


@dataclass(eq=False)
class _Wanted:
    """A stream that gets a token, or a prompt if ``token`` is None; ``row`` is its next distribution."""

    history: Tokens
    token: int | None
    row: Row | None = None

    def request(self, stop: int, longest: int) -> tuple[Tokens, list[int]]:
        """Return the prompt of a request, of up to ``longest`` tokens if possible, and the tokens to append to it.

        An appended ``stop`` would end the request: the prompt has the history up to the last one.
        """
        if self.token is None:
            return self.history, []
        if self.token == stop:
            return (*self.history, self.token), []
        last = max((place for place, token in enumerate(self.history) if token == stop), default=-1)
        cut = min(max(longest, last + 1), len(self.history))
        return self.history[:cut], [*self.history[cut:], self.token]


class StepServer:
    """A server whose processor hands over the distributions of its decoding steps.

    ``peers`` are all such servers of a study: when the result of one is awaited, all get what is wanted of them, so
    that they decode at the same time. ``stop`` is a token after which no text goes on.
    """

    def __init__(self, connection: Connection, model: str, positions: int, peers: list[StepServer]) -> None:
        self._http, self._served, self._peers = connection, (model, positions), peers
        self.stop = 0
        self._processor: ProcessorConnection | None = None
        self._group, self._streams = 0, list[_Stream]()  # the last start
        self._live: dict[_Stream, int] = {}  # streams that the server decodes, with their places in the group
        self._queue: dict[_Stream, _Wanted] = {}
        self._sent: dict[_Stream, _Wanted] = {}
        self._lost = set[_Stream]()  # streams of the last start whose requests the server ended without a distribution
        self._settle, self._starts = _SETTLE, 0
        self.facts: ProcessorFacts
        peers.append(self)
        self._patiently(self._report)

    def prompt(self, tokens: Tokens) -> Row:
        """Return the log-probabilities after a prompt, float32 [V]."""
        stream = _Stream()
        self._queue[stream] = _Wanted(tokens, None)
        return self.result(stream)

    def append(self, stream: _Stream, history: Tokens, token: int) -> None:
        """Append a token to a stream; ``result`` returns what follows. ``history`` is without the token."""
        self._queue[stream] = _Wanted(history, token)
        if self._queue.keys() == self._live.keys():
            self.send()

    def send(self) -> None:
        """Send what is wanted of the server: as answers if the server decodes just these streams, else as a start."""
        if not self._queue:
            return
        same = self._queue.keys() == self._live.keys() and all(one.token != self.stop for one in self._queue.values())
        answers = {self._live[stream]: one.token for stream, one in self._queue.items()} if same else {}
        self._sent.update(self._queue)
        self._queue = {}
        if same and self._processor is not None:
            with suppress(LostServerError):
                self._processor.answer(self._group, answers)
                return
            self._lose()
        self._patiently(self._start)

    def result(self, stream: _Stream) -> Row:
        """Return the log-probabilities after a stream's last token, float32 [V]."""
        for server in self._peers:
            server.send()
        while (row := self._sent[stream].row) is None:
            try:
                self._receive()
            except LostServerError:
                self._lose()
                self._patiently(self._start)
        del self._sent[stream]
        return row

    def end(self, streams: Sequence[_Stream]) -> None:
        """End the requests of some streams."""
        ended = {self._live.pop(stream) for stream in streams if stream in self._live}
        if ended and self._processor is not None:
            try:
                self._processor.answer(self._group, dict.fromkeys(ended))
            except LostServerError:
                self._lose()

    def _patiently(self, starts: Callable[[ProcessorConnection], None]) -> None:
        """Call a function that sends requests, again if the server is lost meanwhile."""
        while self._starts < _STARTS:
            self._starts += 1
            try:
                if self._processor is None:
                    self._processor = ProcessorConnection(self._http, *self._served)
                return starts(self._processor)
            except LostServerError:
                self._lose()
        raise OperationError(
            f"{self._http.url}: {_STARTS} starts of requests in a row gave no distribution; the server's log may state "
            "the reason"
        )

    def _report(self, processor: ProcessorConnection) -> None:
        gate, self.facts = processor.gate(self.stop)
        processor.answer(gate, {0: None})

    def _start(self, processor: ProcessorConnection) -> None:
        """Decode all streams that wait for a distribution in new requests, which begin in the same step.

        Streams that wait for a token hold the engine meanwhile, or else a gate does.
        """
        holding = (self._group, dict.fromkeys(self._live.values()))
        if not self._live:
            gate, self.facts = processor.gate(self.stop)
            holding = gate, {0: None}
        wanted = self._wanted
        share, block = max(1, self.facts.budget // len(wanted)), self.facts.block
        requests = []
        for one in wanted.values():
            cached = (len(one.history) - 1) // block * block if block else 0
            requests.append(one.request(self.stop, cached + share))
        prompts, known = [prompt for prompt, _ in requests], [tokens for _, tokens in requests]
        self._live, self._lost, self._streams = {}, set(), list(wanted)
        self._group = processor.request(prompts, known, self.stop)
        time.sleep(self._settle)
        processor.answer(*holding)

    @property
    def _wanted(self) -> dict[_Stream, _Wanted]:
        return {stream: one for stream, one in self._sent.items() if one.row is None}

    def _receive(self) -> None:
        """Take the next message of the present group; start the lost streams again once no other stream is awaited."""
        if self._processor is None:
            raise LostServerError
        message, content = self._processor.receive(self._group)
        if lost := message.get("lost"):
            streams = [self._streams[number] for number in lost]
            self._lost.update(streams)
            self._forget(streams)
        else:
            self._take(message, content)
        if (wanted := self._wanted) and wanted.keys() <= self._lost:
            self._patiently(self._start)

    def _take(self, message: Mapping[str, Any], content: bytes) -> None:
        self._starts = 0
        rows = np.frombuffer(content, dtype=np.float32).reshape(len(message["streams"]), -1)
        streams = [self._streams[number] for number in message["streams"]]
        for stream, row in zip(streams, rows, strict=True):
            if stream in self._sent:
                self._sent[stream].row = row
        if message["live"]:
            self._live.update(zip(streams, message["streams"], strict=True))
            return
        self._forget(streams)
        if any(one.token is not None for one in self._sent.values()):
            self._settle = min(2 * self._settle, _LONGEST_SETTLE)

    def _forget(self, streams: Sequence[_Stream]) -> None:
        for stream in streams:
            self._live.pop(stream, None)

    def _lose(self) -> None:
        if self._processor is not None:
            self._processor.close()
        self._processor, self._live = None, {}


class StepSession(TokenStreams):
    """One prompt and its streams on a server, decoded in its own steps."""

    def __init__(
        self, connection: Connection, facts: ServerFacts, read_back: Callable[[], Mapping[str, Any]],
        server: StepServer, entry_bytes: int | None,
    ) -> None:  # fmt: skip
        super().__init__(connection, facts, read_back, entry_bytes)
        self._server = server
        server.stop = facts.eos_tokens[0] if facts.eos_tokens else facts.vocabulary - 1
        self._handles: dict[int, _Stream] = {}

    def prefill(self, tokens: Sequence[int]) -> Row:
        """Take a prompt in place of an earlier prompt and its streams; return the log-probabilities after it, [V]."""
        self.close()
        self._prompt = tuple(tokens)
        return self._server.prompt(self._prompt)

    def begin(self, streams: Sequence[int], tokens: Sequence[int]) -> Callable[[], Row]:
        """Append one token to each of some streams; return a function that waits for the logarithms, [streams, V]."""
        handles = [self._handles.setdefault(stream, _Stream()) for stream in streams]
        for stream, handle, token in zip(streams, handles, tokens, strict=True):
            history = self._streams[stream]
            self._streams[stream] = (*history, token)
            self._server.append(handle, history, token)
        return lambda: np.stack([self._server.result(handle) for handle in handles])

    def step(self, streams: Sequence[int], tokens: Sequence[int]) -> Row:
        """Append one token to each of some streams; return the logarithms of the next distributions, [streams, V]."""
        return self.begin(streams, tokens)()

    def drop(self, stream: int) -> None:
        """Close a stream."""
        super().drop(stream)
        if (handle := self._handles.pop(stream, None)) is not None:
            self._server.end([handle])

    def close(self) -> None:
        """Close all streams."""
        self._server.end(list(self._handles.values()))
        self._handles = {}
        super().close()
