"""Having a study's events generated: one model in memory at a time, and a limit on documents."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from fixtures.small_study import run_command, write_study

from flows import generation
from flows.generation import LocalGenerator
from schema.store.store import Store
from schema.study import load_studies


class Weights:
    """Stands for a model in memory."""


def test_a_model_is_released_before_the_next_one_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    several = ('[model]\nid = "kvdrift/tiny"', '[[model]]\nid = "one"\n\n[[model]]\nid = "other"')
    one, other = load_studies(write_study(tmp_path, several))
    loaded: list[weakref.ref[Weights]] = []

    def load(*_: Any, **__: Any) -> Weights:
        gc.collect()
        assert [held() for held in loaded] == [None] * len(loaded)
        model = Weights()
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(generation, "load_model", load)
    generator = LocalGenerator()
    assert generator.model(one) is generator.model(one)
    assert len(loaded) == 1
    generator.model(other)
    assert len(loaded) == 2


def test_a_limit_stops_and_the_next_run_goes_on(tmp_path: Path, finished: Path) -> None:
    study, store = write_study(tmp_path), tmp_path / "store"
    code, out, _ = run_command("run", study, "--store", store, "--limit", "3")
    assert code == 0
    assert "stopped at --limit 3: 1 documents of this stage are left; run the same command again to go on" in out
    assert "report:" not in out
    assert len(set(Store.open(store).units()["doc"].to_pylist())) == 3
    assert Store.open(store).read("trajectories").num_rows > 0  # what is there can be queried
    code, out, _ = run_command("run", study, "--store", store)
    assert code == 0
    assert "report:" in out
    keys = [("study", "ascending"), ("doc", "ascending"), ("action", "ascending"), ("replicate", "ascending"), ("t", "ascending")]  # fmt: skip
    assert Store.open(store).read("events").sort_by(keys) == Store.open(finished).read("events").sort_by(keys)


def test_a_limit_of_none_is_refused(tmp_path: Path) -> None:
    code, _, err = run_command("run", write_study(tmp_path), "--limit", "0")
    assert code == 2
    assert "--limit" in err
