"""Documents that are generated side by side, in one thread or two: the events of one document by itself, and its end."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fixtures.common_actions import CONTROL, HALF_SNAPKV

from kvdrift.generator.actions import Action
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.checks.random_models import random_document, random_model
from kvdrift.generator.coupling.rollout import CoupledSteps, DocumentReplicates, rollout_documents
from kvdrift.generator.coupling.streams import StreamDecoder
from kvdrift.generator.generation import PendingUnit, generate_documents, generate_together, generate_units, together
from kvdrift.generator.generation import units as generation
from kvdrift.generator.generation.units import library_versions, versions_on
from kvdrift.generator.selectors import Recent
from kvdrift.generator.selectors.h2o import H2O
from kvdrift.generator.selectors.selector import Selector
from kvdrift.generator.transformer import loading
from kvdrift.generator.transformer.loading import LoadedModel
from kvdrift.log.store import Unit
from kvdrift.schema.document import Document
from kvdrift.schema.errors import OperationError
from kvdrift.schema.retention import Retention
from kvdrift.schema.tables import SWRB

HORIZON, SEED = 10, 3
HEAVY = Action("h2o", "h2o", H2O(), Retention.parse("60%"))  # has statistics, gathered by hooks of the network
ITEMS = [PendingUnit(HALF_SNAPKV, 0, 6), PendingUnit(HEAVY, 2, 3), PendingUnit(CONTROL, 0, 2)]
# Unlike lengths, some on either side of where the CPU's attention takes another form; not all lack the same.
WORK = [
    (random_document("a", 300), ITEMS),
    (random_document("b", 140), ITEMS[:2]),
    (random_document("c", 520), [replace(ITEMS[0], estimator=SWRB), *ITEMS]),
    (random_document("d", 140), ITEMS[1:]),
    (random_document("e", 300), [replace(ITEMS[0], estimator=SWRB)]),
]


def by_name(documents: list[list[Unit]]) -> dict[tuple[str, str, str], Unit]:
    units = [unit for units in documents for unit in units]
    return {(unit.record["doc"], unit.record["action"], unit.record["estimator"]): unit for unit in units}


def assert_same(one: list[list[Unit]], other: list[list[Unit]]) -> None:
    units, twins = by_name(one), by_name(other)
    assert units.keys() == twins.keys()
    for name, unit in units.items():
        assert unit.events.equals(twins[name].events), name
        for column in ("kernel_evaluations", "pair_evaluations", "kept_sha256", "payload_bytes", "resident_bytes"):
            assert unit.record[column] == twins[name].record[column], (name, column)


def alone(model: LoadedModel) -> list[list[Unit]]:
    return [generate_units(model, "s", document, pending, HORIZON, SEED) for document, pending in WORK]


@pytest.mark.parametrize(("kind", "dtype"), [("llama", "float32"), ("qwen3", "float32"), ("qwen2", "bfloat16")])
@pytest.mark.by_default("qwen2-bfloat16")
def test_events_are_the_same_side_by_side_and_in_two_threads(
    kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise."""
    model = random_model(kind, dtype)
    expected = alone(model)
    assert_same(generate_together(model, "s", WORK, HORIZON, SEED), expected)
    monkeypatch.setattr(loading, "_PAIRS_AT_ONCE", 20)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert len(list(together(model.pairs_at_once, WORK))) > 2
    before = torch.get_num_threads()
    assert_same(list(generate_documents(model, "s", WORK, HORIZON, SEED)), expected)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ],
    ids=["gpu", "cpu", "cublas", "numpy"],
)
@pytest.mark.parametrize("most", [2, 0])
@pytest.mark.by_default("2-gpu", "0-cpu", "0-cublas", "0-numpy")
def test_where_memory_is_short_half_as_many_replicates_are_decoded_at_once(
    monkeypatch: pytest.MonkeyPatch, error: Exception, most: int
) -> None:
    """Down to one; the events are the same."""
    model, (document, _) = random_model("llama"), WORK[1]
    expected = generate_units(model, "s", document, ITEMS, HORIZON, SEED) if most else []
    tried: list[int] = []

    def short(kernels: StreamDecoder, documents: Sequence[DocumentReplicates], *others: Any) -> list[CoupledSteps]:
        tried.append(max(len(action.replicates) for action in documents[0].actions))
        if tried[-1] > most:
            raise error
        return rollout_documents(kernels, documents, *others)

    monkeypatch.setattr(generation, "rollout_documents", short)
    if most:
        units = generate_units(model, "s", document, ITEMS, HORIZON, SEED)
        assert all(unit.events.equals(whole.events) for unit, whole in zip(units, expected, strict=True))
        assert tried == [6, 3, 1, 1, 1, 1, 1, 1]
    else:
        with pytest.raises(OperationError, match=r"^document 'b': .* 3 actions"):
            generate_units(model, "s", document, ITEMS, HORIZON, SEED)
        assert tried == [6, 3, 1]


