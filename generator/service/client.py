"""The client side of one endpoint: its address, its identity and its answers."""

from __future__ import annotations

import ipaddress
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import flight
from pydantic import ValidationError

from kvdrift.generator.service.credentials import token_certificate
from kvdrift.generator.service.protocol import (
    IDENTITY_ACTION,
    LENGTH_HEADER,
    ErrorKind,
    ErrorMessage,
    GenerationRequest,
    Identity,
    StreamMetadata,
)
from kvdrift.log.store import Unit
from kvdrift.schema.errors import InputError, KvdriftError, OperationError
from kvdrift.schema.tables import EVENTS

TLS_SCHEME = "grpc+tls"
SCHEMES = ("grpc", TLS_SCHEME)

_FLIGHT_ERRORS = (flight.FlightError, pa.ArrowException, OSError)


class EndpointLost(OperationError):  # noqa: N818 - says what happened
    """An endpoint does not answer, or answers by another protocol; it may do the work later."""


class WorkFailed(OperationError):  # noqa: N818 - says what happened
    """An endpoint answered that the work failed there."""


_ERRORS: dict[ErrorKind, type[KvdriftError]] = {
    ErrorKind.REFUSED: InputError,
    ErrorKind.FAILED: WorkFailed,
    ErrorKind.UNAVAILABLE: EndpointLost,
}


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Call:
    """A request under way, watched by another thread: the time of its last sign of life, and a way to cancel it."""

    def __init__(self) -> None:
        self.heard = time.monotonic()
        self._lock = threading.Lock()
        self._end: Callable[[], None] | None = None
        self._cancelled = False

    def opened(self, end: Callable[[], None]) -> None:
        """Record that the answer begins; ``end`` cancels it."""
        with self._lock:
            self._end = end
        self.sign_of_life()
        if self._cancelled:
            end()

    def sign_of_life(self) -> None:
        """Record that data arrived."""
        self.heard = time.monotonic()

    def cancel(self) -> None:
        """Cancel the request, now or as soon as its answer begins."""
        with self._lock:
            self._cancelled, end = True, self._end
        if end is not None:
            end()


