"""Sides that are servers, with fake servers: distributions, slots, lost servers, other servers, refusals, greedy tokens."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fixtures.engine_study import NEEDS, addressed, fake_servers, write_server_study
from fixtures.fake_engine import FakeEngine
from fixtures.fake_server import EOS, FakeServer
from fixtures.study_files import load_study

from kvdrift.generator.actions import build_actions
from kvdrift.generator.embedded.documents import make_document
from kvdrift.generator.engines.engine import Room
from kvdrift.generator.engines.http import apis, connection
from kvdrift.generator.engines.http.apis import whole_distribution
from kvdrift.generator.engines.http.connection import Requests
from kvdrift.generator.engines.http.sessions import SlotSession
from kvdrift.generator.engines.model import EngineModel, RepeatedReference
from kvdrift.generator.engines.registry import engine_model
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.transformer.files.text_ends import TextEnds
from kvdrift.log.store import Unit
from kvdrift.schema.errors import InputError, OperationError
from kvdrift.schema.sampling import Sampling

Pair = tuple[FakeServer, FakeServer]
API = {kind: [('id = "fake"', f'id = "fake"\nsettings = {{ api = "{kind}", {NEEDS} }}')] for kind in ("vllm", "sglang")}


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Pair]:
    with fake_servers(tmp_path) as pair:
        yield pair


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Unit]:
    """The units of two servers that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with fake_servers(folder) as pair:
        return units_of(model_of(folder, pair), folder)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_PAUSE", 0.01)
    monkeypatch.setattr(apis, "_vocabularies", {})  # a server of an earlier test may have had the same port


def model_of(folder: Path, pair: Pair, *changes: tuple[str, str]) -> EngineModel:
    return engine_model(load_study(write_server_study(folder, addressed(pair), *changes)))


def units_of(model: EngineModel, folder: Path, replicates: int = 2) -> dict[str, Unit]:
    actions = build_actions(load_study(folder / "servers.toml"))
    pending = [PendingUnit(action, 0, replicates) for action in actions]
    units = generate_units(model, "servers", make_document("needle", 384, 0, 3), pending, 12, 3)
    return {unit.record["action"]: unit for unit in units}


def events(units: dict[str, Unit]) -> dict[str, np.ndarray]:
    names = ("x_token", "y_token", "delta", "f")
    return {f"{action} {name}": np.array(unit.events[name]) for action, unit in units.items() for name in names}


def assert_same(some: dict[str, Unit], others: dict[str, Unit], apart: float = 0.0) -> None:
    for name, values in events(some).items():
        np.testing.assert_allclose(
            values, events(others)[name], atol=0 if "token" in name else apart, rtol=0, err_msg=name
        )


def in_process(folder: Path, units: dict[str, Unit]) -> None:
    """Compare units with those of the same engine in this process."""
    engine = FakeEngine()
    reference, side = (engine.side(folder / "weights.fake", {"bits": bits, "rows": 1}, "here") for bits in (12, 4))
    sides = {"bits-4": side, "floor": RepeatedReference(reference)}
    model = EngineModel("fake", engine.description(), reference, sides, None, Sampling(), TextEnds({EOS: ()}))
    assert_same(units, units_of(model, folder), 1e-5)


def intercept(server: FakeServer, first: Callable[[str], object]) -> None:
    """Call a function with the path of each request; what it returns, if anything, is the answer."""
    answer = server.answer
    server.answer = lambda path, body: first(path) or answer(path, body)  # type: ignore[method-assign,assignment,return-value]


@pytest.mark.parametrize("kind", ["llama-server", "vllm", "sglang"])
def test_pairs_are_those_of_the_same_engine_in_process(tmp_path: Path, kind: str) -> None:
    with fake_servers(tmp_path, kind) as pair:
        units = units_of(model_of(tmp_path, pair, *API.get(kind, [])), tmp_path)
    in_process(tmp_path, units)
    assert units["bits-4"].events["delta"].to_numpy().max() > 0.01
    record = units["bits-4"].record
    assert record["payload_bytes"] is None
    assert json.loads(record["engine"])["read_back"]["server"] == kind


