"""Work shared among endpoints: one that dies, hangs or fails loses nothing but the time it took.

Each endpoint has one document at a time, asked for by a thread of its own, while the thread that consumes the results
watches. Work of an endpoint that went away or fell silent goes back to where it came from; the endpoint is tried again
later, after ever longer pauses.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from generator.generation import PendingUnit
from generator.service.client import Call, Endpoint, EndpointLost, WorkFailed
from generator.service.protocol import PROTOCOL, GenerationRequest, Identity
from schema.document import Document
from schema.errors import InputError, OperationError, nearest
from schema.store.store import Unit
from schema.study import TRANSFORMER, Study
from schema.tables import SCHEMA_VERSION

_LOSSES = 5  # in a row, and an endpoint counts as gone; it still gets its chances while another one works
_FAILURES = 2  # of one document's work, wherever: then it is the work that fails
_LONGEST_PAUSE = 60.0
_LOOK_SECONDS = 0.2


@dataclass
class _Item:
    """One document's pending units, and how often they failed."""

    document: Document
    pending: Sequence[PendingUnit]
    failures: int = 0


@dataclass
class _Seat:
    """One endpoint, and how it stands."""

    endpoint: Endpoint
    model: str | None = None  # what it serves, if it was ever seen
    identity: Identity | None = None  # the whole of it; None where it has to be looked at again
    attempt: _Attempt | None = None
    losses: int = 0  # since it last did its work
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
    """One item at one endpoint; a thread of its own sets ``identity`` and then ``outcome``."""

    seat: _Seat
    item: _Item
    identity: Identity | None
    call: Call = field(default_factory=Call)
    outcome: list[Unit] | Exception | None = None

    @property
    def current(self) -> bool:
        """False once it was given up."""
        return self.seat.attempt is self

    @property
    def silent(self) -> bool:
        """Whether it is still under way and nothing was heard for as long as the endpoint is given."""
        return self.outcome is None and time.monotonic() - self.call.heard > self.seat.endpoint.timeout


