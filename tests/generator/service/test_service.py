"""The generator as a service: equal events from any generator, and refusal of everything else."""

from __future__ import annotations

import datetime as dt
import functools
import ipaddress
import json
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from fixtures.house import ROOT
from fixtures.processes import Command
from fixtures.quick_service import quicken
from fixtures.refusals import refused
from fixtures.small_study import TEXT, run_of, write_study
from fixtures.study_files import load_study
from pyarrow import flight

from kvdrift.command import main
from kvdrift.flows.generate.local import LocalGenerator
from kvdrift.flows.generate.storing import storing
from kvdrift.flows.material import gather_material
from kvdrift.flows.run import stages
from kvdrift.flows.run.study_run import StudyRun, pending_development
from kvdrift.generator.generation import PendingUnit, StudySampling
from kvdrift.generator.identity import NUMERICS_VERSION, GpuKinds
from kvdrift.generator.service import client
from kvdrift.generator.service.client import (
    Call,
    EndpointLost,
    RemoteGenerator,
    ServiceAddress,
    WorkFailed,
    is_loopback,
)
from kvdrift.generator.service.credentials import token_certificate
from kvdrift.generator.service.protocol import PROTOCOL, GenerationRequest, Identity
from kvdrift.generator.service.server import requested_work
from kvdrift.log.store import Store, Unit
from kvdrift.schema.errors import InputError, NobodyLeftError, OperationError
from kvdrift.schema.sampling import Sampling
from kvdrift.schema.study import Study, load_studies
from kvdrift.schema.tables import EVENTS, SCHEMA_VERSION

TOKEN = "a-token-that-nobody-guesses"  # noqa: S105 - for these tests alone
ALLOWED = "fixtures.own_selectors"  # a module that the service may import
EVERYONE = "0.0.0.0"  # noqa: S104 - what must be refused
NOT_SERVED = ("list_actions", "list_flights", "get_flight_info", "get_schema", "do_put", "do_exchange")
FLIGHT_ERRORS = (flight.FlightError, OSError)
Work = list[tuple[object, list[PendingUnit]]]  # documents with what is pending of each
Tables = tuple[pa.Table, pa.Table]  # events and units
MEASURED = ("prefill_seconds", "decode_seconds")
ONE_STRATUM = (TEXT[TEXT.rindex("[[documents]]") : TEXT.index("[[actions]]")], "")


class Server:
    """``kvdrift serve`` in a process of its own; with a ``certificate`` it wants TOKEN and TLS."""

    def __init__(self, certificate: Path | None = None) -> None:
        self.certificate = certificate
        self.token: str | None = None
        self.root: bytes | None = None
        options: tuple[str | Path, ...] = ("--allow-module", ALLOWED)
        if certificate is not None:
            self.token, self.root = TOKEN, certificate.read_bytes()
            options += ("--token-file", certificate.parent / "token", "--tls-cert", certificate, "--host", "localhost")
            options += ("--tls-key", certificate.parent / "key.pem")
        self.process = Command("serve", "kvdrift/tiny", "--port", "0", *options, before=quicken)

    @functools.cached_property
    def location(self) -> str:
        """Its address, once it says that it is ready."""
        while self.process.running and "\n" not in self.process.out():
            time.sleep(0.02)
        line = self.process.out().rstrip()
        assert line.startswith("kvdrift: serving kvdrift/tiny on grpc"), self.process.err()
        return line.split()[-1]

    def signal(self, number: int) -> None:
        self.process.signal(number)

    def peak_megabytes(self) -> int:
        (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        return int(peak) // 1000

    def log(self) -> list[str]:
        return self.process.err().splitlines()

    def endpoint(self) -> ServiceAddress:
        return ServiceAddress(self.location, self.token, self.root)

    def client(self, token: str | None = "") -> flight.FlightClient:
        """Return a connection with the certificate of a token, by default the server's; None shows none."""
        token = self.token if token == "" else token
        shown = token and token_certificate(token)
        keys = {"cert_chain": shown.certificate, "private_key": shown.key} if shown else {}
        return flight.FlightClient(self.location, tls_root_certs=self.root, **keys)


def presenting(token: str | None) -> flight.FlightCallOptions:
    """Options of a call with this token."""
    return flight.FlightCallOptions(headers=[] if token is None else [(b"authorization", f"Bearer {token}".encode())])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service with token and TLS that stays; a test that uses its address waits for it."""
    certificate = write_certificate(tmp_path_factory.mktemp("certificate"))
    (certificate.parent / "token").write_text(TOKEN + "\n")
    (certificate.parent / "token").chmod(0o600)
    secured = Server(certificate)
    try:
        yield secured
        secured.signal(signal.SIGTERM)
        assert secured.process.end(30)[0] == 0
        assert not [line for line in secured.log() if " refused " not in line], "no more than refusals is logged"
    finally:
        secured.process.kill()


@pytest.fixture
def spare() -> Iterator[Server]:
    """A service for everyone, which a test may stop and kill."""
    server = Server()
    try:
        yield server
    finally:
        server.process.kill()


def write_certificate(folder: Path) -> Path:
    """A self-signed certificate for this machine, with its key in a file beside it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(private)
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(pem))
    return folder / "certificate.pem"


