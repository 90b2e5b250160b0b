"""The seam of engines with a fake one: streams, sides, the floor, identities, bytes, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.command import call
from fixtures.engine_study import write_engine_study
from fixtures.fake_engine import FakeEngine, FakeSession
from fixtures.small_study import evaluate, run_of
from fixtures.study_files import load_study

import kvdrift
from kvdrift.generator.actions import build_actions
from kvdrift.generator.checks.sides import ADAPTER_CHECKS, SideTrial
from kvdrift.generator.checks.trial import Check
from kvdrift.generator.coupling.streams import SharingOptions
from kvdrift.generator.embedded.documents import make_document
from kvdrift.generator.engines import registry
from kvdrift.generator.engines.engine import Room
from kvdrift.generator.engines.model import EngineModel, EngineStreams, PromptSide
from kvdrift.generator.engines.registry import engine_model
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.log.store import Unit
from kvdrift.schema.errors import InputError
from kvdrift.schema.sampling import FULL_SOFTMAX

FORK, LOGITS = FakeSession.fork, FakeSession._logits
NONE_SHARED = SharingOptions(share_streams=False)
ONE_BY_ONE = ("settings = { bits = 12 }", "settings = { bits = 12, rows = 1 }")


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ENGINES, "fake", FakeEngine)


def model_of(folder: Path, *changes: tuple[str, str]) -> tuple[EngineModel, list[PendingUnit]]:
    study = load_study(write_engine_study(folder, *changes))
    return engine_model(study), [PendingUnit(action, 0, 6) for action in build_actions(study)]


def units_of(folder: Path, *changes: tuple[str, str], sharing: SharingOptions | None = None) -> dict[str, Unit]:
    model, pending = model_of(folder, *changes)
    document = make_document("needle", 384, 0, 3)
    units = generate_units(model, "engine", document, pending, 12, 3, *([] if sharing is None else [sharing]))
    return {unit.record["action"]: unit for unit in units}


def events(unit: Unit) -> dict[str, np.ndarray]:
    return {name: np.array(unit.events[name]) for name in ("x_token", "y_token", "delta", "f")}


@pytest.fixture(scope="module")
def invariant(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Unit]:
    """The units of an engine whose rows are invariant."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.ENGINES, "fake", FakeEngine)
        return units_of(tmp_path_factory.mktemp("invariant"), ONE_BY_ONE)


def test_what_is_shared_changes_no_event_where_rows_are_invariant(tmp_path: Path, invariant: dict[str, Unit]) -> None:
    apart = units_of(tmp_path, ONE_BY_ONE, sharing=NONE_SHARED)
    for action, unit in invariant.items():
        for name, values in events(unit).items():
            np.testing.assert_array_equal(values, events(apart[action])[name], err_msg=f"{action} {name}")
    assert invariant["floor"].record["batch_invariant"] is True


def test_the_floor_is_what_batches_do_and_no_more(tmp_path: Path) -> None:
    units = units_of(tmp_path)
    assert set(units) == {"bits-4", "bits-1", "other-weights", "floor"}
    floor = events(units["floor"])["delta"]
    assert 0 < floor.max() < 1e-3
    assert floor.mean() < 0.05 * events(units["bits-4"])["delta"].mean()
    record = units["floor"].record
    assert (record["batch_invariant"], record["batch_deviation"]) == (False, None)


def test_sides_may_differ_at_the_first_position(tmp_path: Path) -> None:
    unit = units_of(tmp_path)["other-weights"]
    first = np.array(unit.events["t"]) == 1
    assert (events(unit)["delta"][first] > 0).all()
    np.testing.assert_array_equal(events(unit)["delta"][first], events(unit)["f"][first])


