"""Whole steps of decoding: a stream's distribution does not depend on the streams beside it, and a dependence is found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from fixtures.common_actions import HALF_SNAPKV
from torch import Tensor

from kvdrift.generator.attention import prompt_reads
from kvdrift.generator.attention.row_invariance import TriedSteps
from kvdrift.generator.attention.tables import few_rows
from kvdrift.generator.checks.random_models import random_document, random_model, save_random_model
from kvdrift.generator.coupling.streams import SHARE_ALL, SharingOptions
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.transformer.loading import LoadedModel, load_model
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.generator.transformer.prompts.streams import random_step_deviation

FUSED = replace(SHARE_ALL, fused=True)
HORIZON = 20


def deviation(model: LoadedModel, entries: int, streams: int, sharing: SharingOptions) -> float:
    with model.computing():
        prompt = Prompt(model, random_document("d9", 9).tokens, window=0)
        return random_step_deviation(model, prompt, entries, HORIZON, streams, sharing, None)


@pytest.mark.parametrize("sharing", [SHARE_ALL, FUSED], ids=["today", "fused"])
@pytest.mark.parametrize(("entries", "streams"), [(1000, 448), (4096, 64)])
def test_distributions_do_not_depend_on_the_streams_beside(entries: int, streams: int, sharing: SharingOptions) -> None:
    assert deviation(random_model("llama"), entries, streams, sharing) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(("sharing", "streams"), [(SHARE_ALL, 3584), (FUSED, 448)], ids=["today", "fused"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("entries", [1000, 2048, 4096, 9000])
def test_distributions_do_not_depend_on_thousands_beside(
    entries: int, dtype: str, kind: str, sharing: SharingOptions, streams: int
) -> None:
    assert deviation(random_model(kind, dtype), entries, streams, sharing) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("entries", [1000, 2048, 4096])
def test_nor_do_those_of_fused_steps_of_all_numbers_of_rows(entries: int) -> None:
    assert deviation(random_model("llama"), entries, 3584, FUSED) == 0.0


def test_fused_steps_have_few_numbers_of_rows() -> None:
    rows = [few_rows(streams, 8) for streams in range(1, 4097)]
    assert all(0 <= own - streams < max(8, streams / 8) for streams, own in enumerate(rows, start=1))
    assert all(own % 8 == 0 for own in rows)
    assert rows == sorted(rows)
    assert len(set(rows)) == 16 + 5 * 8  # multiples up to 128, then eight up to each double


@pytest.mark.parametrize("sharing", [SHARE_ALL, FUSED], ids=["today", "fused"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_nor_do_those_of_models_without_groups(
    heads: tuple[int, int], sharing: SharingOptions, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of parts lie side by side there, which a CPU joins with a seam; several chunks, joined at each step."""
    monkeypatch.setattr("kvdrift.generator.attention.parts.CHUNK", 256)
    folder = save_random_model(
        tmp_path / "model", "llama", num_attention_heads=heads[0], num_key_value_heads=heads[1]
    )  # fmt: skip
    assert deviation(load_model(str(folder)), 1000, 67, sharing) == 0.0


@contextmanager
def other_rounding(monkeypatch: pytest.MonkeyPatch, keys: int) -> Iterator[None]:
    """Attention of few queries to a prompt of more than ``keys`` entries rounds otherwise than that of many."""
    attend = prompt_reads.attend_prompt

    def rounding(query: Tensor, key: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        output, mass = attend(query, key, *others)
        return output * (1 + 2.0**-18) if query.shape[1] < 32 and key.shape[1] > keys else output, mass

    with monkeypatch.context() as patch:
        patch.setattr(prompt_reads, "attend_prompt", rounding)
        yield


def test_what_is_found_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of long prompts alone: of the first long document on, units say so."""
    model = replace(random_model("llama"), steps=TriedSteps())
    pending = [PendingUnit(HALF_SNAPKV, 0, 12)]
    with other_rounding(monkeypatch, keys=1024):
        (short,) = generate_units(model, "s", random_document("d300", 300), pending, 8, 3)
        assert short.record["batch_invariant"] is True
        assert model.pairs_at_once
        (long,) = generate_units(model, "s", random_document("d1100", 1100), pending, 8, 3)
    assert long.record["batch_invariant"] is False
    assert 1e-8 < long.record["batch_deviation"] < 1e-4
    assert not model.pairs_at_once
    assert '"row_multiple": "8"' in long.record["versions"]


def test_steps_are_tried_once_for_what_is_no_larger() -> None:
    tried: list[int] = []

    def find() -> float:
        tried.append(1)
        return 0.0

    steps = TriedSteps()
    for sizes, times in (((1024, 64, 32), 1), ((1024, 60, 8), 1), ((2048, 8, 8), 2), ((1024, 64, 40), 3), ((2048, 64, 40), 4), ((1024, 64, 36), 4)):  # fmt: skip
        steps.cover(sizes, find)
        assert len(tried) == times, sizes
    assert steps.deviation == 0.0