@pytest.fixture(scope="module")
def study_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small study with both estimators, and a codec."""
    coded = ('selector = "recent"\n', 'selector = "recent"\ncodec = { name = "int4", residual = 16 }\n')
    return write_study(tmp_path_factory.mktemp("study"), ("[plan]", '[plan]\nestimator = "swrb"'), coded)


@pytest.fixture(scope="module")
def study(study_file: Path) -> Study:
    """The same, read."""
    return load_study(study_file)


def developed(study: Study, location: Path, there: RemoteGenerator | None = None) -> Tables:
    """Events and units of the development documents, generated at an endpoint or in this process."""
    run = StudyRun(study, str(location), storing(LocalGenerator() if there is None else there.generate))
    stages.prepare(run)
    if there is not None:
        there.check()
    stages.develop(run)
    return events_and_units(location)


def events_and_units(location: Path) -> Tables:
    """Return both tables of a store in order, without measured values."""
    store = Store.open(location)
    events, units = (
        store.read(table).sort_by([(name, "ascending") for name in keys])
        for table, keys in (
            ("events", ("study", "doc", "action", "kind", "replicate", "t")),
            ("units", ("study", "doc", "action", "estimator", "first_replicate")),
        )
    )
    return events, units.drop_columns(MEASURED)


@pytest.fixture(scope="module")
def here(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Events and units generated in this process."""
    return developed(study, tmp_path_factory.mktemp("here") / "store")


class Disturbed(ServiceAddress):
    """An endpoint whose server is disturbed as soon as it generates for the first time."""

    def generate(self, request: GenerationRequest, call: Call) -> list[Unit]:
        heard = call.sign_of_life

        def hear() -> None:
            heard()
            hear.count += 1
            if hear.count == 2:  # the schema, and the first batch
                self.disturb()

        hear.count = 0
        call.sign_of_life = hear
        return super().generate(request, call)

    def disturb(self) -> None:
        """Nothing unless replaced."""


def disturbed(server: Server, number: int, timeout: float) -> Disturbed:
    endpoint = Disturbed(server.location, timeout=timeout)
    once = iter([number])
    object.__setattr__(endpoint, "disturb", lambda: [server.signal(one) for one in once])
    return endpoint


