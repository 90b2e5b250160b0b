"""A service with a model that computes nothing: admission, waiting, endings, and errors that the service survives."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from pyarrow import flight

from kvdrift.generator.identity import NUMERICS_VERSION, ModelIdentity, selector_sha256
from kvdrift.generator.selectors import Recent
from kvdrift.generator.service import server
from kvdrift.generator.service.protocol import PROTOCOL, GenerationRequest, Identity
from kvdrift.generator.service.server import GenerationService
from kvdrift.schema.errors import OperationError
from kvdrift.schema.sampling import FULL_SOFTMAX, Sampling
from kvdrift.schema.tables import SCHEMA_VERSION

FILES = ModelIdentity("w", None)
Work = Callable[[str, Callable[[], None]], None]  # of a document, and what is called before every pass


@dataclass(frozen=True)
class Pretended:
    """A model that works in place of passing anything through a network, and fails in the end."""

    work: Work
    before: Callable[[], None] = lambda: None
    files: ModelIdentity = FILES
    device: str = "cuda:0"
    logits_dtype: str | None = None
    sampling: Sampling = FULL_SOFTMAX
    eos_tokens: tuple[int, ...] = ()
    network: ClassVar[Any] = SimpleNamespace(config=SimpleNamespace(vocab_size=256))

    def twins(self, count: int, before: Callable[[], None]) -> list[Pretended]:
        return [replace(self, before=before)] * count

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepare(self, document: Any, *_: Any) -> None:
        self.work(document.doc, self.before)
        message = f"{document.doc} is worked off"
        raise OperationError(message)


class Running:
    """A service that generates in a thread; ``error`` is the error that ended it."""

    def __init__(self, work: Work, token: str | None) -> None:
        identity = Identity(
            protocol=PROTOCOL, schema_version=SCHEMA_VERSION, numerics=NUMERICS_VERSION, model="m", device="cuda:0",
            dtype="float32", revision=None, positions=100, weights="w",
            eos_tokens=[], vocabulary=256, versions={},
        )  # fmt: skip
        self.service = GenerationService(
            Pretended(work), identity, "grpc://127.0.0.1:0", token=token, certificate=None, max_request_bytes=10_000
        )  # type: ignore[arg-type]
        self.error: Exception | None = None
        self.ended = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self.service.run()
        except Exception as error:  # noqa: BLE001
            self.error = error
        self.ended.set()

    def client(self) -> flight.FlightClient:
        return flight.FlightClient(f"grpc://127.0.0.1:{self.service.port}")

    def asked(
        self, client: flight.FlightClient, doc: str, logits_dtype: str | None = None, sampling: Sampling = FULL_SOFTMAX
    ) -> Any:
        """The answer to a request for a document, as it comes."""
        action = {"name": "a", "selector": "recent", "keep": "1/2"}
        request = GenerationRequest.model_validate({
            "study": "s", "model": "m", "weights": "w", "tokenizer": None, "horizon": 4,
            "logits_dtype": logits_dtype, "eos_tokens": [], "seed": 0, **asdict(sampling),
            "document": {"doc": doc, "stratum": "", "cluster": "", "task": "", "source": "", "tokens": [1]},
            "pending": [{
                "action": action, "selector_sha256": selector_sha256(Recent()), "first": 0, "count": 1,
                "estimator": "plain", "revision": 0, "of": None,
            }],
        })  # fmt: skip
        return client.do_get(flight.Ticket(request.encoded()))


@contextmanager
def running(work: Work, token: str | None = None) -> Iterator[Running]:
    run = Running(work, token)
    try:
        yield run
    finally:
        run.service.close()


class Long:
    """Work of the document "long" until it is stopped; that of others ends at once."""

    def __init__(self) -> None:
        self.started, self.stopped = threading.Event(), threading.Event()

    def __call__(self, doc: str, go_on: Callable[[], None]) -> None:
        if doc == "long":
            self.started.set()
            try:
                for _ in range(2000):
                    go_on()
                    time.sleep(0.01)
            finally:
                self.stopped.set()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEARTBEAT_SECONDS", 0.05)


def test_work_that_nobody_waits_for_stops_before_the_next_pass() -> None:
    long = Long()
    with running(long) as run, run.client() as left, run.client() as client:
        answer = run.asked(left, "long")
        assert long.started.wait(10)
        begun = time.monotonic()
        answer.cancel()
        with pytest.raises(flight.FlightServerError, match="short "):
            list(run.asked(client, "short"))
        assert time.monotonic() - begun < 5
        assert long.stopped.is_set()


def test_who_waits_hears_so_all_the_time() -> None:
    with running(long := Long()) as run, run.client() as busy, run.client() as client:
        generating = run.asked(busy, "long")
        assert long.started.wait(10)
        waiting = run.asked(client, "short")
        for answer in (*[waiting] * 5, generating):
            assert answer.read_chunk().data.num_rows == 0
        generating.cancel()
        with pytest.raises(flight.FlightServerError, match="short "):
            list(waiting)


def test_so_many_calls_at_once_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_CALLS", 2)
    with running(Long()) as run, run.client() as busy, run.client() as client:
        answers = [run.asked(busy, "long") for _ in range(2)]
        for answer in answers:
            answer.read_chunk()
        with pytest.raises(flight.FlightUnavailableError, match="2 calls "):
            list(client.do_action("identity"))
        for answer in answers:
            answer.cancel()
        for _ in range(100):
            try:
                list(client.do_action("identity"))
                break
            except flight.FlightUnavailableError:
                time.sleep(0.05)
        for _ in range(5):  # each leaves its place
            assert list(client.do_action("identity"))
            with pytest.raises(flight.FlightServerError, match="worked off"):
                list(run.asked(client, "short"))


def test_a_service_ends_where_its_device_does() -> None:
    def work(doc: str, _go_on: Callable[[], None]) -> None:
        raise RuntimeError(f"CUDA error: {doc}\nCUDA kernel errors might be asynchronously reported")

    with running(work) as run, run.client() as client:
        for line in ("invalid argument", "out of memory", "CUBLAS_STATUS_NOT_SUPPORTED"):
            with pytest.raises(flight.FlightServerError, match=line):
                list(run.asked(client, line))
        assert not run.ended.is_set()
        lost = "an illegal memory access was encountered"
        with pytest.raises(flight.FlightServerError, match=lost):
            list(run.asked(client, lost))
        assert run.ended.wait(10)
    assert isinstance(run.error, OperationError)
    assert re.fullmatch(f"device 'cuda:0' .*CUDA error: {lost}; .*", str(run.error))


def test_logits_and_law_are_what_a_request_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str | None, Sampling]] = []
    prepare = Pretended.prepare

    def watched(self: Pretended, document: Any, *given: Any) -> None:
        seen.append((self.logits_dtype, self.sampling))
        prepare(self, document, *given)

    monkeypatch.setattr(Pretended, "prepare", watched)
    with running(Long()) as run, run.client() as client:
        asked = [("float32", FULL_SOFTMAX), (None, Sampling(0.7, 0.9, 20)), (None, Sampling(0.0))]
        for logits_dtype, law in asked:
            with pytest.raises(flight.FlightServerError, match="short "):
                list(run.asked(client, "short", logits_dtype, law))
    assert seen == asked
