"""Studies on llama.cpp: events in one thread and two, at once and in rounds, killed and gone on with; greedy tokens."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from fixtures.house import ROOT
from fixtures.llama_server import assert_same_events, llama_server
from fixtures.processes import Command, run_command

import kvdrift
from kvdrift.generator.actions import build_actions
from kvdrift.generator.embedded.documents import make_document
from kvdrift.generator.embedded.vocabulary import SYMBOLS
from kvdrift.generator.engines.registry import engine_model
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_FOLDER
from kvdrift.log.store import Store, Unit
from kvdrift.schema.sampling import Sampling
from kvdrift.schema.study import Study, load_studies

pytestmark = pytest.mark.llama_cpp

STUDY = ROOT / "studies" / "llama_cpp.toml"
CLOSE = 1e-6  # of delta and f, as the study file promises; on one processor they are the same bits


def study_with(folder: Path, settings: str) -> Study:
    """The study that is shipped, with other settings of the reference."""
    text = STUDY.read_text(encoding="utf-8")
    assert "threads = 1" in text
    path = folder / f"{len(list(folder.iterdir()))}.toml"
    path.write_text(text.replace("threads = 1", settings))
    (study,) = load_studies(path)
    return study


def generated(study: Study, replicates: int = 8, horizon: int = 32) -> dict[str, Unit]:
    model = engine_model(study)
    chosen = [one for one in build_actions(study) if one.name in {"cache-q8_0", "cache-q4_0", "weights-Q8_0", "floor"}]
    pending = [PendingUnit(action, 0, replicates) for action in chosen]
    units = generate_units(model, "engine", make_document("needle", 384, 0, 7), pending, horizon, 7)
    return {unit.record["action"]: unit for unit in units}


def differences(some: dict[str, Unit], others: dict[str, Unit]) -> dict[str, tuple[int, float]]:
    """Return for each action how many tokens differ, and the largest difference of delta and f."""
    found = {}
    for action, unit in some.items():
        one, other = unit.events, others[action].events
        tokens = sum(int((np.array(one[name]) != np.array(other[name])).sum()) for name in ("x_token", "y_token"))
        moved = max(float(np.abs(np.array(one[name]) - np.array(other[name])).max()) for name in ("delta", "f"))
        found[action] = (tokens, moved)
    return found


def test_threads_and_rounds_move_no_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = generated(study_with(tmp_path, "threads = 1"))
    assert max(whole["floor"].events["delta"].to_pylist()) <= CLOSE
    threads = generated(study_with(tmp_path, "threads = 2"))
    for streams in (8, 2):  # of which a replicate has two; so rounds of four replicates, and of one
        monkeypatch.setattr("kvdrift.generator.engines.model.streams_at_once", lambda *_, streams=streams: streams)
        rounds = generated(study_with(tmp_path, "threads = 1"))
        for other in (threads, rounds):
            found = differences(whole, other)
            assert all(tokens == 0 and moved <= CLOSE for tokens, moved in found.values()), found


def test_without_flash_attention_rounds_move_delta_a_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over the cache depend on the places of entries; activations in 8 bits increase the effect over float32."""
    study = study_with(tmp_path, "threads = 1")
    actions = [one for one in study.actions if one.name in {"weights-Q8_0", "floor"}]
    settings = {"flash_attention": False, "threads": 1}
    study = study.model_copy(
        update={"model": study.model.model_copy(update={"settings": settings}), "actions": actions}
    )
    whole = generated(study)
    monkeypatch.setattr("kvdrift.generator.engines.model.streams_at_once", lambda *_: 8)
    found = differences(whole, generated(study))
    assert found["floor"] <= (0, 1e-4)  # measured: 1.2e-5
    assert found["weights-Q8_0"] <= (0, 2e-2)  # measured: 5.4e-3


def test_the_study_that_is_shipped(tmp_path: Path) -> None:
    """Killed in the evaluation and gone on with, it has the events of one run, ordered as bits are."""
    text = STUDY.read_text(encoding="utf-8")
    for old, new in (("horizon = 64", "horizon = 48"), ("evaluation = 10", "evaluation = 4")):
        text = text.replace(old, new)
    study = tmp_path / "llama_cpp.toml"
    study.write_text(
        text.replace("replicates = 16", "replicates = 6").replace("documents_at_least = 6", "documents_at_least = 4")
    )
    assert run_command("run", study, "--store", tmp_path / "whole")[0] == 0
    command = Command("run", study, "--store", tmp_path / "killed")
    while command.running and "evaluation documents" not in command.err():
        time.sleep(0.1)
    command.kill()
    assert run_command("run", study, "--store", tmp_path / "killed")[0] == 0
    assert_same_events(tmp_path, CLOSE)
    with kvdrift.open(tmp_path / "whole") as views:
        risk = dict(views.sql(
            "select action, rollout_tv from decomposition where split = 'evaluation' and stratum = 'pooled'"
        ).fetchall())  # fmt: skip
        ends = views.sql(
            "select count(*) from estimates where stratum = 'pooled' and quantity = 'mismatch' and low <= high"
        ).fetchall()
    ordered = ["floor", "cache-q8_0", "cache-q5_1", "cache-q8_0-q4_0", "cache-q4_0"]
    assert [risk[name] for name in ordered] == sorted(risk[name] for name in ordered)
    assert risk["weights-Q8_0"] < risk["weights-Q4_0"]
    assert ends[0][0] >= len(risk) - 2  # the floors are no primary endpoints
    page = tmp_path / "whole" / "report" / "llama-cpp" / "index.html"
    text = page.read_text(encoding="utf-8")
    assert "Shows the effect of repetition alone" in text
    assert "the cache of the reference by another kernel: flash_attention false" in text
    units = Store.open(str(tmp_path / "whole")).units("llama-cpp", "kvdrift/tiny-F32.gguf")
    said = json.loads(units["engine"][0].as_py())
    assert said["libraries"].keys() == {"xllamacpp.abi3.so"}
    assert said["read_back"]["flash_attention"] is True


@pytest.mark.parametrize("kind", ["f16", "q4_0"])
def test_greedy_tokens_are_those_of_llama_server(tmp_path: Path, kind: str) -> None:
    from training.gguf_files import write_gguf  # noqa: PLC0415 - needs the extra llama-cpp

    study = study_with(tmp_path, "threads = 1")
    actions = [one for one in study.actions if one.name in {"cache-q4_0", "floor"}]
    greedy = study.model_copy(update={"actions": actions})
    model = replace(engine_model(greedy), sampling=Sampling(temperature=0.0))
    write_gguf(EMBEDDED_FOLDER, tmp_path / "served.gguf", "F32", SYMBOLS)
    with llama_server(tmp_path / "served.gguf", kind) as address:
        for number in range(12):
            document = make_document(("needle", "variable_tracking")[number % 2], 384, number, 7)
            pending = [PendingUnit(action, 0, 1) for action in build_actions(greedy)]
            units = {one.record["action"]: one for one in generate_units(model, "engine", document, pending, 48, 7)}
            ours = np.array(units["cache-q4_0"].events["x_token" if kind == "f16" else "y_token"]).tolist()
            body = {
                "prompt": list(document.tokens), "n_predict": 48, "temperature": 0.0, "samplers": ["temperature"],
                "return_tokens": True, "cache_prompt": False,
            }  # fmt: skip
            answer = httpx.post(f"{address}/completion", json=body, timeout=60)
            theirs = answer.raise_for_status().json()["tokens"]
            end = ours.index(2) + 1 if 2 in ours else len(ours)
            assert theirs[:end] in (ours[:end], ours[: end - 1]), number