class TestEvents:
    """Events do not depend on who generates them."""

    def test_an_endpoint(self, server: Server, study: Study, here: Tables, tmp_path: Path) -> None:
        said: list[str] = []
        assert developed(study, tmp_path, RemoteGenerator(server.endpoint(), [study], said.append)) == here
        assert said == []

    @pytest.mark.slow
    def test_laws_of_one_request_share_a_prefill(self, server: Server, tmp_path: Path) -> None:
        several = ("seed = 3", "seed = 3\ntemperature = [0.0, 0.7]\ntop_p = 0.9\neos = [9, 2]")
        studies = load_studies(write_study(tmp_path, ONE_STRATUM, several, ("[plan]", '[plan]\nestimator = "swrb"')))
        remote = RemoteGenerator(server.endpoint(), studies, print)
        made = []
        for name, generate in (("there", remote.generate), ("here", LocalGenerator())):
            runs = [StudyRun(study, str(tmp_path / name), storing(generate)) for study in studies]
            for run in runs:
                stages.prepare(run)
            remote.check()
            stages.develop(*runs)
            made.append(events_and_units(tmp_path / name))
        assert made[0] == made[1]
        assert set(made[0][0]["study"].to_pylist()) == {"small-t0", "small-t0.7"}
        assert set(made[0][1]["eos_tokens"].to_pylist()) == {"9,2"}

    @pytest.mark.slow
    def test_one_that_hangs_and_then_dies(self, spare: Server, tmp_path: Path) -> None:
        """The spare service is stopped amid its work, then goes on, then is killed amid its work.

        The work is long, so that it has not ended when a busy machine comes to stop it. What the killed one has made
        is kept, and this process makes the rest.
        """
        study = load_study(write_study(tmp_path, ONE_STRATUM, ("horizon = 12", "horizon = 120")))
        here = developed(study, tmp_path / "here")
        said: list[str] = []

        def say(line: str) -> None:
            said.append(line)
            spare.signal(signal.SIGCONT)

        hanging = RemoteGenerator(disturbed(spare, signal.SIGSTOP, 4), [study], say)
        assert developed(study, tmp_path / "hangs", hanging) == here
        where = f"endpoint {spare.location}"
        assert [line.partition(";")[0] for line in said] == [f"{where}: silent for 4 s", f"{where}: is back"]
        dying = RemoteGenerator(disturbed(spare, signal.SIGKILL, 4), [study], said.append, pause=0.01)
        line = refused(developed, study, tmp_path / "dies", dying, error=OperationError)
        assert f"gone ({where}: no answer" in line
        assert developed(study, tmp_path / "dies") == here

    @pytest.mark.slow
    def test_the_command_asks_the_endpoint(
        self, server: Server, study_file: Path, here: Tables, tmp_path: Path
    ) -> None:
        """Until the development documents are there; then the command is killed, which the service does not mind."""
        said, certificate = "development documents: 4 of 4", server.certificate
        command = Command(
            "run", study_file, "--store", tmp_path / "store", "--endpoint", server.location,
            "--token-file", certificate.parent / "token", "--tls-root-certs", certificate,
        )  # fmt: skip
        while command.running and said not in command.err():
            time.sleep(0.02)
        command.kill()
        assert said in command.end()[2]
        assert events_and_units(tmp_path / "store")[0].equals(here[0])


@pytest.fixture(scope="module")
def asking(server: Server, study: Study) -> GenerationRequest:
    """A request that the services can do."""
    document, pending = pending_work_of(study)[0]
    return GenerationRequest.of(study, server.endpoint().identity(), document, pending, None, (2,))


def pending_work_of(study: Study) -> Work:
    material = gather_material(study)
    return [
        (document, [PendingUnit(action, 0, 2) for action in material.actions])
        for document in material.of_split("development")
    ]


ACTION = {"name": "a", "selector": "recent", "keep": "1/2"}


