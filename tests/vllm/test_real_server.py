"""A real vLLM as a side: its own decoding steps and JSON, faults of the server, of the client and of others."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fixtures.command import call
from fixtures.house import ROOT
from fixtures.vllm_server import ALL, CHECKPOINT, STEPS, VllmServer, has_avx512, other_weights
from numpy.typing import NDArray

import kvdrift
from kvdrift.generator.engines.engine import Room, Session
from kvdrift.generator.engines.http.connection import Requests
from kvdrift.generator.engines.http.engine import Servers, ServerSide
from kvdrift.generator.engines.http.steps import StepServer

pytestmark = pytest.mark.vllm

VOCABULARY, ENTRY_BYTES = 256, 2 * 3 * 2 * 32 * 4  # of the embedded model: keys and values, layers, heads, size, bytes
HORIZON = 8
WAIT = 3.0  # seconds for which the server ``chunked`` waits for a silent client
STUDY = """
[study]
name = "{name}"
horizon = {horizon}
seed = 3

[model]
engine = "http"
id = "kvdrift/tiny"
url = "{reference}"
settings = {{ api = "vllm"{more} }}

[[documents]]
source = "embedded"
tasks = ["needle"]
length = 384
stratum = "needle"
development = 2
evaluation = 2

[[actions]]
name = "changed"
url = "{changed}"

[plan]
baseline = "changed"
primary = ["mismatch"]
replicates = 2
documents = 2
development_replicates = 2
draws = 100
exploratory_draws = 100
"""


@dataclass(frozen=True)
class Served:
    """The servers of the tests.

    Attributes:
        reference: The embedded model.
        changed: Entries in fp8 where the processor can, else other weights; without a tokenizer.
        chunked: The embedded model with 256 tokens in a step, which waits for silent clients for ``WAIT`` seconds, and
            returns 20 log-probabilities at most.
    """

    reference: VllmServer
    changed: VllmServer
    chunked: VllmServer


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("vllm")
    changed = (
        VllmServer(folder, CHECKPOINT, *ALL, *STEPS, "--skip-tokenizer-init", "--kv-cache-dtype", "fp8_e5m2")
        if has_avx512()
        else VllmServer(folder, other_weights(folder / "other"), *ALL, *STEPS, "--skip-tokenizer-init")
    )
    servers = Served(
        VllmServer(folder, CHECKPOINT, *ALL, *STEPS),
        changed,
        VllmServer(folder, CHECKPOINT, *STEPS, "--max-num-batched-tokens", "256", wait=WAIT),
    )
    every = [servers.reference, servers.changed, servers.chunked]
    try:
        for server in every:
            server.start()
        for server in every:
            server.wait()
        yield servers
    finally:
        for server in every:
            server.kill()


def write_study(folder: Path, name: str, reference: VllmServer, changed: VllmServer, more: str = "") -> Path:
    path = folder / f"{name}.toml"
    texts = {"name": name, "reference": reference.url, "changed": changed.url, "more": more, "horizon": HORIZON}
    path.write_text(STUDY.format(**texts))
    return path


def side_of(server: VllmServer, *, steps: bool = True) -> ServerSide:
    settings = {"api": "vllm", "vocabulary": VOCABULARY, "processor": steps}
    return Servers(Requests(timeout=60, patience=120)).side(server.url, settings, "here").ending((2,))


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(10, VOCABULARY, count)]


def decoded(session: Session, prompt: list[int], streams: int = 3, steps: int = 4) -> NDArray[np.float32]:
    """Decode streams of a prompt, one of which is forked midway; return all log-probabilities."""
    rows = [session.prefill(prompt)[None]]
    opened = [session.fork() for _ in range(streams)]
    for step in range(steps):
        if step == steps // 2:
            opened.append(session.fork(opened[0]))
        rows.append(session.step(opened, [20 + step + 3 * number for number in range(len(opened))]))
    session.close()
    return np.concatenate(rows)


def distances(some: NDArray[np.float32], others: NDArray[np.float32]) -> float:
    """Return the largest total variation of corresponding distributions."""
    return float(np.abs(np.exp(some.astype(float)) - np.exp(others.astype(float))).sum(axis=-1).max() / 2)


def events_of(store: Path) -> dict[str, Any]:
    with kvdrift.open(store) as views:
        return dict(views.sql("select * from events order by doc, action, replicate, t").fetchnumpy())


def assert_same(some: dict[str, Any], others: dict[str, Any], close: float) -> None:
    for name in ("doc", "action", "replicate", "t", "x_token", "y_token", "x_eos", "y_eos"):
        np.testing.assert_array_equal(some[name], others[name], err_msg=name)
    for name in ("delta", "f"):
        np.testing.assert_allclose(some[name], others[name], atol=close, rtol=0, err_msg=name)


def restarted(server: VllmServer, end: Callable[[], None]) -> threading.Thread:
    """End a server, and start it again in a thread a moment later."""

    def again() -> None:
        time.sleep(2)
        server.kill()
        server.start()

    end()
    thread = threading.Thread(target=again)
    thread.start()
    return thread


@pytest.fixture(scope="module")
def measured(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the study ``steps`` and its store, run to its page while a server is shut down and killed."""
    folder, changed = tmp_path_factory.mktemp("studies"), served.changed
    receive, received, threads = StepServer._receive, [0], list[threading.Thread]()

    def counted(self: StepServer) -> None:
        received[0] += 1
        if received[0] == 15:
            threads.append(restarted(changed, lambda: changed.signal(signal.SIGTERM)))
        if received[0] == 35:
            threads.append(restarted(changed, changed.kill_engine))
        receive(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepServer, "_receive", counted)
        study = write_study(folder, "steps", served.reference, changed, ", processor = true")
        assert kvdrift.run(study, folder / "steps", progress=False) is not None
    assert len(threads) == 2
    threads[-1].join()
    changed.wait()
    return folder


