"""The memory plan: its arithmetic compared with real tensors, little memory, and the limits that it reads."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from fixtures.refusals import refused
from torch.profiler import ProfilerActivity, profile

from kvdrift.generator.actions import Action
from kvdrift.generator.attention.holding import DTYPES
from kvdrift.generator.attention.parts import CHUNK
from kvdrift.generator.attention.tables import chunks_of
from kvdrift.generator.checks.random_models import random_document, random_model, save_random_model
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.selectors import Recent
from kvdrift.generator.selectors.kvpress import KVPress
from kvdrift.generator.transformer import memory as planner
from kvdrift.generator.transformer.footprint import plan_memory
from kvdrift.generator.transformer.fused.head import Head
from kvdrift.generator.transformer.memory import PREFILL_CHUNK, ModelShape, available_bytes
from kvdrift.generator.transformer.prompts.document import PreparedPrompt
from kvdrift.schema.errors import OperationError
from kvdrift.schema.retention import Retention
from kvdrift.schema.tables import PLAIN, SWRB

# Llama-3.1-8B.
LARGE = ModelShape(32, 4096, 14_336, 32, 8, 128, 128_256, "bfloat16")
THREE_ACTIONS = [(LARGE, [16_384, 16_384, 512], [64] * 3)]
GIB = 2**30


def test_a_shape_is_that_of_the_configuration(tmp_path: Path) -> None:
    folder = save_random_model(tmp_path / "model", "llama", layers=3)
    config = json.loads((folder / "config.json").read_text())
    shape = ModelShape.of(config, "float32")
    assert shape == ModelShape(3, 64, 96, 4, 2, 16, 96, "float32")
    assert ModelShape.of({**config, "head_dim": None, "num_key_value_heads": None}, "float32").kv_heads == 4
    assert ModelShape.of(config, "float32", "cuda:1") == replace(shape, versions=2)
    assert random_model("llama", layers=3).shape == shape
    with pytest.raises(KeyError):
        ModelShape.of({}, "float32")


def test_bytes_of_an_entry_are_those_of_the_caches() -> None:
    """By hand for the large model: 32 layers x 8 heads x 128 numbers x 2 bytes, keys and values; by tensors for a small one."""
    assert LARGE.entry_bytes == 2 * 32 * 8 * 128 * 2 == 128 * 1024
    model = random_model("qwen2")
    action = Action("recent", "recent", Recent(), Retention(50))
    caches = model.prepare(random_document("d150", 150), [action], horizon=8)
    record = caches.record(1, streams=3)
    assert record["payload_bytes"] == 50 * model.shape.entry_bytes
    assert record["resident_bytes"] - record["payload_bytes"] - record["index_bytes"] - record["metadata_bytes"] == (
        3 * 8 * model.shape.entry_bytes
    )


@pytest.mark.parametrize(
    ("dtype", "vocabulary", "logits", "item"),
    [
        ("bfloat16", 5000, None, 10), ("bfloat16", 5000, "float32", 8), ("float32", 5000, None, 8),
        ("float32", 96, None, 20),
    ],
)  # fmt: skip
def test_bytes_of_a_distribution_are_those_that_are_allocated(
    dtype: str, vocabulary: int, logits: str | None, item: int
) -> None:
    """The largest allocation by torch, distribution included; the plan assumes the larger dtype of logits."""
    layer = torch.nn.Linear(64, vocabulary, bias=False).to(DTYPES[dtype])
    network = SimpleNamespace(lm_head=layer, config=SimpleNamespace())
    hidden, head = torch.ones(64, 64, dtype=DTYPES[dtype]), Head(network, "cpu", logits)
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        room = head.room(64)
        head.distributions(hidden, room)
    changes = [event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    most = max(accumulate(changes))
    shape = replace(LARGE, vocabulary=vocabulary, dtype=dtype)
    assert 64 * vocabulary * item <= most < 1.1 * 64 * vocabulary * item + 2**16 + (logits is not None) * 2**22
    assert shape.distribution_bytes >= vocabulary * item
    assert logits or shape.distribution_bytes == vocabulary * item


def test_a_plan_that_fits() -> None:
    plan = plan_memory(THREE_ACTIONS, 32_768, 128, 60 * GIB, PLAIN)
    assert plan.replicates_at_once == 64
    assert plan.fits
    assert plan.prompt_bytes == (32_768 + 2 * 16_384 + 512) * 128 * 1024
    trial = 5 * 32_768 * 128 * 1024 // (2 * 32)
    assert plan.decoding_bytes == 64 * plan.replicate_bytes + trial
    assert plan.peak_bytes == plan.prompt_bytes + plan.prefill_bytes + plan.decoding_bytes
    twice = plan_memory(THREE_ACTIONS, 32_768, 128, 60 * GIB, PLAIN, packed=True)
    assert twice.prompt_bytes == 1.5 * plan.prompt_bytes  # keys are half of it


def test_few_controls_take_few_streams() -> None:
    """By hand: 64 streams of the reference, two for each of 66 pairs; without a trial, and with one of a few more.

    Residual branching has a reference stream for each pair, and keeps the two streams of its scan.
    """
    entry, distributions, chunk = 8 * 1024, 3 * 96 * 8, 4 * 65 * 4
    shape = ModelShape(8, 64, 96, 4, 2, 64, 96, "float32")
    own = 32 * entry + shape.distribution_bytes + shape.activation_bytes + chunk
    assert shape.decoding_bytes([64, 2], 1000, 32, PLAIN) == 196 * own + 66 * distributions
    tried = shape.decoding_bytes([64, 2], 1000, 32, PLAIN, tried=True)
    assert tried == 256 * own + 66 * distributions + 2560 * entry // 8
    assert shape.decoding_bytes([1] * 3, 1000, 32, SWRB) == 9 * own + 6 * 32 * entry + 3 * distributions


def test_steps_that_can_be_taken_back_have_states_and_scores_twice() -> None:
    """On a GPU: by hand, of 2 streams for each of 3 pairs and of 3 streams of the reference, whose rules score 10 entries."""
    here = ModelShape(8, 64, 96, 4, 2, 64, 96, "float32", without_attention=2, state_bytes=5000)
    there = replace(here, versions=2)
    more = there.decoding_bytes([3], 100, 32, PLAIN, 10) - here.decoding_bytes([3], 100, 32, PLAIN, 10)
    assert more == 9 * (5000 + 4 * (10 + 32) * 8 * 2)


def test_less_memory_means_fewer_replicates_at_once() -> None:
    """As many replicates as fit, and at least one; if not even one fits, the plan says so."""
    at_once = []
    for gib in (8, 9, 10, 12, 16, 24):
        plan = plan_memory(THREE_ACTIONS, 32_768, 128, gib * GIB, PLAIN)
        at_once.append(plan.replicates_at_once)
        assert plan.fits == (gib > 8)
        if plan.fits and plan.replicates_at_once < 64:
            assert plan.peak_bytes + 2 * plan.replicate_bytes > 0.9 * (gib * GIB - plan.prompt_bytes)
    assert at_once == sorted(at_once)
    assert at_once[0] == 1
    assert 1 < at_once[2] < 64
    assert at_once[-1] == 64


def test_partial_results_and_prefill_go_by_chunks() -> None:
    """Of one layer: outputs of 16 bits and a sum of 32 for each chunk of a cache; a short prompt is one chunk."""
    entries = 3 * CHUNK + 1
    assert LARGE.partial_bytes(entries) == int(chunks_of(torch.tensor(entries))) * 32 * (128 * 2 + 4) == 4 * 32 * 260
    for length, at_once in ((10 * PREFILL_CHUNK, PREFILL_CHUNK), (100, 100)):
        plan = plan_memory([(LARGE, [64], [1])], length, 8, GIB, PLAIN)
        assert plan.prefill_bytes == at_once * LARGE.activation_bytes


def test_generation_asks_how_much_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two replicates of two actions, five replicates take three goes; a control beside them one more."""
    model, horizon = random_model("llama"), 6
    room = int(2.5 * model.shape.decoding_bytes([1, 1], 150, horizon, PLAIN) / 0.9)
    monkeypatch.setattr(
        "kvdrift.generator.transformer.prompts.document.available_bytes", lambda device: {"cpu": room}[device]
    )
    opened = []
    kernels = PreparedPrompt.kernels
    monkeypatch.setattr(PreparedPrompt, "kernels", lambda self, *given: opened.append(1) or kernels(self, *given))
    actions = [Action(name, "recent", Recent(), Retention(100)) for name in ("one", "two")]
    units = [PendingUnit(actions[0], 0, 5), PendingUnit(actions[1], 3, 2)]
    generate_units(model, "s", random_document("d150", 150), units, horizon, 3)
    assert len(opened) == 3


