"""With several threads a row has the bits of one thread, or one thread computes: at SmolLM2's widths.

oneDNN promises the same result of every run with one number of threads only (oneDNN issue 1443), and none for other
numbers of rows (oneDNN issue 789).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.common_actions import CONTROL, HALF_SNAPKV

from kvdrift.generator.attention import cpu_products
from kvdrift.generator.attention import threads as attention_threads
from kvdrift.generator.attention.parts import attend_part
from kvdrift.generator.attention.row_invariance import TriedSteps
from kvdrift.generator.attention.threads import torch_threads
from kvdrift.generator.checks.random_models import random_document, save_random_model
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.transformer import decoder
from kvdrift.generator.transformer.loading import load_model
from kvdrift.log.store import Unit
from kvdrift.schema.free_processors import FreeProcessors

HORIZON = 6
DOCUMENT = random_document("d600", 600)
PENDING = [PendingUnit(HALF_SNAPKV, 0, 4), PendingUnit(CONTROL, 0, 4)]


SIZES: dict[str, Any] = {
    "hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49_152, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True, "initializer_range": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_random_model(Path(tmp_path_factory.mktemp("wide")), "llama", **SIZES))


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with two free processors, whatever runs beside this test."""
    monkeypatch.setattr(attention_threads, "FREE_PROCESSORS", FreeProcessors(waited=lambda: 0.0))
    with torch_threads(2):
        yield


def rounded_by_threads(monkeypatch: pytest.MonkeyPatch, fewest: int, most: int, columns: int) -> None:
    """With two threads, products of so many rows and output columns are off by a last bit."""
    product = cpu_products.product

    def other(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        found = product(x, weight, bias)
        apart = torch.get_num_threads() == 2 and fewest <= x.shape[0] < most and found.shape[-1] == columns
        return found * (1 + 2.0**-20) if apart else found

    monkeypatch.setattr(cpu_products, "product", other)


def generated(model: Any) -> tuple[Unit, Unit]:
    half, control = generate_units(model, "s", DOCUMENT, PENDING, HORIZON, 3)
    return half, control


@pytest.mark.parametrize("entries", [5, 8, 16, 48])
def test_attention_to_suffixes_does_not_depend_on_threads(entries: int) -> None:
    """Two threads once changed half of the rows, on a processor of AMD, with 8, 16 and 48 entries."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(97, 3, rows, 64, generator=generator) for rows in (3, entries, entries))
    results = []
    for threads in (1, 2):
        with torch_threads(threads):
            results.append(attend_part(query, key, value, 0.125))
    (output, mass), (other_output, other_mass) = results
    assert torch.equal(output, other_output)
    assert torch.equal(mass, other_mass)


@pytest.mark.slow
def test_two_threads_give_the_events_of_one(folder: str) -> None:
    model = load_model(folder)
    assert model.threads in (1, 2)
    two = generated(model)
    one = generated(replace(model, threads=1, steps=TriedSteps()))
    for unit, twin in zip(two, one, strict=True):
        assert unit.events.equals(twin.events)
        assert unit.record["batch_invariant"] is True
    assert not any(two[1].events["delta"].to_pylist())


def test_one_thread_computes_if_products_depend_on_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded_by_threads(monkeypatch, 0, 16, 192)
    monkeypatch.setattr(decoder, "ONE_THREAD_PARAMETERS", 0)
    model = load_model(str(save_random_model(tmp_path, "llama", **SIZES | {"vocab_size": 512})))
    assert model.threads == 1
    assert not model.pairs_at_once  # of a large model, documents are decoded alone
    _, control = generated(model)
    assert control.record["batch_invariant"] is True
    assert not any(control.events["delta"].to_pylist())


@pytest.mark.slow
def test_one_thread_computes_if_only_steps_depend_on_threads(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by trying whole steps before anything is decoded, and said in one line."""
    said: list[str] = []
    model = load_model(folder)
    with monkeypatch.context() as patch:
        rounded_by_threads(patch, 9, 31, 1536)
        model = replace(model, threads=2, steps=TriedSteps(say=said.append))
        half, control = generated(model)
    assert model.steps.alone
    assert len(said) == 1
    assert "2 threads" in said[0]
    assert control.record["batch_invariant"] is True
    expected, _ = generated(replace(model, threads=1, steps=TriedSteps()))
    assert half.events.equals(expected.events)


@pytest.mark.slow
def test_what_no_number_of_threads_mends_is_said_before_decoding(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    product = cpu_products.product
    model = replace(load_model(folder), steps=TriedSteps(say=said.append))
    monkeypatch.setattr(
        cpu_products, "product", lambda x, *others: product(x, *others) * (1 + 2.0**-20 * (x.shape[0] > 8))
    )
    generated(model)
    assert "control" in said[-1]
    assert model.batch_deviation > 0.0
