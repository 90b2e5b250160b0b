"""Self-tests of a loaded model: does a row's result depend on how many rows are computed with it?

Matrix products of few rows take other code paths, which round differently. Decoding therefore pads its rows to a
multiple: the smallest multiple with which results do not depend on the number of rows, found when the model is loaded.
If no multiple has this property, the largest difference is recorded with every unit.

Before longer documents or more streams than before are decoded, whole steps are tried at that length, horizon and
number of rows.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvdrift.generator.attention.cpu_products import OneDNNLinear, fits_onednn
from kvdrift.generator.attention.parts import attend_prompt, attention_modules
from kvdrift.generator.attention.prompt_reads import TILE, tile_of
from kvdrift.generator.attention.threads import torch_threads
from kvdrift.schema.progress import SILENT

_MULTIPLES = (8, 16, 32, TILE)  # with the last multiple, attention to a prompt always has the same shape
_PROMPT_READ_ROWS = (1, 2, 4)  # multiples of the streams that read a prompt at once by oneDNN
_LAYER_ROWS = 2  # multiple of rows if oneDNN computes all products; a single row takes other code paths
_COUNTS = (1, 2, 3, 5, 7)  # of multiples of rows, whose results are compared with those of eight multiples
_ENTRIES = 1000  # prompt entries attended to
# Numbers of rows with which numbers of threads are compared. oneDNN keeps a kernel of half a MiB for each of them, for
# every size of product and each number of threads.
_ROWS = (2, 4, 6, 8, 16, 24, 32, 64, 96, 128)


@dataclass(frozen=True)
class RowInvariance:
    """Multiples to which rows are padded so that their number changes no result, and the deviation that remains."""

    multiple: int  # to which the number of rows is padded
    deviation: float  # the most that the number of rows changes, relative to a product's largest output; 0 if nothing
    prompt_read_rows: int = 0  # to which streams that read a prompt at once by oneDNN are padded; 0 for ``multiple``
    layer_rows: int = 0  # to which a step's rows are padded if oneDNN multiplies all weights; 0 for ``multiple``


@dataclass
class TriedSteps:
    """The whole steps that any copy of a model has tried, and how far equal streams differed in them."""

    deviation: float = (
        0.0  # the largest difference of equal streams' distributions, relative to the largest probability
    )
    alone: bool = False  # whether only one thread may compute, since more threads gave other distributions
    say: Callable[[str], None] = SILENT.say  # receives a line about a difference, before anything is decoded
    _tried: list[tuple[int, ...]] = field(default_factory=list)
    _said: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def say_once(self, line: str) -> None:
        """Pass a line on, unless the line was passed on before."""
        with self._lock:
            if line not in self._said:
                self._said.add(line)
                self.say(line)

    def cover(self, sizes: Sequence[int], find_deviation: Callable[[], float]) -> None:
        """Try steps of ``sizes`` (entries, horizon, streams, kinds of rules), unless steps as large were tried.

        ``find_deviation`` tries them and returns their deviation.
        """
        with self._lock:
            if any(all(mine <= theirs for mine, theirs in zip(sizes, tried, strict=True)) for tried in self._tried):
                return
            self.deviation = max(self.deviation, find_deviation())
            self._tried.append(tuple(sizes))


def find_row_multiple(network: Any) -> RowInvariance:
    """Find the smallest multiple of rows with which no row of a causal language model depends on other rows.

    Tested are one matrix product of each size, one activation of each width, and attention. If no multiple passes, the
    largest is returned, with its deviation.
    """
    deviation = 0.0
    for multiple in _MULTIPLES:
        deviation = max(itertools.chain(_layer_deviations(network, multiple), _tile_deviations(network, multiple)))
        if deviation == 0.0:
            break
    layer_rows = _LAYER_ROWS if _is_onednns(network) and not max(_layer_deviations(network, _LAYER_ROWS)) else 0
    return RowInvariance(multiple, deviation, _find_prompt_read_rows(network, multiple), layer_rows)


def threads_agree(network: Any, threads: int) -> bool:
    """Return whether one thread and ``threads`` threads give products, activations and attention with equal bits.

    Every size of product and activation is tried with several numbers of rows. Whole steps are tried later, with their
    numbers of rows, before they are used.
    """
    generator = torch.Generator().manual_seed(2)
    tried: list[Callable[[], Tensor]] = []
    for module, width in _modules(network):
        rows = torch.randn(_ROWS[-1], width, generator=generator).to(next(network.parameters()).dtype)
        tried += [partial(module, rows[:count]) for count in _ROWS]
    query, key, value, scaling, group = _random_attention(network, _ROWS[-1], generator)
    tried += [partial(_attended, query[:, : count * group], key, value, scaling) for count in _ROWS]
    return all(_with(1, compute).equal(_with(threads, compute)) for compute in tried)


def _attended(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    return attend_prompt(query, key, value, scaling)[0]


def _with(threads: int, compute: Callable[[], Tensor]) -> Tensor:
    with torch_threads(threads):
        return compute()


def _random_attention(
    network: Any, streams: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, float, int]:
    """Draw queries of ``streams`` streams, and keys and values of a prompt.

    Returns queries, keys, values, the scaling of their products, and the number of query heads per KV head.
    """
    weight, attention = next(network.parameters()), next(iter(attention_modules(network).values()))
    group, size = attention.num_key_value_groups, attention.head_dim
    query, key, value = (
        torch.randn(network.config.num_attention_heads // group, entries, size, generator=generator).to(
            weight.device, weight.dtype
        )
        for entries in (streams * group, _ENTRIES, _ENTRIES)
    )
    return query, key, value, attention.scaling, group


def _is_onednns(network: nn.Module) -> bool:
    """Return whether oneDNN multiplies all weights of a network."""
    weights = ((module, weight) for module in network.modules() for weight in module.parameters(recurse=False))
    return all(weight.dim() < 2 or isinstance(module, (OneDNNLinear, nn.Embedding)) for module, weight in weights)


def _find_prompt_read_rows(network: Any, multiple: int) -> int:
    """Return a multiple to which to pad streams so that their number changes no attention by oneDNN; 0 if none passes.

    A multiple that allows a single row is not tried, since a single row takes other code paths.
    """
    if multiple == TILE or not fits_onednn(next(network.parameters())):
        return 0
    group = next(iter(attention_modules(network).values())).num_key_value_groups
    for read_rows in (number for number in _PROMPT_READ_ROWS if number * group > 1):
        if not max(_attention_deviations(network, 2 * TILE, [read_rows * count for count in _COUNTS])):
            return read_rows
    return 0


def _layer_deviations(network: Any, multiple: int) -> Iterator[float]:
    """Yield how far each layer's results for 1 to 7 times ``multiple`` rows are from those for 8 times ``multiple``."""
    generator = torch.Generator().manual_seed(0)
    embedding = next(network.parameters())
    for module, width in _modules(network):
        parameter = next(module.parameters(), embedding)
        rows = torch.randn(8 * multiple, width, generator=generator).to(parameter.device, parameter.dtype)
        whole = module(rows)
        for count in _COUNTS:
            for part in (slice(count * multiple), slice(-count * multiple, None)):
                yield _relative(module(rows[part]), whole[part])


