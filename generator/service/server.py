"""The server side: check requests, and give the model to one request at a time.

Flight answers requests in its own threads, and the model belongs to the thread that calls ``GenerationService.run``.
Requests pass from Flight's threads to that thread in a queue, and each request's results come back in a queue of its
own.

Importing a module runs its code. A request may name kvdrift's own selectors, codecs and policies, and those of entry
points, since whoever installed their distribution chose them. Other modules must be named on the service's command
line.

Every failed call is one logged line and one Flight error. A call costs memory before anybody can check it: gRPC
receives its message, which Arrow allows to be of any length, before it calls ``Gate``, and pyarrow has no option for
gRPC's limits. So a service with TLS recognizes its callers in the handshake (``token_certificate``).
"""

from __future__ import annotations

import hmac
import json
import logging
import queue
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import flight

from kvdrift.generator.actions import build_action
from kvdrift.generator.codecs import CODECS
from kvdrift.generator.codecs.generated import GeneratedEntries
from kvdrift.generator.generation import PendingUnit, StoppedError, StudySampling, generate_units
from kvdrift.generator.generation.units import versions_on
from kvdrift.generator.identity import NUMERICS_VERSION, parts_sha256, source_of
from kvdrift.generator.selectors import SELECTORS
from kvdrift.generator.selectors.custom.loading import load_module
from kvdrift.generator.selectors.kvpress import PREFIX
from kvdrift.generator.selectors.policies import POLICIES
from kvdrift.generator.service.credentials import token_certificate
from kvdrift.generator.service.protocol import (
    HEARTBEAT_SECONDS,
    IDENTITY_ACTION,
    PROTOCOL,
    ErrorKind,
    ErrorMessage,
    GenerationRequest,
    Identity,
    KeptMessage,
    PendingMessage,
    StreamMetadata,
)
from kvdrift.generator.transformer.decoder import is_device_lost
from kvdrift.generator.transformer.loading import LoadedModel
from kvdrift.log.store import Unit
from kvdrift.schema.document import Document
from kvdrift.schema.errors import InputError, KvdriftError, OperationError, first_line
from kvdrift.schema.tables import EVENTS, SCHEMA_VERSION

log = logging.getLogger("kvdrift.serve")

MOST_CALLS = 64
"""The most calls at once, including calls that wait for the model."""

_FOLDERS_OF_A_PATH = re.compile(r"(?<![\w/.…])/(?!/)(?:[^\s/'\",;()]+/)+")
_SERVED = ("DO_GET", "DO_ACTION")


class _Admission(flight.ServerMiddleware):  # type: ignore[misc]  # pyarrow is untyped
    """A call under way, which is counted until its end."""

    def __init__(self, free: threading.Semaphore) -> None:
        self._free = free

    def call_completed(self, _exception: Exception | None) -> None:
        self._free.release()


