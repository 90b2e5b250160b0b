"""Causal attention over one prompt that records the data that selectors and caches need of every layer.

A prompt's keys and values are kept; of a layer whose attention has a window, only those that later positions see. Of
queries only the last W are kept, and no hidden states: all queries and hidden states would double the memory. A
selector that needs more queries names statistics. Each statistic is gathered once per layer without a window, from
consecutive chunks of queries, for all selectors that name it. Nothing else is computed or kept.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from kvdrift.generator.attention.parts import PLAIN, LayerTerms, attend_causally, attend_causally_by, attention_modules
from kvdrift.schema.errors import failing_as

Gathered = TypeVar("Gathered")

# transformers' rotary embedding: (tensor of the wanted dtype and device, positions [1, T]) -> cos, sin [1, T, size].
Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class QueryChunk:
    """T consecutive queries of one layer, up to position b - 1, and everything that they may attend to.

    Attributes:
        query: [heads, T, size], rotated, of positions b - T .. b - 1.
        key: [KV heads, b, size], rotated, of all positions so far.
        value: [KV heads, b, size], of all positions so far.
        hidden: [T, width], the hidden states from which the queries were projected.
        cos: [T, size], the cosines of the angles by which the queries were rotated.
        sin: [T, size], the sines of these angles.
        scaling: The factor of products of queries and keys.
        module: The layer's attention module.
        rotary: A copy of the model's rotary embedding.
        softcap: The soft cap of the scaled products, if the layer has one.
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
    softcap: float | None = None

    @property
    def first(self) -> int:
        """The position of the first query."""
        return self.key.shape[1] - self.query.shape[1]


class Statistic(Protocol[Gathered]):
    """A value gathered over all queries of a layer; hashable, since equal statistics are gathered once."""

    def update(self, gathered: Gathered | None, chunk: QueryChunk) -> Gathered:
        """Return the gathered value with a chunk added; ``gathered`` is the value before, None for the first chunk."""


@dataclass(frozen=True)
class PromptLayer:
    """What was recorded of one layer while a prompt of n entries was prefilled.

    A layer whose attention has a window keeps only the entries that later positions may see.

    Attributes:
        key: [KV heads, n, size], rotated.
        value: [KV heads, n, size].
        window_query: The last W queries, [heads, W, size], rotated.
        scaling: The factor of products of queries and keys.
        number: The layer's number among layers without a window, from 0; -1 with a window.
        prompt: SHA-256 of the prompt's tokens, for selectors that draw at random.
        statistics: The values gathered over all queries, by statistic.
        terms: Terms of the layer's attention besides a softmax over all earlier positions.
    """

    key: Tensor
    value: Tensor
    window_query: Tensor
    scaling: float
    number: int = 0
    prompt: bytes = b""
    statistics: Mapping[Statistic[Any], Any] = field(default_factory=dict)
    terms: LayerTerms = PLAIN

    def gathered(self, statistic: Statistic[Gathered]) -> Gathered:
        """Return the value that ``statistic`` gathered over the layer's queries; a selector must have requested it."""
        gathered: Gathered = self.statistics[statistic]
        return gathered


