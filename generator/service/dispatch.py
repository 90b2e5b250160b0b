"""Work shared among endpoints, which may die, hang or fail without loss of work.

Each endpoint has one document at a time. A thread asks for it, and the thread that consumes the results watches. Work
of an endpoint that went away, fell silent or failed waits again; the endpoint is tried again after ever longer pauses.
A failure is the endpoint's first: work itself has failed when it did so at two endpoints, or twice where one is left.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from generator.identity import NUMERICS_VERSION, ActionIdentity, GpuKinds, ModelIdentity
from generator.service.client import Call, EndpointLost, ServiceAddress, WorkFailed
from generator.service.protocol import MAX_EVENTS, PROTOCOL, GenerationRequest, Identity
from generator.transformer.fingerprints import tokenizer_sha256
from generator.transformer.local_folders import model_location
from log.store import Unit
from schema.document import Document
from schema.errors import InputError, NobodyLeftError, OperationError, nearest
from schema.study import TRANSFORMER, Study
from schema.tables import SCHEMA_VERSION

if TYPE_CHECKING:
    from generator.actions import Action
    from generator.generation import PendingUnit

_LOSSES = 5  # in a row: then an endpoint counts as gone, but is still tried again while another one works
_LONGEST_PAUSE = 60.0  # seconds
_LOOK_SECONDS = 0.2
_VERSIONS = {"protocol": PROTOCOL, "schema_version": SCHEMA_VERSION, "numerics": NUMERICS_VERSION}


@dataclass
class _DocumentWork:
    """One document's pending units, and the locations of the endpoints at which their generation failed."""

    document: Document
    pending: Sequence[PendingUnit]
    failed_at: list[str] = field(default_factory=list)


@dataclass
class _EndpointState:
    """One endpoint: what it serves, what it works on, and since when it has been lost."""

    address: ServiceAddress
    model: str | None = None  # what it serves, None until it first answers
    identity: Identity | None = None  # None where it has to be asked again
    attempt: _Attempt | None = None
    losses: int = 0  # since its last success
    reason: str = ""
    not_before: float = 0.0

    def found(self, identity: Identity) -> None:
        self.model, self.identity = identity.model, identity

    def lost(self, reason: str, pause: float) -> None:
        self.identity = self.attempt = None
        self.losses, self.reason = self.losses + 1, reason
        self.not_before = time.monotonic() + min(pause * 2 ** (self.losses - 1), _LONGEST_PAUSE)


@dataclass
class _Attempt:
    """One document's work at one endpoint; a thread of its own sets ``identity`` and then ``outcome``."""

    endpoint: _EndpointState
    work: _DocumentWork
    identity: Identity | None
    call: Call = field(default_factory=Call)
    outcome: list[Unit] | Exception | None = None

    @property
    def current(self) -> bool:
        """Return whether the attempt has not been given up."""
        return self.endpoint.attempt is self

    @property
    def silent(self) -> bool:
        """Return whether it is under way without a sign of life for longer than the endpoint's timeout."""
        return self.outcome is None and time.monotonic() - self.call.heard > self.endpoint.address.timeout