@dataclass(frozen=True)
class ServiceAddress:
    """One endpoint of the service, and how to reach it."""

    location: str  # grpc://HOST:PORT or grpc+tls://HOST:PORT
    token: str | None = None  # the token that the endpoint requires, or None
    root_certificates: bytes | None = None  # PEM of the certificates to trust; None trusts those of the system
    timeout: float = 60.0  # seconds without a sign of life after which the endpoint counts as hanging

    def __post_init__(self) -> None:
        where = f"endpoint '{self.location}'"
        try:
            parts = urlsplit(self.location)
            complete = bool(parts.hostname and parts.port) and not (parts.path or parts.query or parts.username)
        except ValueError:
            complete = False
        if not complete or parts.scheme not in SCHEMES:
            raise InputError(f"{where}: write grpc://HOST:PORT, or grpc+tls://HOST:PORT for a service with TLS")
        if self.token is not None and parts.scheme != TLS_SCHEME and not is_loopback(str(parts.hostname)):
            raise InputError(f"{where}: the token would cross the network unencrypted; use grpc+tls://")

    def identity(self) -> Identity:
        """Ask the endpoint which model it serves.

        Raises:
            InputError: The endpoint refuses the caller.
            EndpointLost: No answer came in time, or the answer was not one of this protocol.
        """
        try:
            with self._connection() as client:
                answers = list(client.do_action(flight.Action(IDENTITY_ACTION, b""), self._options(self.timeout)))
        except _FLIGHT_ERRORS as error:
            raise self._error(error) from None
        try:
            return Identity.decoded(answers[0].body.to_pybytes())
        except (InputError, IndexError):
            raise self._other_version() from None

    def generate(self, request: GenerationRequest, call: Call) -> list[Unit]:
        """Ask for units, and return all of them.

        ``call`` records each answer of the endpoint; the owner of the call decides how long to wait, and may cancel.

        Raises:
            InputError: The endpoint refuses the request.
            WorkFailed: The endpoint could not do the work.
            EndpointLost: The endpoint went away, sent something else, or the call was cancelled.
        """
        try:
            with self._connection() as client:
                ticket = request.encoded()
                reader = client.do_get(flight.Ticket(ticket), self._options(None, len(ticket)))
                call.opened(reader.cancel)
                units = self._read(reader, call)
        except _FLIGHT_ERRORS as error:
            raise self._error(error) from None
        expected = request.expected_records()
        sent = [{name: unit.record.get(name) for name in expected[0]} for unit in units]
        if sorted(map(str, expected)) != sorted(map(str, sent)):
            raise EndpointLost(
                f"endpoint {self.location}: sent {len(sent)} units that are not the {len(expected)} asked for"
            )
        return units

    def _read(self, reader: Any, call: Call) -> list[Unit]:
        units: list[Unit] = []
        batches: list[pa.RecordBatch] = []
        if not reader.schema.equals(EVENTS.schema):
            raise EndpointLost(f"endpoint {self.location}: the columns that it sends are not those of an event")
        for batch, metadata in reader:
            call.sign_of_life()
            try:
                stated = StreamMetadata.decoded(metadata.to_pybytes())
            except (InputError, AttributeError):
                raise self._other_version() from None
            if batch.num_rows:
                batches.append(batch)
            if stated.unit is not None:
                kept = [message.kept for message in stated.kept]
                units.append(Unit(stated.unit, pa.Table.from_batches(batches, schema=EVENTS.schema), kept))
                batches = []
        return units

    def _connection(self) -> flight.FlightClient:
        """Open a new connection.

        A call to a machine that does not even answer pings cannot be cancelled. The keepalive options end such a call
        after twice the timeout, so that no thread waits for ever.
        """
        pings = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
        options = [("grpc.use_local_subchannel_pool", 1), *((name, round(self.timeout * 2000)) for name in pings)]
        shown = {}
        if self.token is not None and self.location.startswith(TLS_SCHEME):
            own = token_certificate(self.token)
            shown = {"cert_chain": own.certificate, "private_key": own.key}
        return flight.FlightClient(
            self.location, tls_root_certs=self.root_certificates, generic_options=options, **shown
        )

    def _options(self, timeout: float | None, ticket_bytes: int = 0) -> flight.FlightCallOptions:
        headers = [(LENGTH_HEADER.encode(), str(ticket_bytes).encode())]
        if self.token is not None:
            headers.append((b"authorization", f"Bearer {self.token}".encode()))
        return flight.FlightCallOptions(timeout=timeout, headers=headers)

    def _error(self, error: Exception) -> KvdriftError:
        """Return the error for an exception of Flight: the service's message, or else gRPC's reason."""
        try:
            message = ErrorMessage.model_validate_json(getattr(error, "extra_info", b""))
        except ValidationError:
            return EndpointLost(f"endpoint {self.location}: no answer ({self._reason(str(error))})")
        return _ERRORS[message.kind](f"endpoint {self.location}: {message.line}")

    def _other_version(self) -> EndpointLost:
        return EndpointLost(f"endpoint {self.location}: its answer is not one of this version of kvdrift")

    def _handshake_hint(self) -> str:
        """Return a hint why a service may end a connection at once, since gRPC does not say."""
        if not self.location.startswith(TLS_SCHEME):
            return "a service with TLS is grpc+tls://HOST:PORT"
        return "a service with a token wants --token-file" if self.token is None else "is the token the same there?"

    def _reason(self, text: str) -> str:
        """Return the reason of a failed call, from gRPC's text without the parts for its developers."""
        text = (text.partition("with message: ")[2] or text).partition(". gRPC client debug context")[0]
        reason = re.sub(r"^[A-Z_]+: ", "", text.rpartition("last error: ")[2])
        if "failed to connect" in text and re.search("Socket closed|Connection reset", text):
            reason += f"; {self._handshake_hint()}"
        return " ".join(reason.split())[:300]
