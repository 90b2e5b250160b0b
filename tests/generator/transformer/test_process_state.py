"""Loading a model and generating with it leave neither threads nor the model behind in the process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fixtures.common_actions import CONTROL, HALF_SNAPKV

from kvdrift.generator.actions import Action
from kvdrift.generator.attention import threads as attention_threads
from kvdrift.generator.attention.threads import torch_threads
from kvdrift.generator.checks.random_models import random_document, save_random_model
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.selectors import SnapKV
from kvdrift.generator.selectors.expected_attention import ExpectedAttention
from kvdrift.generator.transformer import decoder
from kvdrift.generator.transformer.loading import load_model
from kvdrift.generator.transformer.prompts.streams import TransformerStreams
from kvdrift.schema.errors import InputError
from kvdrift.schema.free_processors import FreeProcessors
from kvdrift.schema.retention import Retention
from kvdrift.schema.tables import PLAIN, SWRB

DOCUMENT = random_document("d150", 150)
ACTIONS = [HALF_SNAPKV, Action("b", "expected_attention", ExpectedAttention(), HALF_SNAPKV.retention)]
PENDING = [PendingUnit(action, 0, 2, estimator) for action in ACTIONS for estimator in (PLAIN, SWRB)]


@pytest.fixture
def three_threads() -> Iterator[None]:
    """A caller who has chosen three threads."""
    with torch_threads(3):
        yield


@pytest.fixture
def threads_of_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of threads at every step of decoding."""
    seen = []
    advance = TransformerStreams.advance

    def watched(kernels: TransformerStreams, tokens: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return advance(kernels, tokens)

    monkeypatch.setattr(TransformerStreams, "advance", watched)
    return seen


@pytest.mark.usefixtures("three_threads")
def test_a_small_model_computes_on_one_thread_and_a_large_one_after_it_on_all(
    tmp_path: Path, threads_of_steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(save_random_model(tmp_path, "llama"))
    small = load_model(folder)
    monkeypatch.setattr(attention_threads, "FREE_PROCESSORS", FreeProcessors(waited=lambda: 0.0))
    monkeypatch.setattr(decoder, "ONE_THREAD_PARAMETERS", 1000)
    for model, threads in ((small, 1), (load_model(folder), 3)):
        threads_of_steps.clear()
        assert torch.get_num_threads() == 3
        generate_units(model, "s", DOCUMENT, PENDING, 4, 3)
        assert threads_of_steps[-1] == threads  # before, whole steps were tried with one thread and with three
        assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_threads_are_restored_after_an_error(tmp_path: Path) -> None:
    model = load_model(str(save_random_model(tmp_path, "llama")))
    too_few = PendingUnit(Action("few", "snapkv", SnapKV(), Retention(8)), 0, 1)
    with pytest.raises(InputError):
        generate_units(model, "s", DOCUMENT, [too_few], 4, 3)
    assert torch.get_num_threads() == 3


def test_a_model_is_freed_with_its_last_user(tmp_path: Path) -> None:
    """No cache, hook or registered function keeps the network, its weights or a prompt's cache."""
    gc.freeze()  # a collection then looks at nothing that tests before have left
    model = load_model(str(save_random_model(tmp_path, "qwen3")))
    units = generate_units(model, "s", DOCUMENT, [*PENDING, PendingUnit(CONTROL, 0, 2)], 4, 3)
    held = [weakref.ref(part) for part in (model, model.network, model.network.lm_head.weight)]
    held += [weakref.ref(layer.self_attn.k_proj.weight) for layer in model.network.model.layers]
    del model
    gc.collect()
    gc.unfreeze()
    assert [part() for part in held] == [None] * len(held)
    assert units


def test_what_generating_takes_is_freed_with_it(tmp_path: Path) -> None:
    """Prompt, caches and suffixes go when generation returns, without waiting for the garbage collector."""
    model = load_model(str(save_random_model(tmp_path, "llama")))
    generate_units(model, "s", DOCUMENT, PENDING, 4, 3)
    gc.freeze()
    gc.disable()
    try:
        before = tensor_bytes()
        generate_units(model, "s", DOCUMENT, PENDING, 4, 3)
        assert tensor_bytes() <= before
    finally:
        gc.enable()
        gc.unfreeze()


def tensor_bytes() -> int:
    return sum(part.nbytes for part in gc.get_objects() if type(part) is torch.Tensor)
