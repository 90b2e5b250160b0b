"""The client of one endpoint: its address, its answers, and generation that goes on when a lost endpoint is back.

An endpoint may die, hang or fail for a while without loss of work. A thread requests one document at a time, and the
thread that consumes the units watches the request. The next document is requested before the consumer stores the
previous one. A lost endpoint is tried again after ever longer pauses.
"""

from __future__ import annotations

import ipaddress
import re
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import flight
from pydantic import ValidationError

from kvdrift.generator.identity import NUMERICS_VERSION, ActionIdentity, GpuKinds, ModelIdentity
from kvdrift.generator.service.credentials import token_certificate
from kvdrift.generator.service.protocol import (
    IDENTITY_ACTION,
    MAX_EVENTS,
    PROTOCOL,
    ErrorKind,
    ErrorMessage,
    GenerationRequest,
    Identity,
    StreamMetadata,
)
from kvdrift.generator.transformer.files.fingerprints import tokenizer_sha256
from kvdrift.generator.transformer.files.locations import model_location
from kvdrift.generator.transformer.files.text_ends import joined_ends
from kvdrift.log.store import Unit
from kvdrift.schema.document import Document
from kvdrift.schema.errors import InputError, KvdriftError, NobodyLeftError, OperationError
from kvdrift.schema.study import TRANSFORMER, Study
from kvdrift.schema.tables import EVENTS, SCHEMA_VERSION

if TYPE_CHECKING:
    from kvdrift.generator.actions import Action
    from kvdrift.generator.generation import PendingUnit, Work

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
    """Return whether only this machine reaches ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Call:
    """A request under way, watched by another thread: its last sign of life, its outcome, and a way to cancel it."""

    def __init__(self) -> None:
        self.heard = time.monotonic()
        self.outcome: Future[list[Unit]] = Future()
        self._lock = threading.Lock()
        self._end: Callable[[], None] | None = None
        self._cancelled = False

    def opened(self, end: Callable[[], None]) -> None:
        """Record that the answer begins; ``end`` cancels the request."""
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
            EndpointLost: The endpoint went away or sent other units than requested, or the call was cancelled.
        """
        try:
            with self._connection() as client:
                reader = client.do_get(flight.Ticket(request.encoded()), self._options(None))
                call.opened(reader.cancel)
                units = self._read(reader, call)
        except _FLIGHT_ERRORS as error:
            raise self._error(error) from None
        expected = request.expected_records()
        sent = [{name: unit.record.get(name) for name in expected[0]} for unit in units]
        if sorted(map(str, expected)) != sorted(map(str, sent)):
            raise EndpointLost(
                f"endpoint {self.location}: sent {len(sent)} units that are not the {len(expected)} requested"
            )
        return units

    def _read(self, reader: Any, call: Call) -> list[Unit]:
        units: list[Unit] = []
        batches: list[pa.RecordBatch] = []
        if not reader.schema.equals(EVENTS.schema):
            raise EndpointLost(
                f"endpoint {self.location}: its answer does not have the columns of events; both ends need the same "
                "version of kvdrift"
            )
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
            certificate = token_certificate(self.token)
            shown = {"cert_chain": certificate.certificate, "private_key": certificate.key}
        return flight.FlightClient(
            self.location, tls_root_certs=self.root_certificates, generic_options=options, **shown
        )

    def _options(self, timeout: float | None) -> flight.FlightCallOptions:
        headers = [] if self.token is None else [(b"authorization", f"Bearer {self.token}".encode())]
        return flight.FlightCallOptions(timeout=timeout, headers=headers)

    def _error(self, error: Exception) -> KvdriftError:
        """Return the error for an exception of Flight: the service's message, or else gRPC's reason."""
        try:
            message = ErrorMessage.model_validate_json(getattr(error, "extra_info", b""))
        except ValidationError:
            return EndpointLost(f"endpoint {self.location}: no answer ({self._reason(str(error))})")
        return _ERRORS[message.kind](f"endpoint {self.location}: {message.line}")

    def _other_version(self) -> EndpointLost:
        return EndpointLost(
            f"endpoint {self.location}: its answer cannot be read; both ends need the same version of kvdrift"
        )

    def _handshake_hint(self) -> str:
        """Return a hint why a service may have ended a connection at once; gRPC reports no reason."""
        if not self.location.startswith(TLS_SCHEME):
            return "if the service has TLS, write grpc+tls://HOST:PORT"
        return "it may need a token: --token-file FILE" if self.token is None else "does it have the same token?"

    def _reason(self, text: str) -> str:
        """Return the reason of a failed call, from gRPC's text without the parts for its developers."""
        text = (text.partition("with message: ")[2] or text).partition(". gRPC client debug context")[0]
        reason = re.sub(r"^[A-Z_]+: ", "", text.rpartition("last error: ")[2])
        if "failed to connect" in text and re.search("Socket closed|Connection reset", text):
            reason += f"; {self._handshake_hint()}"
        return " ".join(reason.split())[:300]


