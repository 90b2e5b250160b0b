"""Decoding steps of a vLLM through kvdrift's processor, in a loop that changes its batch as vLLM does."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fixtures.engine_study import fake_servers
from fixtures.fake_server import EOS, FakeServer
from fixtures.fake_vllm_engine import FakeVllmEngine, load_processor
from fixtures.vllm_server import free_port

from kvdrift.generator.engines.engine import Room, Session
from kvdrift.generator.engines.http import connection, steps
from kvdrift.generator.engines.http.connection import Requests
from kvdrift.generator.engines.http.engine import Servers, ServerSide
from kvdrift.schema.errors import InputError

PROMPT = [10 + number % 200 for number in range(70)]
# The batch as vLLM changes it: no change, prompts in parts, no prefix cache, entries that are discarded, sometimes or
# in each step.
LOOPS: dict[str, dict[str, Any]] = {
    "plain": {}, "parts": {"budget": 24}, "cut prompts": {"budget": 40, "block": 64}, "discarded": {"discards": 7},
    "always discarded": {"discards": 1},
}  # fmt: skip


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    with fake_servers(tmp_path, "vllm") as pair:
        yield pair[0]


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(connection, "_PAUSE", 0.01)
    monkeypatch.setattr(steps, "_LONGEST_SETTLE", 0.04)
    return load_processor(monkeypatch)


def side_of(server: FakeServer, *, steps: bool = True) -> ServerSide:
    settings: dict[str, Any] = {"api": "vllm", "processor": True} if steps else {"api": "vllm", "vocabulary": 256}
    return Servers(Requests(timeout=20, patience=20)).side(server.url, settings, "here").ending((EOS,))


def decoded(sessions: list[Session]) -> list[np.ndarray]:
    """Decode streams of each session, fork one, drop one, and end one with EOS; return all log-probabilities."""
    rows = [session.prefill(PROMPT)[None] for session in sessions]
    opened = [[session.fork() for _ in range(3)] for session in sessions]
    for step in range(6):
        for session, streams in zip(sessions, opened, strict=True):
            if step == 2:
                streams.append(session.fork(streams[0]))
            if step == 4:
                session.drop(streams.pop(1))
        tokens = [
            [EOS if step == 5 and not row else 20 + step + 3 * row for row in range(len(streams))] for streams in opened
        ]
        begun = [session.begin(*each) for session, *each in zip(sessions, opened, tokens, strict=True)]
        rows += [end() for end in begun]
    for session in sessions:
        session.close()
    return rows


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_steps_have_the_distributions_of_whole_histories(
    server: FakeServer, processor: Any, monkeypatch: pytest.MonkeyPatch, loop: dict[str, Any]
) -> None:
    """Two sessions on one server, as those of the reference and of the floor, have those of requests by JSON."""
    engine = FakeVllmEngine(server, processor, free_port(), monkeypatch, **loop)
    by_json = side_of(server, steps=False)
    expected = decoded([by_json.open(Room(70, 4, 6)) for _ in range(2)])
    side = side_of(server)
    assert (side.facts.vocabulary, side.capabilities.most_streams) == (256, 64)
    found = decoded([half.open(Room(70, 4, 6)) for half in side.halves()])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    engine.stop()


def test_streams_that_go_on_are_one_step_of_the_server(
    server: FakeServer, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeVllmEngine(server, processor, free_port(), monkeypatch)
    session = side_of(server).open(Room(70, 4, 40))
    session.prefill(PROMPT)
    streams = [session.fork() for _ in range(4)]
    session.step(streams, [20, 21, 22, 23])
    before = engine.steps
    for step in range(30):
        session.step(streams, [30 + step] * 4)
    assert engine.steps - before == 30
    session.close()
    engine.stop()


def test_a_silent_client_and_a_lost_connection_cost_a_start(
    server: FakeServer, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeVllmEngine(server, processor, free_port(), monkeypatch, wait=0.1)
    session, by_json = side_of(server).open(Room(70, 2, 6)), side_of(server, steps=False).open(Room(70, 2, 6))
    rows, expected = [session.prefill(PROMPT)], [by_json.prefill(PROMPT)]
    stream, other = session.fork(), by_json.fork()
    for token in (20, 21, 22):
        rows += [*session.step([stream], [token])]
        expected += [*by_json.step([other], [token])]
        threading.Event().wait(0.3)  # by then the logits processor has dropped the client
    np.testing.assert_allclose(rows, expected, atol=1e-5)
    session.close()
    engine.stop()


def test_requests_that_are_none_are_refused_or_ended(
    server: FakeServer, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeVllmEngine(server, processor, free_port(), monkeypatch)
    host, port = engine.listens.split(":")

    def posted(value: object) -> int:
        body = {"model": "served", "prompt": [[5, 6]], "max_tokens": 8, "vllm_xargs": {"kvdrift": value}}
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=20).status_code

    request = {"client": "none", "group": 1, "stop": EOS}
    for wrong in ("x", "[]", "{}", json.dumps({**request, "streams": [1]}), json.dumps({"client": "none"})):
        assert posted(wrong) == 400
    for said in (
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"client": "none"}\n[]\n',
        b'{"client": "none"}\n{"group": 1, "tokens": {"0": -1}}\n',
        b"",
    ):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(said)
        assert posted(json.dumps({**request, "streams": []})) == 200
        assert posted(json.dumps({**request, "streams": [[processor.prompt_digest([5, 6]), [7]]]})) == 200
    session = side_of(server).open(Room(70, 2, 6))
    assert session.prefill(PROMPT).shape == (256,)
    engine.stop()


def test_a_server_without_the_processor_and_an_unreachable_processor_are_named(
    server: FakeServer, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=f"{server.url}: .* --logits-processors kvdrift.vllm:Distributions"):
        side_of(server)
    engine = FakeVllmEngine(server, processor, free_port(), monkeypatch)
    monkeypatch.setenv("KVDRIFT_LISTEN", f"127.0.0.1:{free_port()}")
    with pytest.raises(InputError, match="KVDRIFT_LISTEN"):
        side_of(server)
    engine.stop()
    monkeypatch.setenv("KVDRIFT_LISTEN", "8790")
    with pytest.raises(ValueError, match="write HOST:PORT"):
        processor.Distributions.validate_params(SimpleNamespace(extra_args={"kvdrift": "?"}))
