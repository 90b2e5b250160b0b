"""``kvdrift check`` of a study whose sides are servers: checks that hold, and each way in which a server fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.command import call, mistake
from fixtures.engine_study import NEEDS, addressed, fake_servers, write_server_study
from fixtures.fake_server import FakeServer

from kvdrift.generator.engines.http import connection


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_PAUSE", 0.01)


@pytest.mark.parametrize("kind", ["llama-server", "vllm", "sglang", "openai"])
@pytest.mark.by_default("llama-server", "openai")
def test_servers_that_hold_what_a_side_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    more = "" if kind == "llama-server" else f'settings = {{ api = "{kind}", {NEEDS} }}'
    changes = [('id = "fake"', f'id = "fake"\n{more}')]
    if kind == "openai":
        changes.append(("horizon = 12", "horizon = 12\ntemperature = 0"))
    with fake_servers(tmp_path, kind) as pair:
        path = write_server_study(tmp_path, addressed(pair), *changes)
        code, out, err = call(capsys, "check", path)
    assert (code, err) == (0, "")
    # Fake servers save no slots, so bytes are unknown on both; without distributions, distributions are too.
    unknown = 4 if kind == "openai" else 2
    assert out.endswith(f"{path}: all {12 - unknown} checks hold; {unknown} could not be tried\n")
    assert out.count("?      bytes ") == 2
    for words in (f"reference at {pair[0].url}", f"bits-4 at {pair[1].url}", "the same bits twice", f"server {kind}"):
        assert words in out, words


def _unrepeatable(server: FakeServer) -> None:
    distribution, asked = server.distribution, [0]

    def drifting(tokens: list[int]) -> object:
        asked[0] += 1
        return distribution([*tokens, asked[0] % 200])

    server.distribution = drifting  # type: ignore[method-assign,assignment]


def _deaf(server: FakeServer) -> None:
    """The distributions depend on the prompt alone, so that streams with unlike tokens have one distribution."""
    distribution = server.distribution
    server.distribution = lambda tokens: distribution(tokens[:48])  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("fault", "name", "said"),
    [
        (lambda server: setattr(server, "forgets", True), "fork", "slot"),
        (_unrepeatable, "repetition", "total variation"),
        (_deaf, "fork", "different tokens"),
    ],
)
def test_a_server_that_does_not_hold_it_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: object, name: str, said: str
) -> None:
    with fake_servers(tmp_path) as pair:
        path = write_server_study(tmp_path, addressed(pair))
        fault(pair[1])  # type: ignore[operator]
        code, out, _ = call(capsys, "check", path)
    assert code == 1
    reference, action = out.split("bits-4 at ")
    assert "FAILS" not in reference
    (line,) = [line for line in action.splitlines() if line.startswith(f"FAILS  {name}")]
    assert said in line


def test_a_distribution_that_lacks_tokens_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_servers(tmp_path, "vllm") as pair:
        settings = f'id = "fake"\nsettings = {{ api = "vllm", {NEEDS} }}'
        path = write_server_study(tmp_path, addressed(pair), ('id = "fake"', settings))
        pair[1].leaves_out = 2
        code, out, _ = call(capsys, "check", path)
    assert code == 1
    assert "FAILS  logits" in out
    assert "254 of 256" in out


def test_a_study_without_an_engine_has_nothing_to_check(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[3] / "studies" / "quickstart.toml"
    assert "no engine" in mistake(capsys, "check", path)
