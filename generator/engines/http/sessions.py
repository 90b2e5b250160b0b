"""The streams of a side that is a server: in the slots of a llama-server, or as whole histories.

A slot is a cache, and each stream is decoded token by token in a slot of its own. If a slot has lost its content, it is
filled again in the same way as before: the prompt in one request, then every token in a request of its own. So a fork,
a restarted server, and more streams than slots cost requests and change nothing else. Every answer reports how many
tokens the server computed; more than one means that the token was not decoded from the cache.

Servers without slots, and greedy servers, get a stream's whole history with every request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvdrift.generator.engines.engine import Session
from kvdrift.generator.engines.http.apis import LlamaServer, ServerFacts
from kvdrift.generator.engines.http.connection import Connection, LostServerError
from kvdrift.schema.errors import OperationError

Tokens = tuple[int, ...]


class TokenStreams(Session):
    """Keeps the tokens of each open stream of a session, by stream number.

    ``read_back`` asks the server for its report, and raises an error if it is another server than before.
    ``entry_bytes`` are the bytes of a position in all layers; None if the server does not report what they follow from.
    """

    def __init__(
        self, connection: Connection, facts: ServerFacts, read_back: Callable[[], Mapping[str, Any]],
        entry_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self._connection, self._facts, self._read_back = connection, facts, read_back
        self._entry_bytes = entry_bytes
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

    def prompt_bytes(self) -> int | None:
        """Return the bytes of the prompt's entries; None if they are unknown."""
        return None if self._entry_bytes is None else self._entry_bytes * len(self._prompt)

    def close(self) -> None:
        """Forget the streams."""
        self._streams = {}