class EndpointPool:
    """The endpoints of a run, which generate for the studies of one file.

    Args:
        studies: The studies, one for each model.
        say: Receives one line when an endpoint is lost and when it is back.
        pause: Seconds until a lost endpoint is first tried again.
    """

    def __init__(
        self,
        addresses: Sequence[ServiceAddress],
        studies: Sequence[Study],
        say: Callable[[str], None],
        pause: float = 1.0,
    ) -> None:
        self._endpoints = [_EndpointState(address) for address in addresses]
        self._studies = {study.model.id: study for study in studies}
        self._say, self._pause = say, pause
        self._weights: dict[str, tuple[str, str]] = {}  # of each model: fingerprint, and an endpoint that has them
        self._gpus: dict[str, GpuKinds] = {}  # of each model: those of its units, or of the first endpoint
        self._told_gpus: set[str] = set()
        self._tokenizers: dict[str, str | None] = {}  # of each model, on this machine, where prompts are made
        self._checked = False

    def check(self, made_on: Mapping[str, GpuKinds] | None = None) -> None:
        """Ask all endpoints what they serve, unless that was done.

        Args:
            made_on: The GPUs that units of each model were made on so far.

        Raises:
            InputError: An endpoint refuses the caller or serves what no study asks for, or a study has no endpoint.
            OperationError: No endpoint answers.
        """
        if not self._checked:
            self._ask_all()
        self._gpus |= {model: kinds for model, kinds in (made_on or {}).items() if kinds.names}
        for endpoint in self._endpoints:
            if endpoint.identity is not None:
                self._check_gpu(endpoint.address, endpoint.identity)

    def _ask_all(self) -> None:
        for study in self._studies.values():
            if study.model.kind != TRANSFORMER:
                raise InputError(f"model.kind = '{study.model.kind}': uses no service; run it without --endpoint")
        with ThreadPoolExecutor(len(self._endpoints)) as threads:
            answers = [threads.submit(endpoint.address.identity) for endpoint in self._endpoints]
        for endpoint, answer in zip(self._endpoints, answers, strict=True):
            try:
                endpoint.found(self._recognized(endpoint.address, answer.result()))
            except EndpointLost as error:
                endpoint.lost(str(error), self._pause)
        lost = [endpoint for endpoint in self._endpoints if endpoint.identity is None]
        if len(lost) == len(self._endpoints):
            raise OperationError("; ".join(endpoint.reason for endpoint in lost))
        for endpoint in lost:
            self._say(f"{endpoint.reason}; going on with the others")
        for model in self._studies:
            if not lost and model not in {endpoint.model for endpoint in self._endpoints}:
                raise InputError(f"model.id = '{model}': none of the endpoints serves it")
        self._checked = True

    def identify(self, study: Study, *, required: bool) -> Callable[[Action], ActionIdentity]:
        """Return what makes the units of the study's actions: the endpoints' weights, this machine's tokenizer.

        Raises:
            InputError: An endpoint refuses the caller or serves what no study asks for.
            OperationError: No endpoint that serves the model answers, and the weights are ``required``.
        """
        model = study.model.id
        try:
            self.check()
        except OperationError:
            if required:
                raise
        if required and model not in self._weights:
            raise OperationError("; ".join(endpoint.reason for endpoint in self._endpoints if endpoint.reason))
        weights, _ = self._weights.get(model, (None, None))
        return lambda action: ModelIdentity(weights, self._tokenizer(study)).of(action.parts)

    def _tokenizer(self, study: Study) -> str | None:
        model = study.model
        if model.id not in self._tokenizers:
            self._tokenizers[model.id] = tokenizer_sha256(model_location(model), model.revision)
        return self._tokenizers[model.id]

    def generate(
        self, study: Study, work: Sequence[tuple[Document, Sequence[PendingUnit]]]
    ) -> Generator[list[Unit], None, None]:
        """Generate the pending units of documents, and yield each document's units as they arrive.

        Close the iterator to cancel what is under way.
        """
        horizon = study.study.horizon
        waiting = deque(
            _DocumentWork(document, part) for document, pending in work for part in _requests(pending, horizon)
        )
        left = len(waiting)
        done: queue.SimpleQueue[_Attempt] = queue.SimpleQueue()
        try:
            while left:
                self._assign(study, waiting, done)
                units = self._settled(study, self._next(done), waiting)
                if units is not None:
                    left -= 1
                    self._assign(study, waiting, done)  # before the consumer takes its time
                    yield units
                self._give_up_silent(waiting)
                self._check_left(study)
        finally:
            for endpoint in self._endpoints:
                if endpoint.attempt is not None:
                    endpoint.attempt.call.cancel()
                    endpoint.attempt = None

    def _assign(self, study: Study, waiting: deque[_DocumentWork], done: queue.SimpleQueue[_Attempt]) -> None:
        """Give work to every free endpoint."""
        now = time.monotonic()
        for endpoint in self._for(study):
            free = endpoint.attempt is None and now >= endpoint.not_before
            if free and (work := self._take(study, endpoint, waiting)) is not None:
                endpoint.attempt = _Attempt(endpoint, work, endpoint.identity)
                # A daemon: where a call cannot be broken off, nobody waits for it.
                threading.Thread(target=self._ask, args=(study, endpoint.attempt, done), daemon=True).start()

    def _take(self, study: Study, endpoint: _EndpointState, waiting: deque[_DocumentWork]) -> _DocumentWork | None:
        """Take the first work that has not failed at this endpoint; any, where no other endpoint is left for it."""
        alone = self._alone(study, endpoint)
        for place, work in enumerate(waiting):
            if alone or endpoint.address.location not in work.failed_at:
                del waiting[place]
                return work
        return None

    def _alone(self, study: Study, endpoint: _EndpointState) -> bool:
        """Return whether all other endpoints count as gone."""
        return all(other is endpoint or other.losses >= _LOSSES for other in self._for(study))

    def _ask(self, study: Study, attempt: _Attempt, done: queue.SimpleQueue[_Attempt]) -> None:
        """Get the units of one document from one endpoint; runs in a thread of its own."""
        address, work = attempt.endpoint.address, attempt.work
        try:
            if attempt.identity is None:
                attempt.identity = self._recognized(address, address.identity())
            if attempt.identity.model != study.model.id:
                raise EndpointLost(f"endpoint {address.location}: serves '{attempt.identity.model}'")  # noqa: TRY301
            tokenizer = self._tokenizer(study)
            request = GenerationRequest.of(study, attempt.identity, work.document, work.pending, tokenizer)
            attempt.call.sign_of_life()
            attempt.outcome = address.generate(request, attempt.call)
        except Exception as error:  # noqa: BLE001 - raised again in _settled
            attempt.outcome = error
        done.put(attempt)

    @staticmethod
    def _next(done: queue.SimpleQueue[_Attempt]) -> _Attempt | None:
        try:
            return done.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            return None

    def _settled(self, study: Study, attempt: _Attempt | None, waiting: deque[_DocumentWork]) -> list[Unit] | None:
        """Return the units of a successful attempt; the work of another one waits again."""
        if attempt is None or not attempt.current:
            return None
        endpoint, work, outcome = attempt.endpoint, attempt.work, attempt.outcome
        endpoint.attempt = None
        if attempt.identity is not None:
            endpoint.found(attempt.identity)
        if isinstance(outcome, EndpointLost):
            self._lose(attempt, str(outcome), waiting)
            return None
        if isinstance(outcome, WorkFailed):
            work.failed_at.append(endpoint.address.location)
            if len(set(work.failed_at)) > 1 or (len(work.failed_at) > 1 and self._alone(study, endpoint)):
                raise outcome
            self._lose(attempt, f"endpoint {endpoint.address.location}: {outcome}", waiting)
            return None
        if isinstance(outcome, Exception):
            raise outcome
        if endpoint.losses:
            self._say(f"endpoint {endpoint.address.location}: is back")
        endpoint.losses = 0
        return outcome

    def _give_up_silent(self, waiting: deque[_DocumentWork]) -> None:
        for endpoint in self._endpoints:
            if (attempt := endpoint.attempt) is not None and attempt.silent:
                attempt.call.cancel()
                self._lose(
                    attempt, f"endpoint {endpoint.address.location}: silent for {endpoint.address.timeout:g} s", waiting
                )

    def _lose(self, attempt: _Attempt, reason: str, waiting: deque[_DocumentWork]) -> None:
        (waiting.append if attempt.work.failed_at else waiting.appendleft)(attempt.work)
        attempt.endpoint.lost(reason, self._pause)
        if attempt.endpoint.losses == 1:
            self._say(f"{reason}; its work will be repeated, at another endpoint if there is one")

    def _check_left(self, study: Study) -> None:
        endpoints = self._for(study)
        if all(endpoint.losses >= _LOSSES and endpoint.attempt is None for endpoint in endpoints):
            reasons = "; ".join(endpoint.reason for endpoint in endpoints)
            raise NobodyLeftError(
                f"no endpoint is left ({reasons}); what was generated is kept; run the command again to continue"
            )

    def _for(self, study: Study) -> list[_EndpointState]:
        """Return the endpoints that serve the study's model, or that have not yet said what they serve."""
        return [endpoint for endpoint in self._endpoints if endpoint.model in (study.model.id, None)]

    def _recognized(self, address: ServiceAddress, identity: Identity) -> Identity:
        """Return the identity if it is what a study asks for."""
        where = f"endpoint {address.location}"
        for name, ours in _VERSIONS.items():
            if (theirs := getattr(identity, name)) != ours:
                raise InputError(f"{where}: another version of kvdrift ({name} {theirs}, not {ours})")
        study = self._studies.get(identity.model)
        if study is None:
            raise InputError(f"{where}: serves '{identity.model}'; model.id: {nearest(identity.model, self._studies)}")
        asked = {name: getattr(study.model, name) for name in ("dtype", "revision")}
        served = {name: getattr(identity, name) for name in asked}
        if study.model.device_map is None:  # of several GPUs of one kind, any will do
            devices = (study.model.device, identity.device)
            asked["device"], served["device"] = (name.partition(":")[0] for name in devices)
        for name, value in asked.items():
            if served[name] != value:
                raise InputError(f"{where}: serves {name} = {_toml(served[name])}, the study asks for {_toml(value)}")
        self._check_gpu(address, identity)
        weights, other = self._weights.setdefault(identity.model, (identity.weights, address.location))
        if identity.weights != weights:
            raise InputError(f"{where}: serves other weights of '{identity.model}' than {other}")
        return identity

    def _check_gpu(self, address: ServiceAddress, identity: Identity) -> None:
        """Hold an endpoint's GPU against those of the study's units, and of the first endpoint."""
        who, gpu = f"endpoint {address.location}", identity.versions.get("gpu")
        known = self._gpus.setdefault(identity.model, GpuKinds.at(who, gpu))
        known.check(who, gpu, self._studies[identity.model].model)
        if gpu is not None and gpu not in self._told_gpus and (line := known.difference(who, gpu)) is not None:
            self._told_gpus.add(gpu)
            self._say(f"{line}, and each unit says which one made it")


def _requests(pending: Sequence[PendingUnit], horizon: int) -> list[Sequence[PendingUnit]]:
    """A document's units as one request or, where they are too many for one, as one for each law."""
    if sum(item.count for item in pending) * horizon <= MAX_EVENTS:
        return [pending]
    laws = dict.fromkeys(item.of for item in pending)
    return [[item for item in pending if item.of == of] for of in laws]


def _toml(value: str | None) -> str:
    return "none" if value is None else f"'{value}'"