class TestRefusals:
    """Refused requests, which the service survives."""

    @pytest.mark.parametrize(
        ("part", "change", "line"),
        [
            ("", {"protocol": 0}, "protocol: requested 0"),
            ("", {"weights": "0"}, "weights: requested '0'"),
            ("pending", {"selector_sha256": "0"}, "pending.0.selector_sha256: requested '0'"),
            ("", {"unknown": 1}, "unknown: "),
            ("", {"horizon": 4000}, " 4096 positions"),
            ("document", {"tokens": [-1]}, "document.tokens.0: "),
            ("document", {"tokens": [1, 256]}, "256 is not in the vocabulary, 0..255"),
            ("", {"eos_tokens": [2, 256]}, "eos_tokens: 256 is not in the vocabulary, 0..255"),
            ("pending", {"count": 2**30}, " 16777216"),
            ("pending", {"first": 2**31 - 1}, "is too large"),
            ("pending", {"action": ACTION | {"keep": 0.5}}, "an exact fraction"),
            ("pending", {"action": ACTION | {"selector": "snapkv", "keep": 3}}, "action 'a', document 'needle-384-00000': keep = 3 retains 3 of"),
            ("pending", {"action": ACTION | {"name": "a\nb"}}, "pending.0.action.name: "),
            ("pending", {"action": ACTION | {"selector": "this:X"}}, "pending.0.action.selector: "),
            ("pending", {"action": ACTION | {"codec": {"name": "this:X"}}}, "--allow-module this"),
            ("pending", {"action": ACTION | {"codec": {"keys": f"{ALLOWED}:X", "values": "this:X"}}}, "--allow-module this"),
            ("pending", {"action": ACTION | {"codec": {"keys": "int8", "values": {"name": "this:X"}}}}, "--allow-module this"),
            ("pending", {"action": {"name": "a", "keep": 9, "policy": "this:X"}}, "pending.0.action.policy: "),
        ],
    )  # fmt: skip
    def test_requests(
        self, server: Server, asking: GenerationRequest, part: str, change: dict[str, object], line: str
    ) -> None:
        asked = json.loads(asking.encoded())
        {"": asked, "document": asked["document"], "pending": asked["pending"][0]}[part].update(change)
        before = len(server.log())
        with pytest.raises(flight.FlightServerError) as refusal, server.client() as client:
            list(client.do_get(flight.Ticket(json.dumps(asked).encode()), presenting(TOKEN)))
        said = json.loads(refusal.value.extra_info)
        assert said["kind"] == "refused"
        assert line in said["line"]
        assert len(server.log()) == before + 1
        assert said["line"] in server.log()[-1]
        assert "refused do_get from ipv" in server.log()[-1]
        assert server.process.out().count("\n") == 1, "a module that prints was not imported"

    def test_callers_are_not_told_where_files_lie(self, server: Server, asking: GenerationRequest) -> None:
        """The path here is that of a module that the service may import."""
        asked = json.loads(asking.encoded())
        asked["pending"][0]["action"] = ACTION | {"selector": f"{ALLOWED}:Nothing"}
        with pytest.raises(flight.FlightServerError) as refusal, server.client() as client:
            list(client.do_get(flight.Ticket(json.dumps(asked).encode()), presenting(TOKEN)))
        file = "own_selectors.py: "
        assert json.loads(refusal.value.extra_info)["line"].startswith(f"action 'a': …/fixtures/{file}")
        assert str(ROOT) not in str(refusal.value)
        assert f"{ROOT}/tests/fixtures/{file}" in server.log()[-1], "who runs the service can read it"

    def test_the_client_raises_what_the_service_says(self, server: Server, asking: GenerationRequest) -> None:
        endpoint = server.endpoint()
        line = refused(endpoint.generate, asking.model_copy(update={"numerics": 0}), Call())
        assert line.startswith(f"endpoint {endpoint.location}: numerics: requested 0")

    def test_nonsense(self, server: Server, asking: GenerationRequest) -> None:
        draws = random.Random(5)  # noqa: S311 - no secret
        whole = asking.encoded()
        tickets = [b"", b"{", b"null", b"[" * 100_000, b'{"horizon": 1e999}', b"x" * (2**24 + 1), whole[:-1], whole * 2]
        tickets += [draws.randbytes(200) for _ in range(20)]
        for _ in range(20):
            place = draws.randrange(len(whole))
            tickets.append(whole[:place] + b"\xff" + draws.randbytes(2) + whole[place:])
        before = len(server.log())
        with server.client() as client:
            for ticket in tickets:
                with pytest.raises(flight.FlightServerError):
                    list(client.do_get(flight.Ticket(ticket), presenting(TOKEN)))
        assert len(server.log()) == before + len(tickets)
        assert all(len(line) < 500 and line.isprintable() for line in server.log())
        host, port = server.location.removeprefix("grpc+tls://").split(":")
        for _ in range(5):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(draws.randbytes(1000))
        assert server.endpoint().generate(asking, Call())

    def test_everything_else_that_flight_knows(self, server: Server) -> None:
        with server.client() as client:
            before = len(server.log())
            for name, call in calls(client, presenting(TOKEN)).items():
                if name != "identity":
                    with pytest.raises(FLIGHT_ERRORS) as refusal:
                        call()
                    assert "Traceback" not in str(refusal.value)
            assert len(server.log()) == before + 8

    def test_without_or_with_another_token_nothing_is_told(self, server: Server) -> None:
        for token, reason in ((None, "required"), (TOKEN[:-1], "wrong")):
            with server.client() as client:
                for name, call in calls(client, presenting(token)).items():
                    before = len(server.log())
                    with pytest.raises(FLIGHT_ERRORS) as refusal:
                        call()
                    expected = "not part of" if name in NOT_SERVED else reason
                    assert expected in str(refusal.value)
                    assert expected in server.log()[before]
        assert TOKEN[:-1] not in "".join(server.log())
        assert server.endpoint().identity().model == "kvdrift/tiny"

    def test_a_stranger_costs_no_memory(self, server: Server) -> None:
        """Who has no certificate of the token gets nothing sent, however long it is."""
        before = server.peak_megabytes()
        for token, hint in ((None, "--token-file"), (TOKEN[:-1], "the same token")):
            address = ServiceAddress(server.location, token, server.root, timeout=20)
            with server.client(token) as client, pytest.raises(FLIGHT_ERRORS):
                list(client.do_get(flight.Ticket(b"x" * 50_000_000), presenting(token)))
            with pytest.raises(EndpointLost, match=hint):
                address.identity()
        assert server.peak_megabytes() < before + 10

    def test_without_tls_or_trust_one_line_says_so(self, server: Server) -> None:
        plain = server.location.replace("grpc+tls", "grpc")
        with pytest.raises(EndpointLost, match=r"grpc\+tls://"):
            ServiceAddress(plain, TOKEN, timeout=20).identity()
        with pytest.raises(EndpointLost, match="certificate verify failed"):
            ServiceAddress(server.location, TOKEN, timeout=20).identity()