class DistributionSession(TokenStreams):
    """Streams that ask for every distribution with the whole history; ``distribution`` makes the request."""

    def __init__(
        self, connection: Connection, facts: ServerFacts, read_back: Callable[[], Mapping[str, Any]],
        distribution: Callable[[Tokens], NDArray[np.float32]], entry_bytes: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(connection, facts, read_back, entry_bytes)
        self._distribution = distribution

    def prefill(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Take a prompt in place of an earlier prompt and its streams; return the log-probabilities after it, [V]."""
        self._prompt, self._streams = tuple(tokens), {}
        return self._distribution(self._prompt)

    def step(self, streams: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append one token to each of some streams; return the logarithms of the next distributions, [streams, V]."""
        for stream, token in zip(streams, tokens, strict=True):
            self._streams[stream] = (*self._streams[stream], token)
        return np.stack(self._connection.at_once([self._streams[stream] for stream in streams], self._distribution))


class GreedySession(DistributionSession):
    """Greedy distributions: all probability is on the token that the server writes at temperature 0.

    In one request, which ``written`` makes, the server writes several tokens and says whether the text ended there.
    While a stream continues with the tokens that the server wrote, no further request is made. If it continues with
    another token, the server is asked for the tokens after that.
    """

    def __init__(
        self, connection: Connection, facts: ServerFacts, read_back: Callable[[], Mapping[str, Any]],
        written: Callable[[Tokens], tuple[list[int], bool]],
    ) -> None:  # fmt: skip
        super().__init__(connection, facts, read_back, self._greedy)
        self._write = written
        self._written: dict[Tokens, int] = {}  # the next token after each history of this prompt

    def prefill(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Take a prompt in place of an earlier one; return [V]: 1 for the token that the server writes next, else 0."""
        self._written = {}
        return super().prefill(tokens)

    def _greedy(self, history: Tokens) -> NDArray[np.float32]:
        if history not in self._written:
            tokens, ended = self._write(history)
            if ended and (not tokens or tokens[-1] not in self._facts.eos_tokens):
                tokens.append(self._facts.eos_tokens[0])  # servers leave out the token by which a text ends
            for place, token in enumerate(tokens):
                self._written[history + tuple(tokens[:place])] = token
        distribution = np.zeros(self._facts.vocabulary, dtype=np.float32)
        distribution[self._written[history]] = 1.0
        return distribution


_TRIES = 4  # of a step in a slot that loses its tokens


@dataclass
class _Slot:
    number: int
    held: Tokens = ()


class SlotSession(TokenStreams):
    """One prompt and its streams in the slots ``slots`` of a llama-server; a stream gets a slot at its next step."""

    def __init__(
        self, connection: Connection, facts: ServerFacts, read_back: Callable[[], Mapping[str, Any]],
        api: LlamaServer, slots: Sequence[int],
    ) -> None:  # fmt: skip
        super().__init__(connection, facts, read_back)
        self._api = api
        self._slots = [_Slot(number) for number in slots]

    def prefill(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Decode a prompt in the first slot; return the log-probabilities after the prompt, [V].

        Any other slot reads the prompt once a stream needs the slot.
        """
        self._prompt, self._streams = tuple(tokens), {}
        for slot in self._slots:
            slot.held = ()
        arguments = self._connection, self._slots[0].number, tokens, self._facts.vocabulary
        distribution, _ = self._connection.patiently(lambda: self._api.distribution(*arguments, cached=False))
        self._slots[0].held = self._prompt
        return distribution

    def step(self, streams: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append one token to each of some streams; return the logarithms of the next distributions, [streams, V]."""
        distributions = np.empty((len(streams), self._facts.vocabulary), dtype=np.float32)
        for start in range(0, len(streams), len(self._slots)):
            batch = list(streams[start : start + len(self._slots)])
            slots = self._placed(batch)
            for stream, slot in zip(batch, slots, strict=True):
                self._read_prompt(slot, self._streams[stream])

            def advance(row: int, batch: list[int] = batch, slots: list[_Slot] = slots, start: int = start) -> None:
                distributions[start + row] = self._advanced(slots[row], self._streams[batch[row]], tokens[start + row])

            self._connection.at_once(range(len(batch)), advance, len(self._slots))
            for row, stream in enumerate(batch):
                self._streams[stream] = slots[row].held
        return distributions

    def prompt_bytes(self) -> int | None:
        """Return the bytes of the first slot's saved state; None if the server saves none."""
        return self._api.slot_bytes(self._connection, self._slots[0].number)

    def _placed(self, streams: Sequence[int]) -> list[_Slot]:
        """Return a slot for each stream: its own, or else a slot that holds as much as possible of its history."""
        own = {id(slot.held): slot for slot in self._slots if slot.held}
        placed = {one: own.pop(id(self._streams[one])) for one in streams if id(self._streams[one]) in own}
        histories = {id(history) for history in self._streams.values()}
        free = [slot for slot in self._slots if slot not in placed.values()]
        for stream in streams:
            if stream not in placed:
                history = self._streams[stream]
                # A slot that another open stream is in is taken last.
                best = max(free, key=lambda slot: (id(slot.held) not in histories, _common(slot.held, history)))
                free.remove(best)
                placed[stream] = best
        return [placed[stream] for stream in streams]

    def _read_prompt(self, slot: _Slot, history: Tokens) -> None:
        """Make a slot read the prompt, with which ``history`` begins, unless the slot already holds it.

        ``step`` lets one slot read after the other, so that no two share a batch.
        """
        if _common(slot.held, history) < len(self._prompt):
            arguments = self._connection, slot.number, self._prompt
            self._connection.patiently(lambda: self._api.take(*arguments, cached=False))
            slot.held = self._prompt

    def _advanced(self, slot: _Slot, history: Tokens, token: int) -> NDArray[np.float32]:
        """Return the distribution after a history and a token; the slot then holds both."""
        for _ in range(_TRIES):
            try:
                self._read_prompt(slot, history)
                if self._replayed(slot, history):
                    distribution, computed = self._api.distribution(
                        self._connection, slot.number, [*history, token], self._facts.vocabulary
                    )
                    if computed == 1:
                        slot.held = (*history, token)
                        return distribution
            except LostServerError:
                pass
            slot.held = ()
        raise OperationError(
            f"{self._connection.url}: slot {slot.number} does not keep its tokens: another client uses "
            "the server, or it reassigns idle slots; start it for kvdrift alone, with --no-cache-idle-slots"
        )

    def _replayed(self, slot: _Slot, history: Tokens) -> bool:
        """Extend a slot's content to ``history``, token by token; return whether the slot kept its earlier tokens."""
        for length in range(max(_common(slot.held, history), len(self._prompt)), len(history)):
            if self._api.take(self._connection, slot.number, history[: length + 1], cached=True) != 1:
                return False
        return True


def _common(held: Tokens, history: Tokens) -> int:
    """Return the number of tokens with which both histories begin."""
    if held is history:
        return len(held)
    shared = min(len(held), len(history))
    if held[:shared] == history[:shared]:
        return shared
    return next(place for place in range(shared) if held[place] != history[place])