@dataclass(frozen=True)
class Working(Recent):
    """Takes the bytes that it is given, or does not know how many."""

    needed: int | None = None

    def working_bytes(self, heads: int, entries: int, item_bytes: int) -> int:  # noqa: ARG002 - the base's
        return heads // (entries - entries) if self.needed is None else self.needed


def test_choosing_that_cannot_fit_is_refused_before_it_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """If everything is kept, nothing is chosen."""
    model, document, needed = random_model("llama"), random_document("d150", 150), 3 * 150**2
    greedy = [Action("greedy", "mine", Working(needed=needed), Retention(kept)) for kept in (100, 150)]
    monkeypatch.setattr("kvdrift.generator.transformer.prompts.document.available_bytes", lambda _: needed - 1)
    line = refused(model.prepare, document, greedy[:1], 6)
    assert line.startswith("action 'greedy': ")
    assert "document 'd150'" in line
    model.prepare(document, greedy[1:], 6)
    monkeypatch.setattr("kvdrift.generator.transformer.prompts.document.available_bytes", lambda _: needed)
    model.prepare(document, greedy, 6)
    vague = [Action("vague", "mine", Working(), Retention(100))]
    line = refused(model.prepare, document, vague, 6, error=OperationError)
    assert line.startswith("selector Working: working_bytes: ZeroDivisionError: ")
    assert Path(__file__).name in line