def _tile_deviations(network: Any, multiple: int) -> Iterator[float]:
    """Yield how far attention of part of a tile's streams is from that of the whole tile, for several such parts."""
    tile = tile_of(next(network.parameters()), multiple)
    counts = [*range(multiple, TILE, multiple), *range(TILE, tile, TILE // 2)]
    yield from _attention_deviations(network, tile, counts)


def _modules(network: Any) -> list[tuple[nn.Module, int]]:
    """Return one linear layer of each size and one activation of each width, each with the width of its input."""
    tried: dict[tuple[int, int], tuple[nn.Module, int]] = {}
    for module in network.modules():
        if isinstance(module, nn.Linear):
            tried[module.in_features, module.out_features] = module, module.in_features
        if isinstance(activation := getattr(module, "act_fn", None), nn.Module):
            down = getattr(module, "down_proj", None)
            if isinstance(down, nn.Linear):
                tried[down.in_features, 0] = activation, down.in_features
    return list(tried.values())


def _attention_deviations(network: Any, tile: int, counts: Sequence[int]) -> Iterator[float]:
    """Yield how far attention to a prompt differs between each number of streams in ``counts`` and ``tile`` streams."""
    query, key, value, scaling, group = _random_attention(network, tile, torch.Generator().manual_seed(1))
    whole = attend_prompt(query, key, value, scaling)
    for count in counts:
        for part in (slice(count * group), slice(-count * group, None)):
            for part_rows, all_rows in zip(attend_prompt(query[:, part], key, value, scaling), whole, strict=True):
                yield _relative(part_rows, all_rows[:, part])


def _relative(part: Tensor, whole: Tensor) -> float:
    return float((part - whole).abs().max() / whole.abs().max())
