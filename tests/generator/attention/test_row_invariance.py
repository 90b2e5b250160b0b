"""The self-test of loaded models: whether a row's results depend on the rows computed with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.common_actions import HALF_SNAPKV
from torch import nn

from kvdrift.generator.attention import row_invariance
from kvdrift.generator.attention.cpu_products import SeamlessSiLU
from kvdrift.generator.attention.row_invariance import RowInvariance, TriedSteps
from kvdrift.generator.checks.random_models import random_document, save_random_model
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.transformer.loading import load_model


def test_the_self_test_passes_here(folder: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        model = load_model(str(folder), dtype=dtype)
        assert model.rows.multiple == 8
        assert model.batch_deviation == 0.0


def test_the_self_test_finds_the_multiple_above_which_products_agree(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix product that rounds differently below 30 rows, as some libraries' do: 32 rows at a time are safe."""
    forward = nn.Linear.forward

    def other_rounding(layer: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        output = forward(layer, rows)
        return output * (1 + 2.0**-22) if len(rows) < 30 and layer.out_features == 96 else output

    monkeypatch.setattr(nn.Linear, "forward", other_rounding)
    model = load_model(str(folder))
    assert model.rows.multiple == 32
    assert model.batch_deviation == 0.0


def test_the_self_test_measures_what_depends_on_the_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row of a batch is off by a millionth in its largest place: no multiple helps, and that is how far."""
    forward = SeamlessSiLU.forward

    def seam(activation: SeamlessSiLU, rows: torch.Tensor) -> torch.Tensor:
        output = forward(activation, rows)
        largest = output.abs().max()
        output[-1, 0] += 1e-6 * largest
        return output

    monkeypatch.setattr(SeamlessSiLU, "forward", seam)
    model = load_model(str(folder))
    assert model.rows.multiple == 64
    assert 0.5e-6 < model.batch_deviation < 2e-6


@pytest.mark.parametrize(
    ("few", "rows"),
    [
        (range(128), RowInvariance(64, 0.0)),  # of fewer than 64 streams (two heads each): only whole tiles are safe
        (range(129, 1000), RowInvariance(64, 0.0)),  # of more: with the last multiple there are never more
        (range(3), RowInvariance(8, 0.0, 2)),  # a stream may read alone unless its query then rounds differently
    ],
)
def test_the_self_test_sees_attention_that_depends_on_the_batch(
    few: range, rows: RowInvariance, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention of some numbers of queries is off; if it is that of none, a stream reads alone."""
    attend = row_invariance.attend_prompt
    assert load_model(str(folder)).rows == RowInvariance(8, 0.0, 1)

    def other_rounding(query: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output, mass = attend(query, *others)
        return output, mass * (1 + 2.0**-20) if query.shape[1] in few else mass

    monkeypatch.setattr(row_invariance, "attend_prompt", other_rounding)
    assert load_model(str(folder)).rows == rows


def test_layers_of_onednn_take_an_even_number_of_rows(tmp_path: Path, folder: Path) -> None:
    """Events are those of rows padded to eight, bit for bit; small layers, which MKL multiplies, are padded to eight."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
    model = load_model(str(save_random_model(tmp_path / "wide", "llama", **heads, **sizes)))
    assert (model.rows.layer_rows, load_model(str(folder)).rows.layer_rows) == (2, 0)
    padded = replace(model, rows=replace(model.rows, layer_rows=0), steps=TriedSteps())
    own, twin = (
        generate_units(one, "s", random_document("d300", 300), [PendingUnit(HALF_SNAPKV, 0, 3)], 12, 3)
        for one in (model, padded)
    )
    assert own[0].events.equals(twin[0].events)
    assert model.batch_deviation == 0.0
