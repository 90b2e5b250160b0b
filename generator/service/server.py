"""The server side: admits callers, checks requests, and lets one at a time have the model.

Requests are answered by threads of Flight's; the model belongs to the thread that calls ``GenerationService.run``. A
request waits in a queue between the two, and what becomes of it goes back through a queue of its own.
"""

from __future__ import annotations

import hmac
import logging
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import flight

from generator.generation import generate_units
from generator.service.protocol import (
    FAILED,
    GENERATING,
    HEARTBEAT_SECONDS,
    IDENTITY,
    REFUSED,
    UNAVAILABLE,
    WAITING,
    GenerationRequest,
    Identity,
    Problem,
    ProblemKind,
    State,
    StreamMetadata,
    plain_record,
)
from generator.transformer.model import LoadedModel
from schema.errors import InputError, KvdriftError
from schema.store.store import Unit
from schema.tables import EVENTS

log = logging.getLogger("kvdrift.serve")

_MAX_WAITING = 64
_BATCH_ROWS = 2**16
_SERVED = (
    flight.FlightMethod.DO_GET,
    flight.FlightMethod.DO_ACTION,
    flight.FlightMethod.LIST_ACTIONS,
    flight.FlightMethod.LIST_FLIGHTS,
)
_GATE = "gate"


class _Admission(flight.ServerMiddleware):  # type: ignore[misc]  # pyarrow is untyped
    """What the gate found of one call: why it is not admitted, or None."""

    def __init__(self, problem: str | None) -> None:
        self.problem = problem


