"""The client side of one endpoint: its address, its identity, and one request after another."""

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

from generator.service.protocol import (
    FAILED,
    IDENTITY,
    REFUSED,
    UNAVAILABLE,
    GenerationRequest,
    Identity,
    Problem,
    StreamMetadata,
)
from schema.errors import InputError, KvdriftError, OperationError
from schema.store.store import Unit
from schema.tables import EVENTS

TLS_SCHEME = "grpc+tls"
SCHEMES = ("grpc", TLS_SCHEME)

_FLIGHT_ERRORS = (flight.FlightError, pa.ArrowException, OSError)


class EndpointLost(OperationError):  # noqa: N818 - what happened, as errors of this kind are told apart by it
    """An endpoint does not answer, or not as a service of this protocol does: another one can do the work."""


class WorkFailed(OperationError):  # noqa: N818 - as above
    """An endpoint answered that the work failed there."""


def is_loopback(host: str) -> bool:
    """Whether ``host`` names this machine to itself alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Call:
    """One request under way, as another thread sees it: when it was last heard of, and how to end it."""

    def __init__(self) -> None:
        self.heard = time.monotonic()
        self._lock = threading.Lock()
        self._end: Callable[[], None] | None = None
        self._cancelled = False

    def opened(self, end: Callable[[], None]) -> None:
        """The answer begins; ``end`` breaks it off."""
        with self._lock:
            self._end = end
        self.sign_of_life()
        if self._cancelled:
            end()

    def sign_of_life(self) -> None:
        """Something came."""
        self.heard = time.monotonic()

    def cancel(self) -> None:
        """Break it off, now or as soon as it begins."""
        with self._lock:
            self._cancelled, end = True, self._end
        if end is not None:
            end()


@dataclass(frozen=True)
class Endpoint:
    """One endpoint of the service.

    ``location`` is grpc://HOST:PORT or grpc+tls://HOST:PORT, ``token`` what it wants to see, ``root_certificates`` the
    PEM of those that vouch for it (None: those of the system), and ``timeout`` the seconds after which silence means
    that it hangs.
    """

    location: str
    token: str | None = None
    root_certificates: bytes | None = None
    timeout: float = 60.0

    def __post_init__(self) -> None:
        """InputError for what is no endpoint, and where the token would be sent in the clear over a network."""
        where = f"endpoint '{self.location}'"
        try:
            parts = urlsplit(self.location)
            complete = bool(parts.hostname and parts.port) and not (parts.path or parts.query or parts.username)
        except ValueError:
            complete = False
        if not complete or parts.scheme not in SCHEMES:
            raise InputError(f"{where}: write grpc://HOST:PORT, or grpc+tls://HOST:PORT for a service with TLS")
        if self.token is not None and parts.scheme != TLS_SCHEME and not is_loopback(str(parts.hostname)):
            raise InputError(f"{where}: would send the token unencrypted over the network; use grpc+tls://")

    def identity(self) -> Identity:
        """What it serves; InputError where it refuses the caller, EndpointLost where there is no answer in time."""
        try:
            with self._connection() as client:
                answers = list(client.do_action(flight.Action(IDENTITY, b""), self._options(self.timeout)))
        except _FLIGHT_ERRORS as error:
            raise self._said(error) from None
        try:
            return Identity.decoded(answers[0].body.to_pybytes())
        except (InputError, IndexError):
            raise EndpointLost(f"endpoint {self.location}: does not answer as this version of kvdrift") from None

    def generate(self, request: GenerationRequest, call: Call) -> list[Unit]:
        """The units that the request asks for, all of them.

        InputError where the endpoint refuses the request, WorkFailed where it could not do the work, EndpointLost where
        it went away or where ``call`` was cancelled: whoever holds it decides for how long to wait.
        """
        try:
            with self._connection() as client:
                reader = client.do_get(flight.Ticket(request.encoded()), self._options(None))
                call.opened(reader.cancel)
                units = self._read(reader, call)
        except _FLIGHT_ERRORS as error:
            raise self._said(error) from None
        asked = request.asked()
        said = [{name: unit.record.get(name) for name in asked[0]} for unit in units]
        if sorted(map(str, asked)) != sorted(map(str, said)):
            raise EndpointLost(
                f"endpoint {self.location}: sent {len(said)} units that are not the {len(asked)} asked for"
            )
        return units

    def _read(self, reader: Any, call: Call) -> list[Unit]:
        units: list[Unit] = []
        batches: list[pa.RecordBatch] = []
        if not reader.schema.equals(EVENTS.schema):
            raise EndpointLost(f"endpoint {self.location}: sends other columns than those of an event")
        for batch, metadata in reader:
            call.sign_of_life()
            try:
                said = StreamMetadata.decoded(metadata.to_pybytes())
            except (InputError, AttributeError):
                raise EndpointLost(f"endpoint {self.location}: does not answer as this version of kvdrift") from None
            if batch.num_rows:
                batches.append(batch)
            if said.unit is not None:
                units.append(Unit(said.unit, pa.Table.from_batches(batches, schema=EVENTS.schema)))
                batches = []
        return units

    def _connection(self) -> flight.FlightClient:
        """A connection of its own.

        Where the other machine does not even answer pings, a call that cannot be cancelled ends by itself: later than
        it was given up, so that no thread waits for ever.
        """
        pings = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
        options = [("grpc.use_local_subchannel_pool", 1), *((name, round(self.timeout * 2000)) for name in pings)]
        return flight.FlightClient(self.location, tls_root_certs=self.root_certificates, generic_options=options)

    def _options(self, timeout: float | None) -> flight.FlightCallOptions:
        headers = [] if self.token is None else [(b"authorization", f"Bearer {self.token}".encode())]
        return flight.FlightCallOptions(timeout=timeout, headers=headers)

    def _said(self, error: Exception) -> KvdriftError:
        """The error for what Flight raised: what the service says of it, else the part of the text for people."""
        try:
            problem = Problem.model_validate_json(getattr(error, "extra_info", b""))
        except ValidationError:
            return EndpointLost(f"endpoint {self.location}: no answer ({self._why(str(error))})")
        kinds: dict[str, type[KvdriftError]] = {REFUSED: InputError, FAILED: WorkFailed, UNAVAILABLE: EndpointLost}
        return kinds[problem.kind](f"endpoint {self.location}: {problem.line}")

    def _why(self, text: str) -> str:
        """What gRPC says of a call that came to nothing, without what only its developers read."""
        text = (text.partition("with message: ")[2] or text).partition(". gRPC client debug context")[0]
        reason = re.sub(r"^[A-Z_]+: ", "", text.rpartition("last error: ")[2])
        if "failed to connect" in text and "Socket closed" in text and not self.location.startswith(TLS_SCHEME):
            reason += "; a service with TLS is grpc+tls://HOST:PORT"
        return " ".join(reason.split())[:300]
