"""Self-test of a loaded model: does a row's result depend on how many rows are computed with it?

Matrix products of few rows take other code paths, which round differently. Decoding therefore fills up its rows to a
multiple: the smallest one with which results do not depend on the number of rows. If no multiple has this property,
the largest difference is recorded with every unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from generator.attention.parts import attend_prompt
from generator.attention.shared_prefix import TILE

_MULTIPLES = (8, 16, 32, TILE)  # with the last one, attention to a prompt always has one shape
_COUNTS = (1, 2, 3, 5, 7)  # of multiples, against eight of them
_ENTRIES = 1000  # prompt entries attended to


@dataclass(frozen=True)
class RowInvariance:
    """The multiple of rows to decode with.

    Attributes:
        multiple: What the number of rows is a multiple of.
        deviation: The largest difference that the number of rows made with it, relative to the largest output of the
            same product; 0 where results are equal bit for bit.
    """

    multiple: int
    deviation: float


def find_row_multiple(network: Any) -> RowInvariance:
    """Test every size of matrix product and activation of a causal language model, and its attention, once."""
    deviation = 0.0
    for multiple in _MULTIPLES:
        deviation = max(_deviations(network, multiple))
        if deviation == 0.0:
            break
    return RowInvariance(multiple, deviation)


def _deviations(network: Any, multiple: int) -> Iterator[float]:
    generator = torch.Generator().manual_seed(0)
    embedding = next(network.parameters())
    for module, width in _modules(network):
        parameter = next(module.parameters(), embedding)
        rows = torch.randn(8 * multiple, width, generator=generator).to(parameter.device, parameter.dtype)
        whole = module(rows)
        for count in _COUNTS:
            for part in (slice(count * multiple), slice(-count * multiple, None)):
                yield _relative(module(rows[part]), whole[part])
    yield from _attention_deviations(network, multiple, generator)


def _modules(network: Any) -> list[tuple[nn.Module, int]]:
    """One linear layer of each size and one activation of each width, each with the width of its input."""
    tried: dict[tuple[int, int], tuple[nn.Module, int]] = {}
    for module in network.modules():
        if isinstance(module, nn.Linear):
            tried[module.in_features, module.out_features] = module, module.in_features
        if isinstance(activation := getattr(module, "act_fn", None), nn.Module):
            width = module.down_proj.in_features
            tried[width, 0] = activation, width
    return list(tried.values())


def _attention_deviations(network: Any, multiple: int, generator: torch.Generator) -> Iterator[float]:
    weight, attention = next(network.parameters()), network.model.layers[0].self_attn
    group = attention.num_key_value_groups
    kv_heads, size = network.config.num_attention_heads // group, attention.head_dim
    query, key, value = (
        torch.randn(kv_heads, entries, size, generator=generator).to(weight.device, weight.dtype)
        for entries in (TILE * group, _ENTRIES, _ENTRIES)
    )
    scaling = attention.scaling
    whole = attend_prompt(query, key, value, scaling)
    for count in range(multiple, TILE, multiple):
        for part in (slice(count * group), slice(-count * group, None)):
            for one, all_rows in zip(attend_prompt(query[:, part], key, value, scaling), whole, strict=True):
                yield _relative(one, all_rows[:, part])


def _relative(part: Tensor, whole: Tensor) -> float:
    return float((part - whole).abs().max() / whole.abs().max())