def calls(client: flight.FlightClient, options: flight.FlightCallOptions) -> dict[str, Callable[[], object]]:
    """Every kind of call that a Flight client can make."""
    descriptor = flight.FlightDescriptor.for_command(b"x")

    def put() -> None:
        writer, _ = client.do_put(descriptor, pa.schema([]), options)
        writer.close()

    def exchange() -> None:
        writer, _ = client.do_exchange(descriptor, options)
        writer.close()

    return {
        "do_get": lambda: list(client.do_get(flight.Ticket(b"x"), options)),
        "do_action": lambda: list(client.do_action("shutdown", options)),
        "identity": lambda: list(client.do_action("identity", options)),
        "list_actions": lambda: list(client.list_actions(options)),
        "list_flights": lambda: list(client.list_flights(b"", options)),
        "get_flight_info": lambda: client.get_flight_info(descriptor, options),
        "get_schema": lambda: client.get_schema(descriptor, options),
        "do_put": put,
        "do_exchange": exchange,
    }


def test_terminated_amid_its_work_it_says_so_and_ends_well(spare: Server, asking: GenerationRequest) -> None:
    long = json.loads(asking.encoded()) | {"horizon": 200}
    for item in long["pending"]:
        item["count"] = 2000
    with spare.client() as client:
        ticket = flight.Ticket(json.dumps(long).encode())
        busy = client.do_get(ticket)
        busy.read_chunk()
        waiting = client.do_get(ticket)
        waiting.read_chunk()
        spare.signal(signal.SIGTERM)
        for stream in (busy, waiting):
            with pytest.raises(flight.FlightUnavailableError, match="stopping"):
                list(stream)
    assert spare.process.end(30)[0] == 0
    assert spare.log() == []