def test_a_prompt_that_memory_is_too_small_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other failures are not changed."""
    unit = PendingUnit(Action("recent", "recent", Recent(), Retention(50)), 0, 1)
    work = random_model("llama"), "s", random_document("d150", 150), [unit], 6, 3

    def fails(line: str) -> None:
        error = RuntimeError(line)
        monkeypatch.setattr("kvdrift.generator.transformer.prompts.document.Prompt", Mock(side_effect=error))

    fails("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
    line = refused(generate_units, *work, error=OperationError)
    assert line.startswith("document 'd150': ")
    assert "150 tokens" in line
    fails("sizes do not match")
    with pytest.raises(RuntimeError, match="sizes do not match"):
        generate_units(*work)


def test_presses_that_need_the_whole_attention_say_how_much_that_is() -> None:
    """4 heads over 32,768 entries: scores, masked scores and their softmax in 12 bytes, and the mask in 4."""
    whole, norms = (KVPress(press, (), None, ()) for press in ("ObservedAttentionPress", "KnormPress"))
    assert whole.working_bytes(4, 2**15, 4) == 2**30 * (4 * 12 + 4)
    assert norms.working_bytes(4, 2**15, 4) == 0


# --- What is available ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/job", "job", ("memory.max", "memory.current", "inactive_file")),
        ("4:memory:/job", "memory/job", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
        ("0::/elsewhere", "", ("memory.max", "memory.current", "inactive_file")),  # as seen inside a container
    ],
)
def test_control_groups_limit_it(
    line: str, folder: str, names: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limit minus usage plus reclaimable bytes, in both versions; without a limit, or without control groups, no bound."""
    groups, group = tmp_path / "groups", tmp_path / "groups" / folder
    group.mkdir(parents=True)
    (tmp_path / "own").write_text(f"1:cpu:/job\n{line}\n")
    monkeypatch.setattr(planner, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(planner, "GROUPS", groups)
    limit, usage, pages = names
    (group / usage).write_text("300\n")
    (group / "memory.stat").write_text(f"anon 5\n{pages} 40\n")
    (group / limit).write_text("1000\n")
    assert available_bytes("cpu") == 740
    (group / limit).write_text("max\n")
    assert 2**20 < available_bytes("cpu") < 2**50
    monkeypatch.setattr(planner, "OWN_GROUPS", tmp_path / "absent")
    assert 2**20 < available_bytes("cpu") < 2**50


def test_a_gpu_gives_what_torch_holds_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"mem_get_info": (5 * GIB, 80 * GIB), "memory_reserved": 3 * GIB, "memory_allocated": GIB}
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    assert available_bytes("cuda:0") == 7 * GIB
