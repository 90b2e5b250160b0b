"""Studies on real llama-servers: the pairs of llama.cpp in process, killed servers, measured bytes, greedy tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fixtures.command import call
from fixtures.engine_study import study_text
from fixtures.llama_server import LlamaServer, assert_same_events
from fixtures.small_study import evaluate, run_of
from fixtures.study_files import changed, load_study

from kvdrift.generator.actions import build_actions
from kvdrift.generator.embedded.documents import make_document
from kvdrift.generator.embedded.vocabulary import SYMBOLS
from kvdrift.generator.engines.model import EngineModel
from kvdrift.generator.engines.registry import engine_model
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_FOLDER
from kvdrift.log.store import Unit
from kvdrift.schema.sampling import Sampling

pytestmark = pytest.mark.llama_cpp

CLOSE = 2e-3  # of delta and f: rows of one batch in process, and requests that meet as they come over HTTP

Pair = tuple[LlamaServer, LlamaServer]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from training.gguf_files import write_gguf  # noqa: PLC0415 - needs the extra llama-cpp

    file = tmp_path_factory.mktemp("served") / "served.gguf"
    write_gguf(EMBEDDED_FOLDER, file, "F32", SYMBOLS)
    return file


@pytest.fixture(scope="module")
def servers(weights: Path) -> Iterator[Pair]:
    pair = (LlamaServer(weights, "f16", 16, weights.parent), LlamaServer(weights, "q4_0", 8, weights.parent))
    for server in pair:
        server.start()
    yield pair
    for server in pair:
        server.kill()


def write_study(folder: Path, model: str, action: str, horizon: int = 32) -> Path:
    path, text = folder / "servers.toml", study_text("servers", model, action, of="cache-q4_0")
    path.write_text(changed(text, ("horizon = 12", f"horizon = {horizon}"), ("seed = 3", "seed = 7")))
    return path


def served(folder: Path, pair: Pair, more: str = "", horizon: int = 32) -> Path:
    reference, action = pair
    model = f'engine = "http"\nid = "served"\nurl = "{reference.url}"\n{more}'
    started = f'url = "{action.url}"\nsettings = {{ started = "-ctk q4_0 -ctv q4_0" }}'
    return write_study(folder, model, started, horizon)


def in_process(folder: Path, weights: Path) -> Path:
    model = f'engine = "llama.cpp"\nid = "{weights}"\nsettings = {{ threads = 1 }}'
    return write_study(folder, model, 'settings = { type_k = "q4_0", type_v = "q4_0" }')


def units_of(path: Path, document: int, replicates: int = 4, sampling: Sampling | None = None) -> dict[str, Unit]:
    study = load_study(path)
    model: EngineModel = engine_model(study)
    if sampling is not None:
        model = replace(model, sampling=sampling)
    pending = [PendingUnit(action, 0, replicates) for action in build_actions(study)]
    units = generate_units(model, "servers", make_document("needle", 384, document, 7), pending, study.study.horizon, 7)
    return {unit.record["action"]: unit for unit in units}


def column(unit: Unit, name: str) -> np.ndarray:
    return np.array(unit.events[name])


def test_pairs_and_bytes_are_those_in_process(tmp_path: Path, weights: Path, servers: Pair) -> None:
    for document in range(3):
        own = units_of(in_process(tmp_path, weights), document)
        others = units_of(served(tmp_path, servers), document)
        for action in others:
            unit = own[action]
            for name in ("x_token", "y_token"):
                np.testing.assert_array_equal(column(unit, name), column(others[action], name))
            for name in ("delta", "f"):
                assert np.abs(column(unit, name) - column(others[action], name)).max() <= CLOSE
            # A saved slot has a header and the prompt's tokens beside its state.
            measured, saved = unit.record["payload_bytes"], others[action].record["payload_bytes"]
            assert measured < saved <= measured + 4 * unit.record["prompt_entries"] + 256
        assert column(own["cache-q4_0"], "y_token").tolist() != column(own["cache-q4_0"], "x_token").tolist()
        assert column(others["floor"], "delta").max() <= CLOSE


def test_a_server_killed_in_a_run_costs_time_alone(tmp_path: Path, weights: Path) -> None:
    pair = (LlamaServer(weights, "f16", 8).start(), LlamaServer(weights, "q4_0", 4).start())
    study = load_study(served(tmp_path, pair, 'tokenizer = "kvdrift/tiny"', 16))
    times: list[float] = []

    def kill() -> None:
        """Each server in the middle of a document, once there are units."""
        while not (tmp_path / "killed" / "units").is_dir():
            time.sleep(0.02)
        for server in pair:
            time.sleep(times[0] / 8)
            server.kill()
            time.sleep(0.5)
            server.start()

    try:
        began = time.monotonic()
        evaluate(run_of(study, tmp_path / "whole"))
        times.append(time.monotonic() - began)
        killer = threading.Thread(target=kill)
        killer.start()
        evaluate(run_of(study, tmp_path / "killed"))
        assert not killer.is_alive()
    finally:
        killer.join()
        for server in pair:
            server.kill()
    assert assert_same_events(tmp_path, CLOSE) == 16 * 4 * 6 * 2


def test_greedy_tokens_need_no_laws(tmp_path: Path, servers: Pair) -> None:
    """Tokens of ``/v1/completions`` at temperature 0 agree with the laws, and so do delta, f and R."""
    greedy = Sampling(temperature=0.0)
    more = 'settings = { api = "openai", vocabulary = 256, ahead = 8 }'
    for document in range(3):
        laws = units_of(served(tmp_path, servers), document, 1, greedy)
        path = served(tmp_path, servers, more)
        path.write_text(path.read_text().replace("horizon = 32", "horizon = 32\ntemperature = 0\neos = [2]"))
        tokens = units_of(path, document, 1)
        for action, unit in laws.items():
            for name in ("x_token", "y_token", "delta", "f"):
                np.testing.assert_array_equal(
                    column(unit, name), column(tokens[action], name), err_msg=f"{action} {name}"
                )


def test_real_servers_hold_what_a_side_needs(tmp_path: Path, servers: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "check", served(tmp_path, servers))
    assert (code, err) == (0, "")
    assert "all 12 checks hold" in out
    assert "slots 8," in out
    held = [
        int(line.split(": ")[1].split(" bytes")[0].replace(",", "")) for line in out.splitlines() if "  bytes" in line
    ]
    assert held[1] < held[0] / 2  # 16 bits, and 4