class TestProtocol:
    """Requests say all that there is to know."""

    def test_requests_come_back_as_they_were(self, study: Study) -> None:
        parameters = [
            {"name": "a", "selector": "snapkv", "keep": "90%", "window": 32, "kernel": 3},
            {"name": "b", "selector": "recent", "keep": 100, "sinks": 2},
            {"name": "c", "selector": "random", "keep": "2/3", "seed": 5},
            {"name": "d", "policy": {"name": "sliding", "sinks": 2}, "keep": 100},
            {"name": "e", "policy": "h2o", "keep": "1/2"},
            {"name": "f", "codec": "fp8"},
            {"name": "g", "selector": "snapkv", "keep": 100, "codec": {"name": "int4", "group": 16}},
        ]
        sections = [type(study.actions[0]).model_validate(one) for one in parameters]
        other = study.model_copy(update={"actions": sections})
        material = gather_material(other.model_copy(update={"plan": study.plan.model_copy()}))
        identity = identity_for(study)
        for document in material.of_split("development"):
            pending = [
                PendingUnit(action, 3, 2, estimator, of=of)
                for action in material.actions
                for estimator in ("plain", "swrb")
                for of in (None, StudySampling("small-t0.7", Sampling(0.7, 0.9, 20)))
            ]
            request = GenerationRequest.of(other, identity, document, pending, None, (2, 7))
            decoded = GenerationRequest.decoded(request.encoded())
            assert decoded == request
            read, units = requested_work(decoded, ())
            assert units == pending
            assert (read.doc, read.tokens, read.stratum) == (document.doc, document.tokens, document.stratum)