def test_a_step_computes_one_token_in_a_slot_of_its_own(tmp_path: Path, servers: Pair) -> None:
    units_of(model_of(tmp_path, servers), tmp_path)
    prompt = make_document("needle", 384, 0, 3).prompt_tokens
    for server in servers:
        server.computed.remove(1)  # the distribution by which its tokens are named
        assert set(server.computed) <= {1, prompt}
        assert 2 <= server.computed.count(prompt) <= server.slots


@pytest.mark.slow
def test_fewer_slots_and_more_at_once_change_no_event(tmp_path: Path) -> None:
    found = []
    for slots, requests in ((4, ""), (16, ""), (16, "requests = { at_once = 2 }\n")):
        with fake_servers(tmp_path) as pair:
            for server in pair:
                server.slots = slots
            model = model_of(tmp_path, pair, ("[[documents]]", f"{requests}\n[[documents]]"))
            found.append(units_of(model, tmp_path, 4))
            if requests:
                assert max(server.most_at_once for server in pair) <= 2
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


def test_more_streams_than_slots_are_replayed(tmp_path: Path, servers: Pair) -> None:
    side = model_of(tmp_path, servers).reference
    sessions = [side.open(Room(0, 0, 0)), side.open(Room(0, 0, 0))]
    assert isinstance(sessions[0], SlotSession)
    sessions[1]._slots = sessions[1]._slots[:1]
    tokens = make_document("needle", 384, 0, 3).tokens
    rows = []
    for session in sessions:
        session.prefill(tokens)
        streams = [session.fork(), session.fork()]
        for step in range(4):
            distributions = session.step(streams, [10 + step, 20 + step])
        streams.append(session.fork(streams[0]))
        session.drop(streams[1])
        rows.append((distributions, session.step([streams[0], streams[2]], [30, 31])))
    for one, other in zip(*rows, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_server_that_is_lost_and_comes_back_costs_time_alone(
    tmp_path: Path, servers: Pair, undisturbed: dict[str, Unit]
) -> None:
    model = model_of(tmp_path, servers)
    asked = [0]

    def dying(_: str) -> None:
        asked[0] += 1
        if asked[0] == 20:
            threading.Thread(target=again).start()

    def again() -> None:
        servers[1].stop()
        servers[1].busy = 3  # it loads its model
        servers[1].start()

    intercept(servers[1], dying)
    assert_same(undisturbed, units_of(model, tmp_path))
    assert asked[0] > 20
    assert servers[1].busy == 0


def test_a_server_that_stays_away_is_named(tmp_path: Path, servers: Pair) -> None:
    model = model_of(tmp_path, servers, ("[[documents]]", "requests = { patience = 0 }\n\n[[documents]]"))
    servers[1].stop()
    with pytest.raises(OperationError, match=f"^{servers[1].url}: .* 0 s "):
        units_of(model, tmp_path)
    with pytest.raises(InputError, match=f"^{servers[1].url}: "):
        model_of(tmp_path, servers)


@pytest.mark.parametrize("late", [True, False])
def test_a_server_that_answers_no_request_is_given_up(tmp_path: Path, servers: Pair, *, late: bool) -> None:
    """It is always late; or it crashes on a request and is started again at once, for ever."""
    model = model_of(tmp_path, servers, ("[[documents]]", "requests = { timeout = 1, patience = 1 }\n\n[[documents]]"))

    def crashing(path: str) -> None:
        if path == "/completion":
            raise ConnectionResetError

    servers[0].late = 1.2 * late
    if not late:
        intercept(servers[0], crashing)
    with pytest.raises(OperationError, match=f"^{servers[0].url}/completion: for 1 s, .* within 1 s .* timeout"):
        units_of(model, tmp_path)


def test_a_late_answer_is_asked_for_again(tmp_path: Path, servers: Pair, undisturbed: dict[str, Unit]) -> None:
    model = model_of(tmp_path, servers, ("[[documents]]", "requests = { timeout = 1, patience = 60 }\n\n[[documents]]"))
    asked = [0]

    def late_once(path: str) -> None:
        asked[0] += path == "/completion"
        servers[0].late = 1.2 if asked[0] == 20 else 0.0

    intercept(servers[0], late_once)
    assert_same(undisturbed, units_of(model, tmp_path))


def test_a_key_is_sent_and_stored_nowhere(tmp_path: Path, servers: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    servers[0].key = servers[1].key = "secret-key"
    with pytest.raises(InputError, match=r"401; .* KVDRIFT_SERVER_KEY"):
        model_of(tmp_path, servers)
    monkeypatch.setenv(connection.KEY, "secret-key")
    with pytest.raises(InputError, match=r"^http://10.1.2.3:8080: .* https://"):
        connection.Connection("http://10.1.2.3:8080", Requests(), "/health")
    units = units_of(model_of(tmp_path, servers), tmp_path)
    assert all("secret-key" not in str(unit.record) for unit in units.values())


def test_slots_without_room_are_refused(tmp_path: Path, servers: Pair) -> None:
    servers[1].entries = 400
    with pytest.raises(InputError, match="400 positions of bits-4"):
        units_of(model_of(tmp_path, servers), tmp_path)


def test_a_server_that_changes_within_a_document_makes_no_unit(tmp_path: Path, servers: Pair) -> None:
    model = model_of(tmp_path, servers)

    def changing(_: str) -> None:
        if len(servers[1].computed) > 10:
            servers[1].build = "b2"

    intercept(servers[1], changing)
    with pytest.raises(OperationError, match="build_info was b1, and is b2"):
        units_of(model, tmp_path)


def test_texts_end_where_the_reference_server_says(tmp_path: Path, servers: Pair) -> None:
    """llama-server reports its EOS, and excludes all ends of generation from a text that is to go on."""
    servers[0].ends = (0, EOS, 9)
    model = model_of(tmp_path, servers)
    assert model.ends == TextEnds({EOS: ("the server",), 0: ("the server",), 9: ("the server",)})
    units = units_of(model, tmp_path, 4)
    assert {unit.record["eos_tokens"] for unit in units.values()} == {"2,0,9"}
    for unit in units.values():
        tokens, ended = (unit.events[name].to_numpy().reshape(4, 12) for name in ("x_token", "x_eos"))
        assert ((np.isin(tokens, (0, EOS, 9)).cumsum(axis=1) > 0) == ended).all()
    servers[1].build = "b2"  # so that it is asked again
    servers[1].ends = (7,)
    with pytest.raises(InputError, match=r"action 'bits-4'.* tokens \[7\], .*eos = \[2, 0, 9, 7\]"):
        model_of(tmp_path, servers)
    assert model_of(tmp_path, servers, ("seed = 3", "seed = 3\neos = [7, 2]")).ends.tokens == (7, 2)


@pytest.mark.parametrize(("eos", "tokens"), [(None, None), ("[5]", (5,)), ("[]", ())])
def test_a_server_that_does_not_say_needs_the_study_file(
    tmp_path: Path, eos: str | None, tokens: tuple[int, ...] | None
) -> None:
    with fake_servers(tmp_path) as pair:
        for server in pair:
            server.ends = None
        change = [] if eos is None else [("seed = 3", f"seed = 3\neos = {eos}")]
        if tokens is not None:
            assert model_of(tmp_path, pair, *change).ends.tokens == tokens
            return
        with pytest.raises(InputError, match=r"^model.url: .* eos under \[study\]"):
            model_of(tmp_path, pair)


@pytest.mark.parametrize(
    ("kind", "fact", "value", "said"),
    [
        ("llama-server", "width", 16, "16 channels, .* 8:"),
        ("llama-server", "shift", 1, "the tokenizer"),
        ("vllm", "shift", 1, "the tokenizer"),
        ("llama-server", "leaves_out", 3, "253 of 256"),
        ("llama-server", "slots", 1, "1 slots, and needs 2"),
    ],
)
def test_servers_that_are_no_side_are_refused(tmp_path: Path, kind: str, fact: str, value: int, said: str) -> None:
    with fake_servers(tmp_path, kind) as pair:
        setattr(pair[1], fact, value)
        with pytest.raises(InputError, match=said):
            model_of(tmp_path, pair, *API.get(kind, []))


def test_answers_of_another_form_are_one_line(tmp_path: Path, servers: Pair) -> None:
    intercept(servers[1], lambda path: (200, {"total_slots": "many"}) if path == "/props" else None)
    with pytest.raises(InputError, match=r"^action 'bits-4': .* llama-server .*: ValueError"):
        model_of(tmp_path, servers)
    intercept(servers[1], lambda _: (200, ["nested"]))
    with pytest.raises(InputError, match="is no llama-server"):
        model_of(tmp_path, servers)


def test_distributions_with_missing_tokens_stop_a_run(tmp_path: Path, servers: Pair) -> None:
    model = model_of(tmp_path, servers)
    servers[0].leaves_out = 1
    with pytest.raises(InputError, match="returned 255 of 256"):
        units_of(model, tmp_path)
    with pytest.raises(InputError, match=r"token 7, .* 4:"):
        whole_distribution([0, 7], [-1.0, -1.0], 4, "here")
    with pytest.raises(OperationError, match="sum to 2"):
        whole_distribution([0, 1], [0.0, 0.0], 2, "here")


def test_a_limit_of_log_probabilities_names_the_option(tmp_path: Path) -> None:
    with fake_servers(tmp_path, "vllm") as pair:
        pair[1].max_logprobs = 20
        model = model_of(tmp_path, pair, *API["vllm"])
        with pytest.raises(InputError, match=f"{pair[1].url}: .* 256 .*--max-logprobs -1$"):
            units_of(model, tmp_path)


def test_a_dead_engine_is_a_lost_server(tmp_path: Path, undisturbed: dict[str, Unit]) -> None:
    """A vLLM whose engine has died answers 500 and then ends: the run waits for it, and loses nothing."""
    with fake_servers(tmp_path, "vllm") as pair:
        counted, deaths = [0], [0]

        def dying(path: str) -> object:
            counted[0] += path == "/v1/completions"
            if counted[0] == 20 and not deaths[0]:
                deaths[0], pair[1].dead = 1, True
                threading.Timer(0.2, lambda: setattr(pair[1], "dead", False)).start()
            return None

        intercept(pair[1], dying)
        assert_same(undisturbed, units_of(model_of(tmp_path, pair, *API["vllm"]), tmp_path))
        assert deaths == [1]


def test_a_server_that_keeps_its_connections_and_is_gone_is_found_out(
    tmp_path: Path, servers: Pair, undisturbed: dict[str, Unit], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGTERM a server may answer no open connection: it is asked for its health long before the time-out."""
    monkeypatch.setattr(connection, "_ALIVE", 0.1)
    counted, waited = [0], [True]
    silent, back, ended = (threading.Event() for _ in range(3))

    def silenced(path: str) -> None:
        counted[0] += path == "/completion"
        if counted[0] == 20 and not silent.is_set():
            server = servers[1]._server
            assert server is not None
            server.shutdown()
            server.server_close()  # nobody else is let in
            silent.set()
            waited[0] = ended.wait(60)
        elif silent.is_set() and not back.is_set():
            raise ConnectionResetError

    gone = connection.Connection._gone

    def found_out(asked: connection.Connection) -> str:
        why = gone(asked)
        if why and not back.is_set():
            servers[1].start()
            back.set()
        return why

    monkeypatch.setattr(connection.Connection, "_gone", found_out)
    intercept(servers[1], silenced)
    model = model_of(tmp_path, servers, ("[[documents]]", "requests = { patience = 20 }\n\n[[documents]]"))
    assert_same(undisturbed, units_of(model, tmp_path))
    ended.set()
    assert back.is_set()
    assert waited[0], "the silent request was not waited for"


# What servers write for a probability of 0, as JSON.
ZEROS = {
    "sgl-project/sglang#20323: null": "null",
    "dphnAI/sonar#183: a bare infinity": "-Infinity",
    "vllm-project/vllm#11073: a clamp": "-9999.0",
    "madroidmaq/mlx-omni-server#56: another clamp": "-100",
    "a string": '"-inf"',
    "the lowest float32": "-3.4028234663852886e+38",
}


@pytest.mark.parametrize("zero", ZEROS.values(), ids=ZEROS)
def test_a_probability_of_0_is_read_however_a_server_writes_it(zero: str) -> None:
    distribution = whole_distribution([3, 1, 0, 2], json.loads(f"[-0.693147, {zero}, -0.693147, {zero}]"), 4, "here")
    assert distribution.dtype == np.float32
    np.testing.assert_allclose(np.exp(distribution), [0.5, 0, 0, 0.5], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("[null, null, null, null]", "sum to 0, with 0 for 4 that are null"),  # huggingface/trl#6693: logits were NaN
        ("[-0.693147, null, null, -1.386294]", "sum to 0.75, with 0 for 2"),
        ("[-0.693147, NaN, NaN, -0.693147]", "2 of the server's log-probabilities are NaN"),
        ("[-0.693147, [1], null, -0.693147]", "not all of .* are numbers"),
        ("[0.0, null, Infinity, 800]", "sum to inf"),
    ],
)
def test_numbers_that_are_no_distribution_are_named(written: str, words: str) -> None:
    with pytest.raises(OperationError, match=f"here: .*{words}"):
        whole_distribution([0, 1, 2, 3], json.loads(written), 4, "here")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('url = "REFERENCE"', 'url = "127.0.0.1:1"'), "write an address"),
        (('id = "fake"', 'id = "fake"\nsettings = { apy = "vllm" }'), "unknown setting 'apy' of servers; did you mean 'api'"),
        (('id = "fake"', 'id = "fake"\nsettings = { api = "vlm" }'), "api = 'vlm'"),
        (('id = "fake"', 'id = "fake"\nsettings = { api = "vllm" }'), "vocabulary: missing; vllm does not report"),
        (('id = "fake"', 'id = "fake"\nrequests = { patience = -1 }'), "patience = -1: write 0 to"),
        (*API["vllm"], "is no vLLM"),
        (('id = "fake"', 'id = "fake"\nsettings = { processor = true }'), "processor = true: kvdrift's processor belongs to api = 'vllm'"),
        (('id = "fake"', f'id = "fake"\nsettings = {{ api = "openai", {NEEDS} }}'), "temperature = 0"),
        (('url = "BITS-4"', 'weights = "other.gguf"'), "actions[0].url: missing"),
        (('url = "BITS-4"', 'url = "REFERENCE"'), "is given 2 times"),
        (('engine = "http"', 'engine = "llama.cpp"'), "model.url: belongs to servers"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_of_servers_is_refused(
    tmp_path: Path, servers: Pair, change: tuple[str, str], said: str
) -> None:
    path = write_server_study(tmp_path, {}, change)
    text = path.read_text()
    for name, url in addressed(servers).items():
        text = text.replace(name, url)
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        engine_model(load_study(path))
    assert said in str(refused.value)


def test_greedy_tokens_without_distributions(tmp_path: Path) -> None:
    """The tokens that a server writes at temperature 0, also after the other side's text, are those of its distributions.

    A server's tokens may have the EOS, or lack it.
    """
    greedy = ("horizon = 12", "horizon = 12\ntemperature = 0")
    with fake_servers(tmp_path) as pair:
        distributions = units_of(model_of(tmp_path, pair, greedy), tmp_path, 1)
    assert set(events(distributions)["bits-4 delta"]) <= {0.0, 1.0}
    assert events(distributions)["bits-4 delta"].any()
    settings = f'settings = {{ api = "openai", ahead = 5, {NEEDS} }}'
    with fake_servers(tmp_path, "openai") as pair:
        model = model_of(tmp_path, pair, greedy, ('id = "fake"', f'id = "fake"\n{settings}'))
        for keeps_end in (False, True):
            for server in pair:
                server.keeps_end, server.paths = keeps_end, []
            assert_same(distributions, units_of(model, tmp_path, 1))
            assert sum(server.paths.count("/v1/completions") for server in pair) < 40
        for server in pair:
            server.leaves_out = 1
        with pytest.raises(InputError, match=r"/v1/completions: .* token ids"):
            units_of(model, tmp_path, 1)