class PromptRecording:
    """``LayerAttention`` over one prompt of n entries, chunk by chunk; ``prompt`` is the SHA-256 of its tokens.

    ``window`` is W, the number of last queries to keep; ``statistics`` are gathered over all queries.
    """

    def __init__(
        self, entries: int, window: int, statistics: Iterable[Statistic[Any]] = (), prompt: bytes = b""
    ) -> None:
        self.entries, self.window, self.prompt = entries, window, prompt
        self.layers: list[PromptLayer] = []  # complete once all n positions have been seen
        self._seen: list[int] = []  # positions, per layer
        self._statistics = tuple(dict.fromkeys(statistics))
        self._gathered: dict[int, dict[Statistic[Any], Any]] = {}  # by layer
        self._chunk: Callable[..., QueryChunk] | None = None  # given the layer's input
        self._rotary: Any = None
        self._types: Sequence[str] = ()  # of all layers, if the embedding gives each type angles of its own

    @contextlib.contextmanager
    def listening(self, network: Any) -> Iterator[None]:
        """Record the inputs of attention layers of ``network``, a causal language model, inside the block.

        Nothing is recorded if there are no statistics.
        """
        with contextlib.ExitStack() as hooks:
            if self._statistics:
                # A copy: rotary embeddings that scale with the length change themselves when a longer length is
                # requested.
                self._rotary = copy.deepcopy(network.model.rotary_emb)
                if "layer_type" in inspect.signature(self._rotary.forward).parameters:
                    self._types = network.config.layer_types
                for module in attention_modules(network).values():
                    hook = module.register_forward_pre_hook(self._listen, with_kwargs=True)
                    hooks.callback(hook.remove)
            yield

    def forget(self) -> None:
        """Drop the values of all statistics."""
        for gathered in self._gathered.values():
            gathered.clear()
        self._chunk = None

    def _listen(self, module: nn.Module, _: Any, inputs: Mapping[str, Any]) -> None:
        cos, sin = inputs["position_embeddings"]
        rotary: Any = self._rotary
        if self._types:
            number: Any = module.layer_idx
            rotary = partial(rotary, layer_type=self._types[number])
        self._chunk = partial(
            QueryChunk, hidden=inputs["hidden_states"][0], cos=cos[0], sin=sin[0], module=module, rotary=rotary
        )

    def _observe(self, layer: int, **seen: Any) -> None:
        """Add a layer's next chunk to every statistic."""
        if self._chunk is None:
            message = "statistics need the inputs of layers: attend inside of the block of listening()"
            raise RuntimeError(message)
        gathered, chunk = self._gathered[layer], self._chunk(**seen)
        for statistic in self._statistics:
            with failing_as("statistic", statistic):
                gathered[statistic] = statistic.update(gathered.get(statistic), chunk)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, terms: LayerTerms = PLAIN
    ) -> Tensor:
        """Return the attention of the next T positions to all positions up to their own, [1, heads, T, size].

        The positions' keys and values are recorded, and their queries that are among the prompt's last W.
        """
        if layer == len(self.layers):
            self._begin(layer, query, key, scaling, terms)
        if terms.window is not None:
            return self._attend_in_window(layer, query, key[0], value[0], terms)
        record, first = self.layers[layer], self._seen[layer]
        last = first + query.shape[2]
        record.key[:, first:last], record.value[:, first:last] = key[0], value[0]
        self._seen[layer] = last
        so_far = record.key[:, :last], record.value[:, :last]
        if self._statistics:
            key, value = so_far
            self._observe(layer, query=query[0], key=key, value=value, scaling=scaling, softcap=terms.softcap)
        # Keep this chunk's queries that are among the last W, the first of which is at n - W.
        start = self.entries - record.window_query.shape[1]
        if last > start:
            record.window_query[:, max(first - start, 0) : last - start] = query[0, :, max(start - first, 0) :]
        return (
            attend_causally(query, *so_far, scaling)
            if terms.plain
            else attend_causally_by(query, *so_far, scaling, terms)
        )

    def _attend_in_window(self, layer: int, query: Tensor, key: Tensor, value: Tensor, terms: LayerTerms) -> Tensor:
        record = self.layers[layer]
        key, value = torch.cat([record.key, key], 1), torch.cat([record.value, value], 1)
        output = attend_causally_by(query, key, value, record.scaling, terms)
        left = key.shape[1] - terms.held(key.shape[1])
        self.layers[layer] = replace(record, key=key[:, left:].clone(), value=value[:, left:].clone())
        return output

    def _begin(self, layer: int, query: Tensor, key: Tensor, scaling: float, terms: LayerTerms) -> None:
        heads, size, kv_heads = query.shape[1], query.shape[3], key.shape[1]
        self._seen.append(0)
        if terms.window is not None:
            none = key.new_empty((kv_heads, 0, size))
            self.layers.append(PromptLayer(none, none, query[0, :, :0], scaling, -1, self.prompt, terms=terms))
            return
        number = sum(layer.terms.window is None for layer in self.layers)
        self.layers.append(
            PromptLayer(
                key.new_empty((kv_heads, self.entries, size)), key.new_empty((kv_heads, self.entries, size)),
                query.new_empty((heads, min(self.window, self.entries), size)), scaling, number, self.prompt,
                self._gathered.setdefault(layer, {}), terms,
            )
        )  # fmt: skip