class _Gate(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Looks at every call, and at its ``authorization`` header, before its handler does."""

    def __init__(self, token: str | None) -> None:
        self._expected = None if token is None else f"Bearer {token}".encode()

    def start_call(self, info: flight.CallInfo, headers: Mapping[str, Sequence[str]]) -> _Admission:
        """Refuse what is not served, before a caller can hold it open; of other calls only note what is wrong.

        Their handlers refuse them: they know the caller's address, which Flight does not tell here.
        """
        if info.method not in _SERVED:
            raise _refusal("not part of this service", info.method.name.lower(), "a caller")
        problem = None
        if self._expected is not None:
            given = [value.encode() for value in headers.get("authorization", ())]
            if not given:
                problem = "a token is required: kvdrift run --token-file FILE"
            elif not hmac.compare_digest(given[0], self._expected):
                problem = "the token is wrong"
        return _Admission(problem)


def _admitted(handler: Callable[..., Any]) -> Callable[..., Any]:
    """A handler that only admitted callers reach, and whose every failure is one logged line and one Flight error."""

    @wraps(handler)
    def call(self: GenerationService, context: flight.ServerCallContext, *arguments: Any) -> Any:
        what, peer = handler.__name__, unquote(context.peer())
        if (problem := context.get_middleware(_GATE).problem) is not None:
            raise _refusal(problem, what, peer, flight.FlightUnauthenticatedError)
        try:
            return handler(self, context, *arguments)
        except InputError as error:
            raise _refusal(str(error), what, peer) from None
        except Exception as error:  # noqa: BLE001 - a service outlives whatever a request brings about
            raise _failure(error, what, peer) from None

    return call


class _Request:
    """An admitted request on its way: its messages are states, units, and in the end an error or None."""

    def __init__(self, request: GenerationRequest, peer: str) -> None:
        self.document, self.pending = request.work()
        self.study, self.horizon, self.seed = request.study, request.horizon, request.seed
        self.peer = peer
        self.abandoned = threading.Event()
        self.messages: queue.SimpleQueue[State | Unit | flight.FlightError | None] = queue.SimpleQueue()

    def generate(self, model: LoadedModel) -> None:
        """Generate the units, and say so in messages."""
        self.messages.put(GENERATING)
        end: flight.FlightError | None = None
        try:
            units = generate_units(model, self.study, self.document, self.pending, self.horizon, self.seed)
        except InputError as error:
            end = _refusal(str(error), "do_get", self.peer)
        except Exception as error:  # noqa: BLE001 - as for handlers
            end = _failure(error, "do_get", self.peer)
        else:
            for unit in units:
                self.messages.put(unit)
        self.messages.put(end)


class GenerationService(flight.FlightServerBase):  # type: ignore[misc]
    """Serves one model; listens as soon as it is made, and generates while some thread is in ``run``.

    Args:
        model: the model, as ``load_model`` gives it.
        identity: what clients are told of it.
        location: Flight URI to listen on, such as grpc://127.0.0.1:0, port 0 being any free one.
        token: what callers must present as ``authorization: Bearer TOKEN``; None admits everyone.
        certificate: PEM of a certificate chain and of its key, for a ``grpc+tls`` location.
        max_request_bytes: longest ticket that is looked at.

    Raises:
        OSError or pa.ArrowException: the location cannot be listened on, or the certificate is not one.

    """

    def __init__(
        self,
        model: LoadedModel,
        identity: Identity,
        location: str,
        *,
        token: str | None,
        certificate: tuple[bytes, bytes] | None,
        max_request_bytes: int,
    ) -> None:
        self._model, self._identity = model, identity
        self._vocabulary = int(model.network.config.vocab_size)
        self._max_request_bytes = max_request_bytes
        self._waiting: queue.Queue[_Request] = queue.Queue(_MAX_WAITING)
        self._stopping = threading.Event()
        super().__init__(
            location,
            tls_certificates=None if certificate is None else [certificate],
            middleware={_GATE: _Gate(token)},
        )

    def run(self) -> None:
        """Generate what is asked for until the calling thread is interrupted."""
        while True:
            request = self._waiting.get()
            if not request.abandoned.is_set():
                request.generate(self._model)

    def close(self) -> None:
        """End every stream and stop listening; call it when ``run`` has ended."""
        self._stopping.set()
        self.shutdown()

    @_admitted
    def list_actions(self, _context: flight.ServerCallContext) -> list[tuple[str, str]]:
        """The one action of the service."""
        return [(IDENTITY, "what is served, as JSON: model, revision, dtype, device, weights, versions")]

    @_admitted
    def do_action(self, _context: flight.ServerCallContext, action: flight.Action) -> list[bytes]:
        """``identity``, without a body."""
        if action.type != IDENTITY:
            raise InputError(f"no action {action.type!r}; known: {IDENTITY}")
        if action.body is not None and action.body.size:
            raise InputError(f"action {IDENTITY}: takes no body")
        return [self._identity.encoded()]

    @_admitted
    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.FlightDataStream:
        """Events of the units that the ticket, a ``GenerationRequest``, asks for."""
        if len(ticket.ticket) > self._max_request_bytes:
            raise InputError(f"a request of {len(ticket.ticket)} bytes, at most {self._max_request_bytes} are taken")
        asked = GenerationRequest.decoded(ticket.ticket)
        asked.check(self._identity, self._vocabulary)
        stream = self._stream(_Request(asked, unquote(context.peer())), context.is_cancelled)
        return flight.GeneratorStream(EVENTS.schema, stream, options=pa.ipc.IpcWriteOptions(compression="zstd"))

    @_admitted
    def list_flights(self, _context: flight.ServerCallContext, _criteria: bytes) -> list[Any]:
        """None: what can be had is made when it is asked for."""
        return []

    def _stream(self, request: _Request, is_cancelled: Callable[[], bool]) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        """Batches of the request's units, and empty ones while there is nothing else to say."""
        nothing = pa.RecordBatch.from_pylist([], schema=EVENTS.schema)
        state: State = WAITING
        try:
            try:
                self._waiting.put_nowait(request)
            except queue.Full:
                raise _unavailable(f"{_MAX_WAITING} requests are waiting") from None
            while True:
                try:
                    message = request.messages.get(timeout=HEARTBEAT_SECONDS)
                except queue.Empty:
                    message = state
                if self._stopping.is_set():
                    raise _unavailable("the service is stopping")
                if message is None or is_cancelled():
                    return
                if isinstance(message, flight.FlightError):
                    raise message
                if isinstance(message, Unit):
                    yield from _batches(message)
                else:
                    state = message
                    yield nothing, StreamMetadata(state=state).encoded()
        finally:
            request.abandoned.set()


def _batches(unit: Unit) -> Iterator[tuple[pa.RecordBatch, bytes]]:
    batches = unit.events.combine_chunks().to_batches(max_chunksize=_BATCH_ROWS)
    for batch in batches[:-1]:
        yield batch, StreamMetadata(state=GENERATING).encoded()
    yield batches[-1], StreamMetadata(state=GENERATING, unit=plain_record(unit.record)).encoded()


def _refusal(
    line: str, what: str, peer: str, kind: Callable[..., flight.FlightError] = flight.FlightServerError
) -> flight.FlightError:
    """The error for a caller's mistake, and a line in the log."""
    log.warning("refused %s from %s: %s", what, peer, _one_line(line))
    return _error(kind, REFUSED, line)


def _failure(error: Exception, what: str, peer: str) -> flight.FlightError:
    """The error for work that failed here, and a line in the log."""
    line = str(error) if isinstance(error, KvdriftError) else f"{type(error).__name__}: {error}"
    log.error("failed %s from %s: %s", what, peer, _one_line(line))
    return _error(flight.FlightServerError, FAILED, line)


def _unavailable(line: str) -> flight.FlightError:
    return _error(flight.FlightUnavailableError, UNAVAILABLE, line)


def _error(kind: Callable[..., flight.FlightError], what: ProblemKind, line: str) -> flight.FlightError:
    line = _one_line(line)
    return kind(line, extra_info=Problem(kind=what, line=line).encoded())


def _one_line(text: str) -> str:
    """Callers' text as one line that cannot pass for another: no control characters, and not endless."""
    line = re.sub(r"[^\x20-\x7e\u00a1-\ud7ff\ue000-\uffff]+", " ", text)
    return line if len(line) <= 300 else line[:299] + "…"