def test_another_error_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Mock(side_effect=RuntimeError("CUDA error: an illegal memory access was encountered"))
    monkeypatch.setattr(generation, "rollout_documents", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        generate_units(random_model("llama"), "s", WORK[1][0], ITEMS, HORIZON, SEED)
    assert broken.call_count == 1


def test_units_say_which_gpu_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", {"cuda:1": "NVIDIA X"}.__getitem__)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    assert versions_on("cpu") == library_versions()
    assert versions_on("cuda:1") == {**library_versions(), "gpu": "NVIDIA X", "cuda": "13.0"}
    monkeypatch.setattr(generation, "versions_on", lambda _: versions_on("cuda:1"))
    (unit,) = generate_units(random_model("llama"), "s", WORK[1][0], ITEMS[2:], HORIZON, SEED)
    assert json.loads(unit.record["versions"])["gpu"] == "NVIDIA X"


def test_what_keeps_the_device_busy_is_generated_one_by_one() -> None:
    small = random_model("llama")
    assert small.pairs_at_once
    for other in (
        replace(small, threads=None),
        replace(small, device="cuda"),
        replace(small, rows=replace(small.rows, deviation=1e-6)),
    ):
        assert [len(part) for part in together(other.pairs_at_once, WORK)] == [1] * len(WORK)


def test_threads_get_equally_many_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three parts would leave one of two threads without work half of the time."""
    monkeypatch.setattr(loading, "_PAIRS_AT_ONCE", 96)
    model, work = (
        random_model("llama"),
        [(random_document(f"d{i}", 80), [PendingUnit(CONTROL, 0, 16)]) for i in range(18)],
    )
    assert [len(part) for part in together(model.pairs_at_once, work)] == [6, 6, 6]
    assert [len(part) for part in together(model.pairs_at_once, work, threads=2)] == [5, 5, 5, 3]
    large = [
        (document, [PendingUnit(CONTROL, 0, count)])
        for (document, _), count in zip(work, (100, 1, 200, 16), strict=False)
    ]
    assert [len(part) for part in together(model.pairs_at_once, large, threads=2)] == [1, 1, 1, 1]


@dataclass(frozen=True)
class Failing(Recent):
    """Fails on prompts of 90 tokens."""

    def keep(self, layer: PromptLayer, kept: int) -> torch.Tensor:
        if layer.key.shape[1] == 90:
            message = "this prompt"
            raise ValueError(message)
        return super().keep(layer, kept)


def of_selector(selector: Selector, count: int) -> list[tuple[Document, list[PendingUnit]]]:
    """Documents of 120 tokens, and a last one of 90."""
    action = Action("own", "own", selector, Retention.parse("1/2"))
    lengths = [120] * (count - 1) + [90]
    return [(random_document(f"d{i}", length), [PendingUnit(action, 0, 20)]) for i, length in enumerate(lengths)]


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_PAIRS_AT_ONCE", 20)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})


def generating() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("generation")]


@pytest.mark.usefixtures("two_threads")
def test_an_error_of_a_thread_ends_the_work() -> None:
    made = generate_documents(random_model("llama"), "s", of_selector(Failing(), 4), HORIZON, SEED)
    with pytest.raises(OperationError, match=r"selector Failing: .*this prompt"):
        list(made)
    assert generating() == []


WAITING, RELEASED = threading.Semaphore(0), threading.Event()


@dataclass(frozen=True)
class Waiting(Recent):
    """Waits on prompts of 120 tokens."""

    def keep(self, layer: PromptLayer, kept: int) -> torch.Tensor:
        if layer.key.shape[1] == 120:
            WAITING.release()
            assert RELEASED.wait(60)
        return super().keep(layer, kept)


@pytest.mark.usefixtures("two_threads")
def test_closing_in_the_middle_stops_the_threads_at_their_next_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread gives up its present work and begins no more, as after Ctrl-C."""
    ends: list[str] = []

    def watched(*given: Any) -> list[list[Unit]]:
        try:
            made = generate_together(*given)
        except Exception as error:
            ends.append(type(error).__name__)
            raise
        ends.append("whole")
        return made

    monkeypatch.setattr(generation, "generate_together", watched)
    made = generate_documents(random_model("llama"), "s", of_selector(Waiting(), 6)[::-1], HORIZON, SEED)
    (unit,) = next(made)
    assert unit.record["prompt_entries"] == 90
    assert WAITING.acquire(timeout=60)
    assert WAITING.acquire(timeout=60), "both threads have begun another document"
    release = threading.Timer(0.5, RELEASED.set)
    release.start()
    made.close()
    assert ends == ["whole", "StoppedError", "StoppedError"]
    assert generating() == []