def test_events_by_steps_and_lost_servers_are_those_by_json(served: Served, measured: Path) -> None:
    study = write_study(measured, "json", served.reference, served.changed, ", vocabulary = 256")
    assert kvdrift.run(study, measured / "json", progress=False) is not None
    steps, by_json = events_of(measured / "steps"), events_of(measured / "json")
    assert len(steps["t"]) == 2 * 2 * (2 + 2) * HORIZON
    assert_same(steps, by_json, 1e-4)
    assert steps["delta"][steps["action"] == "changed"].max() > 0.01
    assert steps["delta"][steps["action"] == "floor"].max() < 1e-4


def test_a_server_says_how_it_stores_entries(measured: Path) -> None:
    with kvdrift.open(measured / "steps") as views:
        units = views.sql("select action, prompt_entries, payload_bytes, engine from units").fetchall()
    width = 4 if not has_avx512() else 1
    for action, entries, held, engine in units:
        assert held == entries * (ENTRY_BYTES * width // 4 if action == "changed" else ENTRY_BYTES)
        kind = "fp8_e5m2" if width == 1 and action == "changed" else "auto"
        assert json.loads(engine)["read_back"]["cache_dtype"] == kind


def test_the_checks_of_both_sides_hold(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = write_study(tmp_path, "checked", served.reference, served.changed, ", processor = true")
    code, out, err = call(capsys, "check", study)
    assert (code, err) == (0, "")
    assert out.endswith(f"{study}: all 12 checks hold\n")


def test_a_limit_of_log_probabilities_names_the_option(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    study = write_study(tmp_path, "limited", served.chunked, served.changed, ", vocabulary = 256")
    code, _, err = call(capsys, "run", study)
    assert code == 2
    assert re.search(rf"^kvdrift: .*{served.chunked.url}.*256.*--max-logprobs -1$", err, re.MULTILINE)


def test_prompts_in_parts_are_read_whole(served: Served) -> None:
    """With 256 tokens in a step prompts are read in parts, at several steps; the distributions are the same."""
    prompt = tokens_of(700)
    rows = [decoded(side_of(server).open(Room(700, 4, 4)), prompt) for server in (served.reference, served.chunked)]
    assert distances(*rows) < 1e-4


def test_many_prompts_at_once_leave_the_server_alive(served: Served) -> None:
    """A seed in such requests ends a server on a CPU: "CPU Generator does not use offset"."""
    side = side_of(served.reference, steps=False)
    prompts = [tuple(tokens_of(400, seed)) for seed in range(12)]
    rows = side.connection.at_once(prompts, lambda prompt: side.open(Room(400, 1, 1)).prefill(prompt), 12)
    assert np.shape(rows) == (12, VOCABULARY)


def test_the_benchmark_runs(served: Served) -> None:
    sizes = ("--documents=1", "--prompt=64", "--replicates=1", "--horizon=2", "--json")
    servers = (f"--model={CHECKPOINT}", f"--reference={served.reference.url}", f"--action={served.changed.url}")
    command = [sys.executable, "-m", "benchmarks.served", *servers, *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [row["part"] for row in json.loads(done.stdout)["rows"]] == ["json", "steps"]


def posted(server: VllmServer, value: object, seconds: float = 60.0, count: int = 1) -> int:
    body = {"model": "served", "prompt": [tokens_of(50)] * count, "max_tokens": 40, "vllm_xargs": {"kvdrift": value}}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=seconds).status_code


def test_requests_that_break_off_and_other_clients_hold_nobody_up(served: Served) -> None:
    server, prompt = served.chunked, tokens_of(300)
    side = side_of(server)
    before = decoded(side.open(Room(300, 4, 4)), prompt)
    silent = json.dumps({"client": "silent", "group": 1, "streams": [], "stop": 2})
    for number in range(200):
        kind = number % 8
        if kind == 0:  # another form
            assert (
                posted(
                    server,
                    ["x", '{"client": 1}', '{"client": "x", "group": "y", "streams": [], "stop": 1}', "[]"][number % 4],
                )
                == 400
            )
        elif kind == 1:  # a client that never connected
            assert posted(server, json.dumps({"client": f"no-{number}", "group": 1, "streams": [], "stop": 2})) == 200
        elif kind == 2:  # no client of this kind
            with socket.create_connection(("127.0.0.1", server.listens)) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        else:  # broken off at once, or while the server works
            with suppress(httpx.TimeoutException):
                posted(server, json.dumps({"client": "x", "group": number, "streams": [], "stop": 2}), 0.002 * kind)
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.listens)) as connection:  # a client that says nothing more
        connection.sendall(b'{"client": "silent"}\n')
        assert posted(server, silent) == 200
    assert time.monotonic() - began < WAIT + 5
    one, other = side.open(Room(300, 4, 4)), side_of(server).open(Room(300, 4, 4))
    first = one.prefill(prompt), other.prefill(prompt)
    np.testing.assert_allclose(*first, atol=1e-4)
    streams = one.fork(), other.fork()
    for token in (20, 30, 40):
        np.testing.assert_allclose(one.step([streams[0]], [token]), other.step([streams[1]], [token]), atol=1e-4)
    one.close()
    other.close()
    assert distances(before, decoded(side.open(Room(300, 4, 4)), prompt)) < 1e-4


def test_an_abandoned_group_ends_in_its_time(served: Served) -> None:
    """A client that keeps its connection and gives no token is dropped; when it goes on, it asks again."""
    side = side_of(served.chunked)
    session = side.open(Room(100, 2, 4))
    session.prefill(tokens_of(100))
    stream = session.fork()
    first = session.step([stream], [20])
    time.sleep(WAIT + 1)
    assert posted(served.chunked, json.dumps({"client": "none", "group": 1, "streams": [], "stop": 2}), 10.0) == 200
    second = session.step([stream], [21])
    session.close()
    whole = side.open(Room(100, 2, 4))
    np.testing.assert_allclose(whole.prefill([*tokens_of(100), 20]), first[0], atol=1e-4)
    np.testing.assert_allclose(whole.prefill([*tokens_of(100), 20, 21]), second[0], atol=1e-4)
    whole.close()