_LOSSES = 5  # in a row: then the endpoint counts as gone
_LOOK_SECONDS = 0.2
_VERSIONS = {"protocol": PROTOCOL, "schema_version": SCHEMA_VERSION, "numerics": NUMERICS_VERSION}

Units = Sequence["PendingUnit"]


class RemoteGenerator:
    """Generates, at an endpoint, the units of a study file's studies: of one model, at one or several temperatures.

    ``say`` is called with a line when the endpoint is lost and when it is back. ``pause`` is the number of seconds
    until a lost endpoint is tried again for the first time.
    """

    def __init__(
        self, address: ServiceAddress, studies: Sequence[Study], say: Callable[[str], None], pause: float = 1.0
    ) -> None:
        self._address, self._study, self._say, self._pause = address, studies[0], say, pause
        self._models = dict.fromkeys(study.model.id for study in studies)
        self._where = f"endpoint {address.location}"
        self._identity: Identity | None = None  # None until the endpoint was asked
        self._weights: str | None = None
        self._gpus: GpuKinds | None = None  # of the study's units
        self._told_gpu = False
        self._losses = 0  # in a row
        self._call: Call | None = None  # the request under way

    def check(self, made_on: GpuKinds | None = None) -> None:
        """Ask the endpoint for its identity, unless it was asked before, and check the identity.

        ``made_on`` are the GPU models that made the studies' units so far.

        Raises:
            InputError: The studies cannot use one service, or the endpoint refuses the caller or serves something else.
            OperationError: The endpoint does not answer.
        """
        if self._study.model.kind != TRANSFORMER:
            raise InputError(f"model.kind = '{self._study.model.kind}': uses no service; run it without --endpoint")
        if len(self._models) > 1:
            raise InputError(
                f"--endpoint: a service has one model, and the study file has {', '.join(self._models)}; --cluster "
                "generates for all of them"
            )
        if made_on is not None and made_on.names:
            self._gpus = made_on
        self._check_gpu(self._asked())

    def identify(self, study: Study, *, required: bool) -> Callable[[Action], ActionIdentity]:
        """Return a function that gives an action's identity, from the endpoint's weights and this machine's tokenizer.

        Raises as ``check`` does, but an endpoint that does not answer is an error only if its weights are ``required``.
        """
        try:
            self.check()
        except OperationError:
            if required:
                raise
        ends = None if self._identity is None else self._ends_of(study, self._identity)
        return lambda action: ModelIdentity(self._weights, _tokenizer(study), ends).of(action.parts)

    def generate(self, study: Study, work: Work) -> Generator[list[Unit], None, None]:
        """Generate the pending units of documents, and yield each document's units as they arrive.

        Close the iterator to cancel the request under way.

        Raises:
            InputError: The endpoint refuses the work.
            WorkFailed: The endpoint failed twice at the same work.
            NobodyLeftError: The endpoint was lost five times in a row.
        """
        horizon = study.study.horizon
        parts = [(document, units) for document, pending in work for units in requests(pending, horizon)]
        try:
            for place, (document, units) in enumerate(parts):
                call = self._call or self._begin(study, document, units)
                made = self._settled(call, study, document, units)
                self._call = None
                if place + 1 < len(parts):
                    self._begin(study, *parts[place + 1])
                yield made
        finally:
            if self._call is not None:
                self._call.cancel()
                self._call = None

    def _begin(self, study: Study, document: Document, units: Units) -> Call:
        """Request a document's units in a daemon thread, since a call may be impossible to cancel."""
        call = self._call = Call()
        threading.Thread(target=self._ask, args=(study, document, units, call), daemon=True).start()
        return call

    def _ask(self, study: Study, document: Document, units: Units, call: Call) -> None:
        try:
            served = self._asked()
            ends = self._ends_of(study, served)
            request = GenerationRequest.of(study, served, document, units, _tokenizer(study), ends)
            call.sign_of_life()
            call.outcome.set_result(self._address.generate(request, call))
        except Exception as error:  # noqa: BLE001 - raised again where the outcome is waited for
            call.outcome.set_exception(error)

    def _settled(self, call: Call, study: Study, document: Document, units: Units) -> list[Unit]:
        """Return a document's units; the request is repeated while the endpoint is lost."""
        failed = False
        while True:
            try:
                made = self._outcome(call)
            except WorkFailed as error:
                if failed:
                    raise
                failed = True
                self._lose(f"{self._where}: {error}")
            except EndpointLost as error:
                self._lose(str(error))
            else:
                if self._losses:
                    self._say(f"{self._where}: is back")
                self._losses = 0
                return made
            time.sleep(self._pause * 2 ** (self._losses - 1))
            call = self._begin(study, document, units)

    def _outcome(self, call: Call) -> list[Unit]:
        """Return a request's units; cancel it after ``ServiceAddress.timeout`` without a sign of life."""
        while not wait([call.outcome], _LOOK_SECONDS).done:
            if time.monotonic() - call.heard > self._address.timeout:
                call.cancel()
                raise EndpointLost(f"{self._where}: silent for {self._address.timeout:g} s")
        return call.outcome.result()

    def _lose(self, reason: str) -> None:
        self._identity, self._losses = None, self._losses + 1
        if self._losses >= _LOSSES:
            raise NobodyLeftError(
                f"the endpoint is gone ({reason}); generated units are kept; run the command again to continue"
            )
        if self._losses == 1:
            self._say(f"{reason}; its work will be repeated")

    def _asked(self) -> Identity:
        """Return the endpoint's identity, and ask for it if unknown; the endpoint must serve the studies' model."""
        if self._identity is None:
            self._identity = self._recognized(self._address.identity())
        return self._identity

    def _recognized(self, identity: Identity) -> Identity:
        where, model = self._where, self._study.model
        for name, ours in _VERSIONS.items():
            if (theirs := getattr(identity, name)) != ours:
                raise InputError(
                    f"{where}: runs another version of kvdrift ({name} {theirs}, here {ours}); install there what is "
                    "installed here"
                )
        if identity.model != model.id:
            raise InputError(f"{where}: serves '{identity.model}', the study asks for '{model.id}' (model.id)")
        requested = {name: getattr(model, name) for name in ("dtype", "revision")}
        served = {name: getattr(identity, name) for name in requested}
        if model.device_map is None:  # of several GPUs of one kind, any will do
            requested["device"], served["device"] = (name.partition(":")[0] for name in (model.device, identity.device))
        for name, value in requested.items():
            if served[name] != value:
                raise InputError(f"{where}: serves {name} = {_toml(served[name])}, the study asks for {_toml(value)}")
        self._check_gpu(identity)
        if identity.weights != (self._weights or identity.weights):
            raise InputError(
                f"{where}: serves other weights of '{identity.model}' than before; start it again with the first ones"
            )
        self._weights = identity.weights
        return identity

    def _check_gpu(self, identity: Identity) -> None:
        """Compare the endpoint's GPU with those of the studies' units."""
        gpu = identity.versions.get("gpu")
        if self._gpus is None:
            self._gpus = GpuKinds.at(self._where, gpu)
        self._gpus.check(self._where, gpu, self._study.model)
        if not self._told_gpu and (line := self._gpus.difference(self._where, gpu)) is not None:
            self._told_gpu = True
            self._say(f"{line}, and each unit records its GPU model")

    def _ends_of(self, study: Study, served: Identity) -> tuple[int, ...]:
        """Return the tokens that end the study's texts: the endpoint's, and those of this machine's chat template."""
        named = [(token, self._where) for token in served.eos_tokens]
        return joined_ends(study, served.vocabulary, named, model_location(study.model)).tokens


def requests(pending: Units, horizon: int) -> list[Units]:
    """Return a document's units as one request or, if it would have too many events, as one request for each study."""
    if sum(item.count for item in pending) * horizon <= MAX_EVENTS:
        return [pending]
    samplings = dict.fromkeys(item.of for item in pending)
    return [[item for item in pending if item.of == of] for of in samplings]


def _tokenizer(study: Study) -> str | None:
    """Return the SHA-256 of this machine's tokenizer, with which the prompts are made; None without one."""
    return tokenizer_sha256(model_location(study.model), study.model.revision)


def _toml(value: str | None) -> str:
    return "none" if value is None else f"'{value}'"
