"""Compute a probe by transformers alone: with eager attention, and with entries that are really removed.

Values are recorded at the points at which they are compared: layers' inputs, attention's outputs, routers' scores.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvdrift.generator.attention.parts import attention_modules
from kvdrift.generator.transformer.files.configuration import library, rope_switch


class Point(NamedTuple):
    """A point of a layer; ``number`` is its number among the layer's points of its kind."""

    layer: int
    kind: str
    number: int = 0

    @property
    def name(self) -> str:
        """What computes the values at the point."""
        if self.kind == INPUT:  # which is the output of the layer before
            return f"layer {self.layer - 1}" if self.layer else "the embedding"
        return {ATTENTION: "attention of ", ROUTER: "the router of "}.get(self.kind, "") + f"layer {self.layer}"


INPUT, ATTENTION, ROUTER, OUTPUT = "input", "attention", "router", "output"
"""Kinds of points: hidden states before a layer, the output of its attention, the scores whose largest choose its
experts, and, of the last layer alone, the hidden states after it."""

Visit = Callable[[Point, Tensor], Tensor]
"""A function that is called at each point of each pass with its values, [rows, ...], in the order of the network.

A row is a token. The network goes on with the values that the function returns.
"""


@contextlib.contextmanager
def visited(network: Any, visit: Visit) -> Iterator[None]:
    """Call ``visit`` at every point of the passes through ``network``, a causal language model, inside the block."""
    layers, watch = network.model.layers, _Watch(visit)
    with contextlib.ExitStack() as entered:
        for number, layer in enumerate(layers):
            enter = layer.register_forward_pre_hook(partial(watch.enter, number), with_kwargs=True)
            leave = layer.register_forward_hook(partial(watch.leave, number == len(layers) - 1))
            entered.callback(enter.remove)
            entered.callback(leave.remove)
        for number, module in attention_modules(network).items():
            entered.callback(module.register_forward_hook(partial(watch.attended, number)).remove)
        entered.enter_context(watch)
        yield


class _Watch(TorchFunctionMode):
    """Calls ``visit`` from the hooks of layers, and from ``torch.topk``, by which routers choose experts."""

    def __init__(self, visit: Visit) -> None:
        super().__init__()
        self._visit = visit
        self._layer: int | None = None  # the layer that is computed
        self._rows = self._choices = 0

    def enter(self, number: int, _: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Visit the hidden states before a layer."""
        hidden = args[0] if args else named["hidden_states"]
        self._layer, self._choices, self._rows = number, 0, hidden.shape[-3] * hidden.shape[-2]
        hidden = self._at(Point(number, INPUT), hidden)
        return ((hidden, *args[1:]), named) if args else (args, named | {"hidden_states": hidden})

    def attended(self, number: int, _: Any, __: Any, output: Any) -> Any:
        """Visit the output of a layer's attention."""
        return self._of_output(Point(number, ATTENTION), output)

    def leave(self, last: bool, _: Any, __: Any, output: Any) -> Any:  # noqa: FBT001 - bound by ``partial``
        """Visit the hidden states after the last layer."""
        number, self._layer = self._layer, None
        return self._of_output(Point(number, OUTPUT), output) if last and number is not None else output

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.topk, Tensor.topk) and args and self._layer is not None:
            scores, point = args[0], Point(self._layer, ROUTER, self._choices)
            self._choices += 1
            if scores.numel() % self._rows == 0:
                rows = self._visit(point, scores.reshape(self._rows, -1))
                args = (rows.reshape(scores.shape), *args[1:])
        return func(*args, **kwargs or {})

    def _of_output(self, point: Point, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self._at(point, output[0]), *output[1:])
        return self._at(point, output)

    def _at(self, point: Point, hidden: Tensor) -> Tensor:
        """Visit hidden states [..., batch, T, width]."""
        rows = self._visit(point, hidden.flatten(-3, -2).movedim(-2, 0))
        return rows.movedim(0, -2).reshape(hidden.shape)


_SWITCH = "original_max_position_embeddings"

ENTRIES, CHUNK, WINDOW, KEPT, STEPS = 48, 32, 24, 20, 8
"""Sizes of the probe: prompt tokens, tokens prefilled at once, entries of a window, kept entries, decoded tokens."""