def test_units_that_are_too_many_for_one_request_are_one_for_each_law(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, pending = pending_work_of(study)[0]
    laws = [StudySampling(name, Sampling(temperature)) for name, temperature in (("a", 0.0), ("b", 0.5))]
    several = [replace(unit, of=of) for of in laws for unit in pending]
    assert client.requests(several, 12) == [several]
    monkeypatch.setattr(client, "MAX_EVENTS", 2 * 12 * len(several) - 1)
    assert client.requests(several, 12) == [several[: len(pending)], several[len(pending) :]]


def identity_for(study: Study, **changes: object) -> Identity:
    """Return the identity of an endpoint made for the study, with ``changes``."""
    said = {
        "protocol": PROTOCOL, "schema_version": SCHEMA_VERSION, "numerics": NUMERICS_VERSION, "model": study.model.id, "device": "cpu", "dtype": "float32",
        "revision": None, "positions": 4096, "weights": "w", "eos_tokens": [2], "vocabulary": 256, "versions": {},
    }  # fmt: skip
    return Identity.model_validate(said | changes)


class Fake(ServiceAddress):
    """An endpoint without a server: ``answers`` come one after another, errors are raised, None waits for the end."""

    def __init__(self, name: str, identity: Identity, answers: Sequence[Exception | list[Unit] | None]) -> None:
        super().__init__(f"grpc://{name}:1", timeout=60)
        object.__setattr__(self, "said", identity)
        object.__setattr__(self, "answers", iter(answers))
        object.__setattr__(self, "ended", threading.Event())

    def identity(self) -> Identity:
        return self.said

    def generate(self, request: GenerationRequest, call: Call) -> list[Unit]:
        del request
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            call.opened(self.ended.set)
            assert self.ended.wait(20)
            raise EndpointLost("ended")
        return answer


UNITS = [Unit({}, EVENTS.schema.empty_table())]


class TestOneEndpoint:
    """An endpoint is lost, fails, or serves something else."""

    @pytest.fixture(scope="class")
    def work(self, study: Study, tmp_path_factory: pytest.TempPathFactory) -> Work:
        run = run_of(study, tmp_path_factory.mktemp("work") / "store")
        stages.prepare(run)
        return pending_development(run.store, run.material)

    def run(self, study: Study, work: Work, *answers: Exception | list[Unit] | None) -> list[str]:
        """Return the lines that are said while all the work is done."""
        said: list[str] = []
        made = RemoteGenerator(Fake("a", identity_for(study), answers), [study], said.append, pause=0.01)
        assert len(list(made.generate(study, work))) == len(work)
        return said

    def test_lost_work_is_done_again(self, study: Study, work: Work) -> None:
        gone, still = EndpointLost("a: gone"), EndpointLost("a: still gone")
        said = self.run(study, work, UNITS, gone, still, UNITS, UNITS, UNITS)
        assert [line.partition(";")[0] for line in said] == ["a: gone", "endpoint grpc://a:1: is back"]

    def test_what_came_before_the_endpoint_is_gone_is_kept(self, study: Study, work: Work) -> None:
        endpoint = Fake("a", identity_for(study), [UNITS, *[EndpointLost("a: gone")] * 5])
        made = RemoteGenerator(endpoint, [study], print, pause=0.01).generate(study, work)
        assert next(made) == UNITS
        assert "(a: gone)" in refused(next, made, error=NobodyLeftError)

    def test_work_that_fails_twice_is_an_error(self, study: Study, work: Work) -> None:
        one = WorkFailed("out of memory")
        said = self.run(study, work, one, *[UNITS] * 9)
        assert said[0].startswith("endpoint grpc://a:1: out of memory; ")
        with pytest.raises(WorkFailed, match="out of memory"):
            self.run(study, work[:1], one, one)

    def test_refused_work_is_an_error(self, study: Study, work: Work) -> None:
        with pytest.raises(InputError, match="no such thing"):
            self.run(study, work, InputError("no such thing"))

    def test_whoever_stops_listening_ends_the_call(self, study: Study, work: Work) -> None:
        waiting = Fake("a", identity_for(study), [UNITS, None])
        made = RemoteGenerator(waiting, [study], print).generate(study, work)
        assert next(made) == UNITS
        made.close()
        assert waiting.ended.wait(20)

    @pytest.mark.parametrize(
        ("changes", "line"),
        [
            ({"protocol": 0}, r".*\(protocol 0, here \d+\)"),
            ({"model": "kvdrift/tny"}, r"serves 'kvdrift/tny', the study asks for 'kvdrift/tiny'"),
            ({"dtype": "float16"}, ".*dtype = 'float16', .*'float32'"),
            ({"revision": "main"}, ".*revision = 'main', .* none"),
            ({"device": "cuda:1"}, ".*device = 'cuda', .*'cpu'"),
        ],
    )
    def test_an_endpoint_that_serves_something_else(self, study: Study, changes: dict[str, object], line: str) -> None:
        with pytest.raises(InputError, match=f"endpoint grpc://a:1: {line}"):
            RemoteGenerator(Fake("a", identity_for(study, **changes), []), [study], print).check()

    def test_an_endpoint_that_comes_back_with_other_weights(self, study: Study, work: Work) -> None:
        endpoint = Fake("a", identity_for(study), [UNITS, EndpointLost("a: gone")])
        made = RemoteGenerator(endpoint, [study], print, pause=0.01).generate(study, work)
        next(made)
        object.__setattr__(endpoint, "said", identity_for(study, weights="v"))
        assert "other weights of 'kvdrift/tiny'" in refused(next, made)

    def test_several_models_need_a_cluster(self, study: Study) -> None:
        other = study.model_copy(update={"model": study.model.model_copy(update={"id": "other/model"})})
        made = RemoteGenerator(Fake("a", identity_for(study), []), [study, other], print)
        assert re.fullmatch("--endpoint: .* kvdrift/tiny, other/model; --cluster .*", refused(made.check))

    def test_unlike_gpus_are_refused_or_told_once(self, study: Study) -> None:
        said: list[str] = []
        endpoint = Fake("a", identity_for(study, versions={"gpu": "X"}), [])
        made_on = GpuKinds.of_units(['{"gpu": "Z"}', '{"torch": "2"}', None])
        line = "endpoint grpc://a:1: .* X, .* Z; "
        made = RemoteGenerator(endpoint, [study], said.append)
        made.check()
        with pytest.raises(InputError, match=rf"^{line}.*mixed_gpus = true under \[model\]"):
            made.check(made_on)
        mixed = study.model_copy(update={"model": study.model.model_copy(update={"mixed_gpus": True})})
        made = RemoteGenerator(endpoint, [mixed], said.append)
        for _ in range(2):
            made.check(made_on)
        assert len(said) == 1
        assert re.match(line, said[0])
        RemoteGenerator(Fake("a", identity_for(study), []), [study], said.append).check(made_on)  # a CPU
        assert len(said) == 1

    def test_where_none_answers(self, study: Study) -> None:
        nobody = ServiceAddress("grpc://127.0.0.1:1", timeout=20)
        with pytest.raises(OperationError, match=r"endpoint grpc://127.0.0.1:1: no answer .*refused"):
            RemoteGenerator(nobody, [study], print).check()


@pytest.mark.parametrize(
    ("location", "token", "line"),
    [
        ("http://localhost:1", None, "write grpc://HOST:PORT"),
        ("grpc://localhost", None, "write grpc://HOST:PORT"),
        ("grpc://localhost:99999", None, "write grpc://HOST:PORT"),
        ("localhost:1", None, "write grpc://HOST:PORT"),
        ("grpc://localhost:1/x", None, "write grpc://HOST:PORT"),
        ("grpc://10.0.0.1:1", TOKEN, "unencrypted"),
    ],
)
def test_no_endpoints(location: str, token: str | None, line: str) -> None:
    with pytest.raises(InputError, match=line):
        ServiceAddress(location, token)


def test_loopback() -> None:
    assert [is_loopback(host) for host in ("localhost", "127.0.0.1", "127.8.8.8", "::1")] == [True] * 4
    assert [is_loopback(host) for host in (EVERYONE, "::", "10.0.0.1", "example.org", "")] == [False] * 5


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--host", EVERYONE), "--host 0.0.0.0: "),
        (("--host", "::", "--token-file", "token"), "--host ::: "),
        (("--host", EVERYONE, "--tls-cert", "pem", "--tls-key", "pem"), "--token-file"),
        (("--tls-cert", "pem"), "--tls-cert and --tls-key: "),
        (("--tls-cert", "pem", "--tls-key", "token"), "--tls-key token: is not PEM"),
        (("--token-file", "nowhere"), "--token-file nowhere: cannot be read"),
        (("--token-file", "short"), "--token-file short: 5 characters"),
        (("--token-file", "spaces"), "--token-file spaces: "),
        (("--token-file", "open"), "--token-file open: others can read it (mode 640)"),
        (("--allow-module", "nowhere"), "--allow-module 'nowhere': "),
        (("--allow-module", "my selectors.py"), "--allow-module 'my selectors.py': "),
        (("--port", "70000"), "Invalid value for '--port'"),
    ],
)
def test_mistakes_in_a_call_of_serve(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...], line: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    contents = {"token": TOKEN, "short": "12345", "spaces": "two words of a token", "open": TOKEN}
    for name, content in (contents | {"pem": "-----BEGIN X-----"}).items():
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o640 if name == "open" else 0o600)
    with pytest.raises(SystemExit) as stop:
        main(["serve", "kvdrift/tiny", *arguments])
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert line in err
    assert err.count("\n") == 1


def test_an_address_that_is_taken_is_one_line(capsys: pytest.CaptureFixture[str], server: Server) -> None:
    port = server.location.rsplit(":", maxsplit=1)[1]
    with pytest.raises(SystemExit) as stop:
        main(["serve", "kvdrift/tiny", "--host", "localhost", "--port", port])
    assert stop.value.code == 1
    assert re.fullmatch(f"kvdrift: .* grpc://localhost:{port}: .*\n", capsys.readouterr().err)