class Gate(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Checks every call and its ``authorization`` header before its handler runs.

    Callers must send ``token`` as ``authorization: Bearer TOKEN``; if it is None, everyone is admitted.
    """

    def __init__(self, token: str | None) -> None:
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._free = threading.BoundedSemaphore(MOST_CALLS)

    def start_call(self, info: flight.CallInfo, headers: Mapping[str, Sequence[str]]) -> _Admission:
        """Admit a call and count it until its end.

        Refused are a method that is not served, a wrong token, and more than ``MOST_CALLS`` calls at once.
        """
        method = info.method.name
        if method not in _SERVED:
            raise refusal("this method is not part of the service", method.lower(), "a caller")
        if (reason := self._reason(headers.get("authorization", ()))) is not None:
            raise refusal(reason, method.lower(), "a caller", flight.FlightUnauthenticatedError)
        if not self._free.acquire(blocking=False):
            raise unavailability(f"{MOST_CALLS} calls are under way, the most that the service takes")
        return _Admission(self._free)

    def _reason(self, tokens: Sequence[str]) -> str | None:
        """Return why a call with these ``authorization`` headers is refused; None if it is admitted."""
        if self._expected is None:
            return None
        if not tokens:
            return "a token is required: kvdrift run --token-file FILE"
        return None if hmac.compare_digest(tokens[0].encode(), self._expected) else "the token is wrong"


def answered(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a handler so that its errors are logged with the caller's address, and become Flight errors."""

    @wraps(handler)
    def call(self: Any, context: flight.ServerCallContext, *arguments: Any) -> Any:
        method, peer = handler.__name__, unquote(context.peer())
        try:
            return handler(self, context, *arguments)
        except InputError as error:
            raise refusal(str(error), method, peer) from None
        except Exception as error:  # noqa: BLE001 - a service outlives any error of a request
            raise failure(error, method, peer) from None

    return call


def refusal(
    line: str, method: str, peer: str, kind: Callable[..., flight.FlightError] = flight.FlightServerError
) -> flight.FlightError:
    """Log a caller's mistake and return its Flight error."""
    log.warning("refused %s from %s: %s", method, peer, _one_line(line))
    return _flight_error(kind, ErrorKind.REFUSED, line)


def failure(error: Exception, method: str, peer: str) -> flight.FlightError:
    """Log work that failed in the service and return its Flight error."""
    line = str(error) if isinstance(error, KvdriftError) else f"{type(error).__name__}: {error}"
    log.error("failed %s from %s: %s", method, peer, _one_line(line))
    return _flight_error(flight.FlightServerError, ErrorKind.FAILED, line)


def unavailability(line: str) -> flight.FlightError:
    """Return the Flight error of a service that cannot take a request now."""
    return _flight_error(flight.FlightUnavailableError, ErrorKind.UNAVAILABLE, line)


def _flight_error(flight_kind: Callable[..., flight.FlightError], kind: ErrorKind, line: str) -> flight.FlightError:
    line = _one_line(_without_folders(line))
    return flight_kind(line, extra_info=ErrorMessage(kind=kind, line=line).encoded())


def _without_folders(line: str) -> str:
    """Return a line without the folders of paths, for callers; the log keeps the whole paths."""
    known = {*sys.path, sys.prefix, str(Path.home()), str(Path.cwd()), tempfile.gettempdir()} - {"", "/"}
    for folder in sorted(known, key=len, reverse=True):  # those with spaces in their names, too
        line = line.replace(f"{folder.rstrip('/')}/", "…/")
    return _FOLDERS_OF_A_PATH.sub("…/", line)


def _one_line(text: str) -> str:
    """Return a caller's text as one short line without control characters, safe for the log."""
    line = re.sub(r"[^\x20-\x7e\u00a1-\ud7ff\ue000-\uffff]+", " ", text)
    return line if len(line) <= 300 else line[:299] + "…"


_BATCH_ROWS = 2**16
_OPTION = "--allow-module"


class GenerationService(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow is untyped
    """Serves one model; listens from the beginning, and generates while a thread is in ``run``.

    Args:
        location: The Flight URI to listen on, such as grpc://127.0.0.1:0; port 0 is any free port.
        token: The token that callers must send as ``authorization: Bearer TOKEN``; None admits everyone.
        certificate: PEM of a certificate chain and of its key, for a ``grpc+tls`` location.
        max_request_bytes: The longest ticket that is read.
        allowed: The modules that a ticket may name, besides the package's names and entry points.

    Raises:
        OSError: The location cannot be listened on, or the certificate is invalid.
    """

    def __init__(
        self, model: LoadedModel, identity: Identity, location: str, *, token: str | None,
        certificate: tuple[bytes, bytes] | None, max_request_bytes: int, allowed: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._model, self._identity = model, identity
        self._max_request_bytes = max_request_bytes
        self._allowed = allowed
        self._waiting: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._under_way: _Request | None = None
        self._stopping = threading.Event()
        known = None if token is None or certificate is None else token_certificate(token).certificate
        try:
            super().__init__(
                location, tls_certificates=certificate and [certificate], verify_client=known is not None,
                root_certificates=known, middleware={"gate": Gate(token)},
            )  # fmt: skip
        except pa.ArrowException as error:  # of which only some are an OSError
            raise OSError(str(error)) from error

    def run(self) -> None:
        """Generate the requested units until the calling thread is interrupted; abandoned requests end unfinished."""
        (model,) = self._model.twins(1, self._go_on)
        while True:
            self._under_way = self._waiting.get()
            self._under_way.generate(model)

    def _go_on(self) -> None:
        """Raise an error if nobody waits for the work any more; called before each forward pass of the model."""
        if self._under_way is not None and self._under_way.abandoned.is_set():
            raise StoppedError

    def close(self) -> None:
        """End every stream and stop listening; call it after ``run`` has ended."""
        self._stopping.set()
        self.shutdown()

    @answered
    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.FlightDataStream:
        """Stream the events of the units that the ticket, a ``GenerationRequest``, asks for."""
        sent, most = ticket.ticket, self._max_request_bytes
        if len(sent) > most:
            raise InputError(f"the request has {len(sent)} bytes, more than --max-request-bytes {most}")
        request = GenerationRequest.decoded(sent)
        request.check(self._identity)
        stream = self._stream(_Request(request, unquote(context.peer()), self._allowed), context.is_cancelled)
        return flight.GeneratorStream(EVENTS.schema, stream, options=pa.ipc.IpcWriteOptions(compression="zstd"))

    @answered
    def do_action(self, _context: flight.ServerCallContext, action: flight.Action) -> list[bytes]:
        """Answer ``identity``, which takes no body."""
        if action.type != IDENTITY_ACTION:
            raise InputError(f"unknown action {action.type!r}; the only one is {IDENTITY_ACTION}")
        if action.body is not None and action.body.size:
            raise InputError(f"action {IDENTITY_ACTION}: takes no body")
        return [self._identity.encoded()]

    def _stream(self, request: _Request, is_cancelled: Callable[[], bool]) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        """Yield the batches of the request's units, and an empty batch whenever nothing else was sent for a second."""
        nothing = pa.RecordBatch.from_pylist([], schema=EVENTS.schema)
        try:
            self._waiting.put(request)
            while True:
                try:
                    message = request.messages.get(timeout=HEARTBEAT_SECONDS)
                except queue.Empty:
                    message = nothing
                if isinstance(message, flight.FlightError):
                    raise message
                if self._stopping.is_set():
                    raise request.error() or unavailability("the service is stopping")
                if message is None or is_cancelled():
                    return
                if isinstance(message, Unit):
                    yield from _batches(message)
                else:
                    yield message, StreamMetadata().encoded()
        finally:
            request.abandoned.set()


class _Request:
    """An admitted request. Its messages are units, and at the end an error or None."""

    def __init__(self, request: GenerationRequest, peer: str, allowed: Collection[str]) -> None:
        self.document, self.pending = requested_work(request, allowed)
        self.request, self.peer = request, peer
        self.abandoned = threading.Event()
        self.messages: queue.SimpleQueue[Unit | flight.FlightError | None] = queue.SimpleQueue()

    def error(self) -> flight.FlightError | None:
        """Return the first error among the waiting messages, or None; remove the messages up to it.

        The error may be the reason why the service stops.
        """
        while True:
            try:
                message = self.messages.get_nowait()
            except queue.Empty:
                return None
            if isinstance(message, flight.FlightError):
                return message

    def generate(self, model: LoadedModel) -> None:
        """Generate the units and put them into ``messages``, unless nobody waits for them.

        Raises:
            OperationError: The device of the model is lost, so that the service must end.
        """
        if self.abandoned.is_set():
            return
        lost: str | None = None
        request, files = self.request, replace(model.files, tokenizer_sha256=self.request.tokenizer)
        study_model = replace(
            model,
            files=files,
            logits_dtype=request.logits_dtype,
            sampling=request.sampling,
            eos_tokens=tuple(request.eos_tokens),
        )
        try:
            units = generate_units(
                study_model, request.study, self.document, self.pending, request.horizon, request.seed
            )
        except StoppedError:
            return
        except InputError as error:
            self.messages.put(refusal(str(error), "do_get", self.peer))
        except Exception as error:  # noqa: BLE001 - a service outlives any error of a request but those of its device
            self.messages.put(failure(error, "do_get", self.peer))
            lost = first_line(error) if is_device_lost(error) else None
        else:
            for unit in units:
                self.messages.put(unit)
            self.messages.put(None)
        if lost is not None:
            raise OperationError(f"device '{model.device}' computes nothing more: {lost}; start the service again")


def requested_work(request: GenerationRequest, allowed: Collection[str]) -> tuple[Document, list[PendingUnit]]:
    """Return the request's document and pending units; the request may name only ``allowed`` modules."""
    check_modules(request.pending, allowed)
    pending = [
        PendingUnit(
            build_action(item.action),
            item.first,
            item.count,
            item.estimator,
            item.revision,
            None if item.of is None else StudySampling(item.of.study, item.of.sampling),
        )
        for item in request.pending
    ]
    for number, (item, requested) in enumerate(zip(pending, request.pending, strict=True)):
        served = parts_sha256(item.action.parts)
        if served != requested.selector_sha256:
            raise InputError(
                f"pending.{number}.selector_sha256: requested {requested.selector_sha256[:12]!r}, but "
                f"{served[:12]!r} is served; the source of {item.action.words} differs here: restart the "
                "service with the same source"
            )
    return request.document.document, pending


def _batches(unit: Unit) -> Iterator[tuple[pa.RecordBatch, bytes]]:
    """Yield a unit's events in batches; the metadata of the last batch has the unit's record."""
    batches = unit.events.combine_chunks().to_batches(max_chunksize=_BATCH_ROWS)
    for batch in batches[:-1]:
        yield batch, StreamMetadata().encoded()
    record = json.loads(json.dumps(unit.record, default=lambda value: value.item()))  # numpy's numbers, exactly
    kept = [KeptMessage.of(cache) for cache in unit.kept]
    yield batches[-1], StreamMetadata(unit=record, kept=kept).encoded()


def load_modules(names: Iterable[str]) -> frozenset[str]:
    """Import the modules that ``--allow-module`` names, so that errors show before the service begins."""
    allowed = frozenset(names)
    for name in sorted(allowed):
        where = f"{_OPTION} '{name}'"
        if not all(part.isidentifier() for part in name.split(".")):
            raise InputError(f"{where}: is no module's name; write my_selectors for the module of my_selectors:MyClass")
        load_module(name, None, where)
    return allowed


def check_modules(pending: Collection[PendingMessage], allowed: Collection[str]) -> None:
    """Refuse a request that names a module which is not allowed."""
    for number, item in enumerate(pending):
        halves = item.action.codec_halves or {}
        codecs = [half["name"] for half in halves.values()] if halves else [item.action.codec_name]
        parts = [
            ("selector", item.action.selector), *(("codec", name) for name in codecs),
            ("policy", item.action.policy_name),
        ]  # fmt: skip
        for key, name in parts:
            module, colon, _ = (name or "").partition(":")
            if colon and module + colon != PREFIX and module not in allowed:
                raise InputError(
                    f"pending.{number}.action.{key}: the service may not import module '{module}'; to allow a "
                    f"module that you trust, start the service with {_OPTION} {module}"
                )


def identity_of(model: LoadedModel, revision: str | None) -> Identity:
    """Return the identity of a model that was loaded at ``revision``.

    The source of every selector, codec and policy is read now, since a service continues with the loaded code even if
    the files change.
    """
    if model.files.weights_sha256 is None:
        raise InputError(f"model.id = '{model.id}': the files of its weights, which a checksum needs, were not found")
    for kind in (*SELECTORS.values(), *CODECS.values(), *POLICIES.values(), GeneratedEntries):
        source_of(kind)
    return Identity(
        protocol=PROTOCOL, schema_version=SCHEMA_VERSION, numerics=NUMERICS_VERSION, model=model.id,
        device=model.device, dtype=model.dtype, revision=revision, positions=model.positions,
        weights=model.files.weights_sha256, eos_tokens=list(model.eos_tokens),
        vocabulary=model.shape.vocabulary, versions=versions_on(model.device),
    )  # fmt: skip