@dataclass(frozen=True)
class Probe:
    """The tokens with which a model is tried: a prompt, and two continuations that part."""

    prompt: Tensor  # int64 [ENTRIES]
    continuations: Tensor  # int64 [2, STEPS]

    @classmethod
    def of(cls, vocabulary: int) -> Probe:
        """Draw the tokens; they are always the same."""
        drawn = torch.randint(vocabulary, (ENTRIES + 2 * STEPS,), generator=torch.Generator().manual_seed(0))
        return cls(drawn[:ENTRIES], drawn[ENTRIES:].view(2, STEPS))


def kept_positions(layer: int, kv_heads: int) -> Tensor:
    """Return the prompt entries that the evicted cache keeps, int64 [KV heads, KEPT], ascending."""
    generator = torch.Generator().manual_seed(1 + layer)
    ranked = torch.rand(kv_heads, ENTRIES, generator=generator).argsort(-1)
    return ranked[:, :KEPT].sort(-1).values


@contextlib.contextmanager
def short_lengths(network: Any) -> Iterator[None]:
    """Make windows, and the length at which RoPE switches, shorter than the probe inside the block.

    A model's code treats lengths of any size in the same way.
    """
    holders = [network.config, *network.modules()]
    named = [(one, vars(one)["sliding_window"]) for one in holders if type(vars(one).get("sliding_window")) is int]
    for one, _ in named:
        one.sliding_window = WINDOW
    switch = rope_switch(network.config)
    stated = [] if switch is None else [network.config.rope_parameters, vars(network.config)]  # the second wins
    before = [(one, one[_SWITCH]) for one in stated if _SWITCH in one]
    for one, _ in before:
        one[_SWITCH] = WINDOW
    try:
        yield
    finally:
        for one, length in before:
            one[_SWITCH] = length
        for one, window in named:
            one.sliding_window = window


@dataclass(frozen=True)
class Reference:
    """The probe as transformers computes it.

    Rows are the prompt's tokens, then for each step those of the two streams with the whole cache, then likewise of
    those with the evicted cache.

    Attributes:
        values: The values at each point of the network, [rows, ...], in the network's dtype, on the CPU.
        logits: The logits of these rows, except those of the prompt's tokens before the last, [rows, V], on the CPU.
        seconds: The time that the passes took.
    """

    values: Mapping[Point, Tensor]
    logits: Tensor
    seconds: float


def step_rows(step: int) -> Tensor:
    """Return the reference's rows of a step's four streams, int64 [4]."""
    whole = ENTRIES + 2 * step + torch.arange(2)
    return torch.cat([whole, whole + 2 * STEPS])


def reference_forward(network: Any, probe: Probe) -> Reference:
    """Compute the probe by transformers alone: two streams of the whole cache, then two of the evicted one."""
    began = time.perf_counter()
    device = network.get_input_embeddings().weight.device
    implementation = network.config._attn_implementation  # noqa: SLF001
    network.set_attn_implementation("eager")
    values: dict[Point, list[Tensor]] = {}
    logits: list[Tensor] = []

    def record(point: Point, rows: Tensor) -> Tensor:
        values.setdefault(point, []).append(rows.to("cpu", copy=True))
        return rows

    def forward(tokens: Tensor, cache: Any, first: int) -> None:
        positions = torch.arange(first, first + tokens.shape[1], device=device)[None]
        output = network(tokens.to(device), past_key_values=cache, position_ids=positions, use_cache=True)
        logits.append(output.logits[:, -1].to("cpu", copy=True))

    try:
        with torch.inference_mode(), short_lengths(network), visited(network, record):
            whole = library().DynamicCache(config=network.config)
            forward(probe.prompt[None], whole, 0)
            evicted = copy.deepcopy(whole)
            remove(evicted)
            for cache in (whole, evicted):
                cache.reorder_cache(torch.zeros(2, dtype=torch.int64, device=device))
                for step in range(STEPS):
                    forward(probe.continuations[:, step : step + 1], cache, ENTRIES + step)
    finally:
        network.set_attn_implementation(implementation)
    joined = {point: torch.cat(rows) for point, rows in values.items()}
    return Reference(joined, torch.cat(logits), time.perf_counter() - began)


def remove(cache: Any) -> None:
    """Remove all entries except the kept ones from the layers with full attention."""
    number = 0
    for layer in cache.layers:
        if getattr(layer, "is_sliding", False) or not hasattr(layer, "keys"):
            continue
        places = kept_positions(number, layer.keys.shape[1]).to(layer.keys.device)[None, :, :, None]
        layer.keys, layer.values = (
            part.gather(2, places.expand(-1, -1, -1, part.shape[-1])) for part in (layer.keys, layer.values)
        )
        number += 1
