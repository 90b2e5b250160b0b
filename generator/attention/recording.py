"""What selectors may gather of a prompt while it is processed: statistics over all of its queries, chunk by chunk.

Keys and values of a prompt stay; its queries and hidden states do not, for they take as much room again. A selector
that needs more than the last W queries names ``Statistic``s: each is gathered once per layer for all selectors that ask
for it, from consecutive chunks of queries, and what nobody asked for is neither computed nor kept.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

Gathered = TypeVar("Gathered")

# transformers' rotary embedding: (tensor of the wanted dtype and device, positions [1, T]) -> cos, sin [1, T, size].
Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class QueryChunk:
    """T consecutive queries of one layer, and everything that they may attend to.

    ``query`` [heads, T, size] are rotated, of positions b - T .. b - 1; ``key`` and ``value`` [KV heads, b, size] those
    of all positions so far, keys rotated; ``hidden`` [T, width] is what the queries were projected from, and ``cos``
    and ``sin`` [T, size] what rotated them. ``module`` is the layer's attention, ``rotary`` a copy of the model's.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    hidden: Tensor
    cos: Tensor
    sin: Tensor
    scaling: float
    module: nn.Module
    rotary: Rotary

    @property
    def first(self) -> int:
        """The position of the first query."""
        return self.key.shape[1] - self.query.shape[1]


class Statistic(Protocol[Gathered]):
    """Something gathered over all queries of a layer; equal statistics are gathered once, so it must be hashable."""

    def update(self, gathered: Gathered | None, chunk: QueryChunk) -> Gathered:
        """What is gathered after ``chunk``, from what was before it: None before the first one."""


@dataclass(frozen=True)
class _LayerInput:
    module: nn.Module
    hidden: Tensor
    cos: Tensor
    sin: Tensor


class Gathering:
    """The statistics of one prompt, layer by layer."""

    def __init__(self, statistics: Iterable[Statistic[Any]]) -> None:
        self._statistics = tuple(dict.fromkeys(statistics))
        self._layers: dict[int, dict[Statistic[Any], Any]] = {}
        self._input: _LayerInput | None = None
        self._rotary: Rotary | None = None

    @contextlib.contextmanager
    def listening(self, network: Any) -> Iterator[None]:
        """Attention layers of ``network``, a causal language model, tell what they are called with; then no more."""
        with contextlib.ExitStack() as hooks:
            if self._statistics:
                # A copy: rotary embeddings that scale with the length change themselves when asked about more of it.
                self._rotary = copy.deepcopy(network.model.rotary_emb)
                for layer in network.model.layers:
                    hook = layer.self_attn.register_forward_pre_hook(self._listen, with_kwargs=True)
                    hooks.callback(hook.remove)
            yield

    def observe(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        """One chunk of a layer, as ``QueryChunk`` has it; the chunks of a layer come in order."""
        if not self._statistics:
            return
        if self._input is None or self._rotary is None:
            message = "statistics of a prompt are gathered while listening to its model"
            raise RuntimeError(message)
        seen = self._input
        chunk = QueryChunk(
            query, key, value, seen.hidden, seen.cos, seen.sin, scaling, module=seen.module, rotary=self._rotary
        )
        gathered = self._layers.setdefault(layer, {})
        for statistic in self._statistics:
            gathered[statistic] = statistic.update(gathered.get(statistic), chunk)

    def of(self, layer: int) -> Mapping[Statistic[Any], Any]:
        """What was gathered of a layer; it goes on growing while chunks come."""
        return self._layers.setdefault(layer, {})

    def forget(self) -> None:
        """Let go of everything gathered."""
        for gathered in self._layers.values():
            gathered.clear()
        self._input = None

    def _listen(self, module: nn.Module, _: Any, inputs: Mapping[str, Any]) -> None:
        cos, sin = inputs["position_embeddings"]
        self._input = _LayerInput(module, inputs["hidden_states"][0], cos[0], sin[0])