class EndpointPool:
    """The endpoints of a run, and the studies that they work for: those of one file, one to a model.

    ``say`` is told in one line when an endpoint goes and when it comes back; ``pause`` is for how many seconds one that
    went away is left alone at first.
    """

    def __init__(
        self, endpoints: Sequence[Endpoint], studies: Sequence[Study], say: Callable[[str], None], pause: float = 1.0
    ) -> None:
        self._seats = [_Seat(endpoint) for endpoint in endpoints]
        self._studies = {study.model.id: study for study in studies}
        self._say, self._pause = say, pause
        self._weights: dict[str, tuple[str, str]] = {}  # of each model: fingerprint, and an endpoint that has them

    def check(self) -> None:
        """Ask all endpoints what they serve.

        InputError where one refuses the caller or serves anything but what one of the studies asks for, and where a
        study has none; OperationError where none answers.
        """
        for study in self._studies.values():
            if study.model.kind != TRANSFORMER:
                raise InputError(f"model.kind = '{study.model.kind}': needs no service; run it without --endpoint")
        with ThreadPoolExecutor(len(self._seats)) as threads:
            answers = [threads.submit(seat.endpoint.identity) for seat in self._seats]
        for seat, answer in zip(self._seats, answers, strict=True):
            try:
                seat.found(self._recognized(seat.endpoint, answer.result()))
            except EndpointLost as error:
                seat.lost(str(error), self._pause)
        lost = [seat for seat in self._seats if seat.identity is None]
        if len(lost) == len(self._seats):
            raise OperationError("; ".join(seat.reason for seat in lost))
        for seat in lost:
            self._say(f"{seat.reason}; going on with the others")
        for model in self._studies:
            if not lost and model not in {seat.model for seat in self._seats}:
                raise InputError(f"model.id = '{model}': none of the endpoints serves it")

    def generate(
        self, study: Study, work: Sequence[tuple[Document, Sequence[PendingUnit]]]
    ) -> Generator[list[Unit], None, None]:
        """Units of each document, in the order in which they come.

        InputError where an endpoint refuses the work or is not what the study asks for, OperationError where the work
        of a document fails twice or no endpoint is left. Close the iterator to break off what is under way.
        """
        waiting = deque(_Item(document, pending) for document, pending in work)
        left = len(waiting)
        done: queue.SimpleQueue[_Attempt] = queue.SimpleQueue()
        try:
            while left:
                self._assign(study, waiting, done)
                units = self._settled(self._next(done), waiting)
                if units is not None:
                    left -= 1
                    self._assign(study, waiting, done)  # before the consumer takes its time
                    yield units
                self._give_up_silent(waiting)
                self._check_left(study)
        finally:
            for seat in self._seats:
                if seat.attempt is not None:
                    seat.attempt.call.cancel()
                    seat.attempt = None

    def _assign(self, study: Study, waiting: deque[_Item], done: queue.SimpleQueue[_Attempt]) -> None:
        """Give every free endpoint something to do."""
        now = time.monotonic()
        for seat in self._for(study):
            if waiting and seat.attempt is None and now >= seat.not_before:
                seat.attempt = _Attempt(seat, waiting.popleft(), seat.identity)
                # A daemon: where a call cannot be broken off, nobody waits for it.
                threading.Thread(target=self._ask, args=(study, seat.attempt, done), daemon=True).start()

    def _ask(self, study: Study, attempt: _Attempt, done: queue.SimpleQueue[_Attempt]) -> None:
        """Get one item's units from one endpoint; runs in a thread of its own."""
        endpoint, item = attempt.seat.endpoint, attempt.item
        try:
            if attempt.identity is None:
                attempt.identity = self._recognized(endpoint, endpoint.identity())
            if attempt.identity.model != study.model.id:
                raise EndpointLost(f"endpoint {endpoint.location}: serves '{attempt.identity.model}'")  # noqa: TRY301
            request = GenerationRequest.of(study, attempt.identity, item.document, item.pending)
            attempt.call.sign_of_life()
            attempt.outcome = endpoint.generate(request, attempt.call)
        except Exception as error:  # noqa: BLE001 - raised again where it is dealt with
            attempt.outcome = error
        done.put(attempt)

    @staticmethod
    def _next(done: queue.SimpleQueue[_Attempt]) -> _Attempt | None:
        try:
            return done.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            return None

    def _settled(self, attempt: _Attempt | None, waiting: deque[_Item]) -> list[Unit] | None:
        """The units of an attempt that came to something; else its item waits again."""
        if attempt is None or not attempt.current:
            return None
        seat, item, outcome = attempt.seat, attempt.item, attempt.outcome
        seat.attempt = None
        if attempt.identity is not None:
            seat.found(attempt.identity)
        if isinstance(outcome, EndpointLost):
            self._lose(attempt, str(outcome), waiting)
            return None
        if isinstance(outcome, WorkFailed):
            item.failures += 1
            if item.failures == _FAILURES:
                raise outcome
            waiting.append(item)
            return None
        if isinstance(outcome, Exception):
            raise outcome
        if seat.losses:
            self._say(f"endpoint {seat.endpoint.location}: is back")
        seat.losses = 0
        return outcome

    def _give_up_silent(self, waiting: deque[_Item]) -> None:
        for seat in self._seats:
            if (attempt := seat.attempt) is not None and attempt.silent:
                attempt.call.cancel()
                self._lose(
                    attempt, f"endpoint {seat.endpoint.location}: silent for {seat.endpoint.timeout:g} s", waiting
                )

    def _lose(self, attempt: _Attempt, reason: str, waiting: deque[_Item]) -> None:
        waiting.appendleft(attempt.item)
        attempt.seat.lost(reason, self._pause)
        if attempt.seat.losses == 1:
            self._say(f"{reason}; its work is done again, by another one if there is one")

    def _check_left(self, study: Study) -> None:
        seats = self._for(study)
        if all(seat.losses >= _LOSSES and seat.attempt is None for seat in seats):
            reasons = "; ".join(seat.reason for seat in seats)
            raise OperationError(f"no endpoint is left ({reasons}); what was generated is kept: run again to go on")

    def _for(self, study: Study) -> list[_Seat]:
        """The endpoints that serve the study's model, or of which that is still to be seen."""
        return [seat for seat in self._seats if seat.model in (study.model.id, None)]

    def _recognized(self, endpoint: Endpoint, identity: Identity) -> Identity:
        """The identity, if it is what a study asks for; else InputError saying what differs."""
        where = f"endpoint {endpoint.location}"
        for name, ours in (("protocol", PROTOCOL), ("schema_version", SCHEMA_VERSION)):
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
        weights, other = self._weights.setdefault(identity.model, (identity.weights, endpoint.location))
        if identity.weights != weights:
            raise InputError(f"{where}: serves other weights of '{identity.model}' than {other}")
        return identity


def _toml(value: str | None) -> str:
    return "none" if value is None else f"'{value}'"