def test_divergences_along_x_are_those_of_raw_logits(tmp_path: Path, invariant: dict[str, Unit]) -> None:
    """KL and the most probable tokens as llama.cpp's perplexity tool takes them: from both sides' logits on one text."""
    document = make_document("needle", 384, 0, 3)
    write_engine_study(tmp_path)
    side = FakeEngine().side(str(tmp_path / "weights.fake"), {"bits": 12, "rows": 1}, "here")
    for action, bits in (("bits-4", 4), ("bits-1", 1)):
        smaller = replace(side, requested=side.requested | {"bits": bits})
        events, disagree = invariant[action].events.to_pylist(), 0
        for replicate in range(6):
            history = list(document.tokens)
            for event in (row for row in events if row["replicate"] == replicate and row["kl"] is not None):
                p, q = (
                    (logits := FakeSession(one, 4096)._logits(tuple(history), 1).astype(np.float64))
                    - np.log(np.exp(logits).sum())
                    for one in (side, smaller)
                )
                assert event["kl"] == pytest.approx((np.exp(p) * (p - q)).sum(), rel=1e-5, abs=1e-9)
                assert event["top1"] == (p.argmax() == q.argmax())
                disagree += not event["top1"]
                history.append(event["x_token"])
        assert disagree or action == "bits-4"


def test_replicates_in_rounds_are_those_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invariant: dict[str, Unit]
) -> None:
    monkeypatch.setattr("kvdrift.generator.engines.model._LEAST_ENTRIES", 60)  # room for 5 streams: two replicates
    monkeypatch.setattr("kvdrift.generator.engines.model.streams_at_once", lambda *_: 5)
    rounds = units_of(tmp_path, ONE_BY_ONE)
    for action, unit in invariant.items():
        assert unit.events.equals(rounds[action].events), action


def test_units_say_what_the_engine_is_and_measured_bytes(tmp_path: Path) -> None:
    units = units_of(tmp_path)
    tokens = make_document("needle", 384, 0, 3).prompt_tokens
    assert {name: unit.record["payload_bytes"] for name, unit in units.items()} == {
        "bits-4": 4 * tokens, "bits-1": tokens, "other-weights": 12 * tokens, "floor": 12 * tokens,
    }  # fmt: skip
    said = json.loads(units["bits-1"].record["engine"])
    assert (said["engine"], said["asked"]["bits"], said["read_back"]["bits"], said["reference"]["bits"]) == (
        "fake", 1, 1, 12,
    )  # fmt: skip


def test_identities_follow_both_sides_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hashes(*changes: tuple[str, str]) -> dict[str, str | None]:
        model, pending = model_of(tmp_path, *changes)
        return {item.action.name: model.identity(item.action).selector_sha256 for item in pending}

    plain = hashes()
    assert len(set(plain.values())) == len(plain)
    assert hashes() == plain
    changed = hashes(("{ bits = 4 }", "{ bits = 5 }"))
    assert {name for name in plain if changed[name] != plain[name]} == {"bits-4"}
    assert not plain.items() & hashes(("settings = { bits = 12 }", "settings = { bits = 13 }")).items()
    said = {**FakeEngine().description(), "environment": {"FAKE_ROTATE": "0"}}
    monkeypatch.setattr(FakeEngine, "description", lambda _: said)
    assert not plain.items() & hashes().items()


def test_a_study_needs_no_file_of_an_engine(tmp_path: Path) -> None:
    """Weights may be anything that the engine takes; what equals the reference has distances of 0."""
    changes = (
        ('id = "weights.fake"', 'id = "seed:7"'),
        ('"more.fake"', '"seed:7"'),
        ONE_BY_ONE,
        ("horizon = 12", "horizon = 4"),
    )
    run = run_of(load_study(write_engine_study(tmp_path, *changes)), tmp_path / "store")
    evaluate(run)
    with kvdrift.open(tmp_path / "store") as views:
        found = views.sql("select action, max(delta), max(f) from events group by 1").fetchall()
    table = {action: values for action, *values in found}
    assert table["other-weights"] == table["floor"] == [0, 0]
    assert min(table["bits-1"]) > 0


