"""The points of a network at which a probe is compared: layers' inputs, attention's outputs, the scores of routers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvdrift.generator.attention.layer_traits import attention_modules


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