def test_streams_fork_park_and_close(tmp_path: Path) -> None:
    write_engine_study(tmp_path)
    side = FakeEngine().side(str(tmp_path / "weights.fake"), {"rows": 1}, "")
    session = side.open(Room(2, 10, 99))
    kernels = EngineStreams([PromptSide(side, session, session.prefill([1, 3]), None, 0.0)], (2,), FULL_SOFTMAX)
    kernels.open([0])
    distributions = kernels.advance(torch.tensor([7]))
    kernels.park(torch.tensor([0]), torch.tensor([0]))
    kernels.select(torch.tensor([0, 0]))
    both = kernels.advance(torch.tensor([8, 9]))
    assert sorted(session.streams.values()) == [(1, 3, 7), (1, 3, 7, 8), (1, 3, 7, 9)]
    assert not torch.equal(both[0], both[1])
    kernels.rewind()
    assert list(session.streams.values()) == [(1, 3, 7)]
    kernels.select(torch.tensor([0]))  # the parked one, which stays
    again = kernels.advance(torch.tensor([8]))
    torch.testing.assert_close(again[0], both[0], rtol=0, atol=0)
    kernels.close()
    assert session.streams == {}
    np.testing.assert_allclose(distributions.sum(-1), 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('engine = "fake"', 'engine = "fakir"'), "model.engine = 'fakir'"),
        (("{ bits = 4 }", "{ bit = 4 }"), "action 'bits-4': unknown setting 'bit'"),
        (
            ('name = "bits-1"', 'name = "kernel-floor"'),
            "action 'kernel-floor': bits = 1: .* 12",
        ),
        (('"more.fake"', '"none.fake"'), "none.fake: no such file"),
        (('id = "weights.fake"', 'id = "x"'), "^model.id = 'x'"),
        (('"more.fake"', '"x"'), "^action 'other-weights': weights = 'x'"),
        (('"more.fake"', '"unlike.other"'), "action 'other-weights': its weights have a vocabulary of 257"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    study = load_study(write_engine_study(tmp_path, change))
    with pytest.raises(InputError, match=said):
        engine_model(study)


def test_prompts_that_the_weights_cannot_read_are_refused(tmp_path: Path) -> None:
    model, pending = model_of(tmp_path)
    document = make_document("needle", 384, 0, 3)
    with pytest.raises(InputError, match="token 256 "):
        generate_units(model, "engine", replace(document, tokens=(1, 256)), pending, 12, 3)
    with pytest.raises(InputError, match=" 4096 positions "):
        generate_units(model, "engine", document, pending, 4000, 3)


@pytest.mark.parametrize("check", ADAPTER_CHECKS, ids=lambda one: one.name)
def test_the_fake_engine_holds_what_adapters_promise(tmp_path: Path, check: Check) -> None:
    write_engine_study(tmp_path)
    assert check(SideTrial.of(FakeEngine(), str(tmp_path / "weights.fake"))).holds


@pytest.mark.parametrize(
    ("name", "broken", "said"),
    [
        ("fork", lambda self, _=None: FORK(self, None), "differ by"),
        ("drop", lambda _, __: None, "no room"),
        ("prompt_bytes", lambda _: 100, "takes 100 bytes"),
        ("prompt_bytes", lambda _: 0, "takes 0 bytes"),
        ("_logits", lambda self, tokens, rows: LOGITS(self, tokens, 1) * rows, "alone and with others"),
        ("read_back", property(lambda _: {"bits": 16}), "bits: 4 "),
    ],
)
def test_broken_adapters_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, broken: Any, said: str
) -> None:
    write_engine_study(tmp_path)
    monkeypatch.setattr(FakeSession, name, broken)
    tried = SideTrial.of(FakeEngine(), str(tmp_path / "weights.fake"))
    failed = [found.line for found in (check(tried) for check in ADAPTER_CHECKS) if found.holds is False]
    assert any(said in text for text in failed), failed


def test_bytes_that_an_engine_does_not_say_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No check holds that could not be tried."""
    write_engine_study(tmp_path)
    monkeypatch.setattr(FakeSession, "prompt_bytes", lambda _: None)
    code, out, _ = call(capsys, "check", "fake", "--weights", tmp_path / "weights.fake")
    assert code == 0
    assert "?      bytes" in out
    assert out.endswith(f"fake: all {len(ADAPTER_CHECKS) - 1} checks hold; 1 could not be tried\n")
