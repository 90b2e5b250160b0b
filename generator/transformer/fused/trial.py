"""Find the parts of a network's layers by watching transformers compute a few rows, and prove each part.

Transformers' own forward computes one new token per row, with an attention that needs no cache. The order in which a
layer calls its modules, and what it hands to each, show where its norms are and which linear layers come first. What a
part computes is found by trying: the part's own input goes through the arithmetic known here, and what comes closest to
the part's own output is taken if it is near enough. So neither the names of norms nor the model's type matter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvdrift.generator.attention.parts import PLAIN as NO_TERMS
from kvdrift.generator.attention.parts import LayerTerms, attention_modules
from kvdrift.generator.attention.states import LayerStates
from kvdrift.generator.transformer.fused.operations import STYLES, norm
from kvdrift.generator.transformer.fused.parts import (
    LAUNCHED,
    LINEAR,
    MLP,
    PLAIN,
    Layer,
    Mixer,
    Norm,
    Projections,
    Step,
    begin,
)
from kvdrift.schema.errors import first_line

_ROWS = 4

_ROUNDINGS = 2.0  # units in the last place of the dtype
_ARITHMETIC = 32.0  # units in the last place of float32


def tolerance(dtype: torch.dtype) -> float:
    """Return how far a row of a part's output may be off, relative to the row's norm.

    Norms, rotations and gated products repeat all roundings of transformers to the dtype. What they round is float32,
    and differs by the order of sums and by the last bits of roots and exponentials. In 16 bits this moves a rounding
    here and there; in float32 it is all there is. Of two known functions SiLU and GELU are nearest to each other: they
    are 15 and more units of bfloat16 apart.
    """
    return _ROUNDINGS * torch.finfo(dtype).eps + _ARITHMETIC * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Parts:
    """The parts of a decoder, in the order of a step.

    ``factor`` multiplies embeddings. ``kinds`` has for each result of the rotary embedding the arguments that it is
    called with besides hidden states and positions. ``own`` has the parts whose arithmetic is not known, so that their
    own modules compute them, with the numbers of their layers.
    """

    factor: float
    kinds: Sequence[tuple[str, ...]]
    layers: Sequence[Layer]
    last: Norm | None
    own: dict[str, list[int]]

    def own_names(self) -> list[str]:
        """Return each of the parts in ``own`` with its layers, as in "attention of layers 0 to 3, 7"."""
        return [f"{name} of {_listed(numbers)}" if numbers else name for name, numbers in self.own.items()]

    def embedded(self, decoder: Any, tokens: Tensor) -> Tensor:
        """Return the hidden states before the first layer, [rows, width], of tokens [rows]."""
        hidden: Tensor = decoder.embed_tokens(tokens)
        return hidden if self.factor == 1.0 else hidden * self.factor

    def angles(self, decoder: Any, hidden: Tensor, positions: Tensor) -> list[Any]:
        """Return all results of the rotary embedding, cosines and sines [rows or 1, 1, turned] each."""
        return [decoder.rotary_emb(hidden, positions, *kind) for kind in self.kinds]


class _UnknownPartError(Exception):
    """A step cannot be made of a network's parts; the text says why."""


def find_parts(network: Any, *, exact: bool) -> Parts | str:
    """Return the parts of a network's decoder, each of them proven; or a line that says why no step is made of them.

    ``exact`` wants the bits of transformers' forward from torch's own operations; otherwise parts compute by the
    operations of this folder, and may be off by ``tolerance``.
    """
    try:
        trial = _Trial(network, exact=exact)
        with torch.inference_mode(), trial.watching():
            return trial.parts()
    except _UnknownPartError as unknown:
        return str(unknown)
    except Exception as error:  # noqa: BLE001 - a network's own code may raise anything with our attention
        return f"its forward pass fails on a trial ({first_line(error)})"


@dataclass(frozen=True)
class _Call:
    """A call of a module: the hidden states that it got, and those that it returned, [..., width] each.

    ``named`` has its arguments by parameter.
    """

    module: Any
    input: Tensor
    output: Tensor
    named: Mapping[str, Any]


@dataclass(frozen=True)
class _Attended:
    """What a layer handed to its attention: [rows, heads, 1, size] each, and the factor of scores."""

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float


class _OneEntry:
    """``LayerAttention`` to a row's own key beside a sink of score 0, which needs no cache."""

    def __init__(self) -> None:
        self.last: _Attended | None = None

    def attend(
        self,
        layer: int,  # noqa: ARG002 - the protocol's, as is ``terms``
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        terms: LayerTerms = NO_TERMS,  # noqa: ARG002
    ) -> Tensor:
        """Return values, weighed by the logistic function of their scores."""
        self.last = _Attended(query, key, value, scaling)
        group = query.shape[1] // key.shape[1]
        keys, values = (part.repeat_interleave(group, 1) for part in (key, value))
        scores = (query.float() * keys.float()).sum(-1, keepdim=True) * scaling
        return torch.sigmoid(scores).to(value.dtype) * values


_OF_STEPS = (Tensor, tuple, LayerStates, _OneEntry)  # arguments of these classes differ from step to step


class _Trial:
    """Watches the calls of a network's modules while it computes, and finds each layer's parts when it is done."""

    def __init__(self, network: Any, *, exact: bool) -> None:
        self._network, self._decoder, self._exact = network, network.model, exact
        self._operations, self._attention = PLAIN if exact else LAUNCHED, _OneEntry()
        self._with_attention = attention_modules(network)
        embedding = self._decoder.embed_tokens.weight
        tokens = torch.randint(len(embedding), (_ROWS,), generator=torch.Generator().manual_seed(0))
        # Some models change their arithmetic, such as the scale of queries, after many positions.
        last = int(getattr(network.config, "max_position_embeddings", None) or 2048) - 1
        positions = torch.linspace(min(5, last), last, _ROWS, dtype=torch.float64).long()[:, None]
        self._tokens, self._positions = tokens.to(embedding.device), positions.to(embedding.device)
        self._limit = 0.0 if exact else tolerance(embedding.dtype)
        self._watches = True
        self._calls: dict[Any, list[_Call]] = {}  # by the module that calls
        self._angles: list[tuple[tuple[str, ...], Any]] = []  # arguments and results of the rotary embedding
        self._found: list[Layer] = []
        self._own: dict[str, list[int]] = {}
        self._first = self._last = torch.empty(0)  # hidden states before the first layer and after the last

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the modules of the decoder inside the block, down to those within attention and MLP."""
        with contextlib.ExitStack() as hooks:

            def watch(module: Any, hook: Any) -> None:
                hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)

            watch(self._decoder.rotary_emb, self._turned)
            for child in self._decoder.children():
                if child is not self._decoder.layers:
                    watch(child, partial(self._called, self._decoder))
            for number, layer in enumerate(self._decoder.layers):
                for child in layer.children():
                    watch(child, partial(self._called, layer))
                    for grandchild in child.children():
                        watch(grandchild, partial(self._called, child))
                watch(layer, partial(self._computed, number))
            yield

    def parts(self) -> Parts:
        """Compute rows by transformers, and return the parts found."""
        result: Tensor = self._network.model(
            input_ids=self._tokens[:, None], position_ids=self._positions, use_cache=False,
            past_key_values=self._no_states(), kvdrift_attention=self._attention,
        )[0]  # fmt: skip
        self._watches = False
        calls = [call for call in self._calls.get(self._decoder, ()) if _same(call.input, self._last)]
        last = self._norm("last norm", None, calls[0]) if calls else None
        factor = float(getattr(self._decoder, "embedding_multiplier", None) or 1.0)
        parts = Parts(factor, [kind for kind, _ in self._angles], self._found, last, self._own)
        self._hold(parts.embedded(self._decoder, self._tokens), self._first, "the embedding")
        angles = parts.angles(self._decoder, _rows(self._first), self._positions)
        if not all(_same_angles(here, there) for here, (_, there) in zip(angles, self._angles, strict=True)):
            raise _UnknownPartError("the rotary embedding gives other angles for the same positions")
        normed = begin(_rows(self._last).clone(), last, self._step())
        self._hold(normed, result, "the last norm")
        return parts

    # --- What hooks see -----------------------------------------------------------------------------------------------

    def _called(self, caller: Any, module: Any, args: Any, named: Any, output: Any) -> None:
        """Keep a call of a module by ``caller``."""
        hidden, result = args[0] if args else named.get("hidden_states"), _first(output)
        if self._watches and isinstance(hidden, Tensor) and isinstance(result, Tensor):
            self._calls.setdefault(caller, []).append(_Call(module, hidden, result, named))

    def _turned(self, _: Any, args: Any, named: Any, output: Any) -> None:
        """Keep a result of the rotary embedding."""
        if self._watches:
            kind = tuple(value for value in (*args, *named.values()) if isinstance(value, str))
            self._angles.append((kind, output))

    def _computed(self, number: int, layer: Any, args: Any, named: Any, output: Any) -> None:
        """Find the parts of a layer that has been computed."""
        hidden, result = args[0] if args else named["hidden_states"], _first(output)
        self._watches = False
        self._first = self._first if self._found else hidden
        self._last = result
        self._found.append(self._layer(number, layer, hidden, result, named.get("position_embeddings")))
        self._calls = {caller: calls for caller, calls in self._calls.items() if caller is self._decoder}
        self._attention.last = None
        self._watches = True

    # --- What is made of it -------------------------------------------------------------------------------------------

    def _layer(self, number: int, layer: Any, hidden: Tensor, result: Tensor, turned: Any) -> Layer:
        """Return a layer's parts, by the order of its calls; its sums are proven as a whole."""
        calls = [call for call in self._calls.get(layer, ()) if not isinstance(call.module, nn.Dropout)]
        order = _ordered(calls, self._with_attention.get(number))
        if order is None:
            names = {module: name for name, module in layer.named_children()}
            listed = ", ".join(names[call.module] for call in calls)
            raise _UnknownPartError(f"layer {number} calls its modules in an order that is not known ({listed})")
        found = Layer(
            before_mixer=self._norm("norm before attention", number, order.before_mixer),
            mixer=self._mixer(number, layer, order.mixer, turned),
            after_mixer=self._norm("norm after attention", number, order.after_mixer),
            before_mlp=self._norm("norm before the MLP", number, order.before_mlp),
            mlp=self._mlp(number, order.mlp),
            after_mlp=self._norm("norm after the MLP", number, order.after_mlp),
            factor=float(getattr(layer, "residual_multiplier", 1.0)),
            parallel=order.before_mlp is None and _same(order.mlp.input, order.mixer.input),
            scaled=layer if hasattr(layer, "layer_scalar") else None,
        )
        residual, step = _rows(hidden).clone(), self._step()
        total = found(residual, begin(residual, found.before_mixer, step), None, step)
        self._hold(total, result, f"the sum of layer {number}")
        return found

    def _norm(self, name: str, number: int | None, call: _Call | None) -> Norm | None:
        """Return the norm of a call; its own module computes it if no known style gives its output."""
        found = None if call is None else self._styled(call)
        if found is not None and found.style is None:
            self._own.setdefault(name, []).extend([] if number is None else [number])
        return found

    def _styled(self, call: _Call) -> Norm:
        """Return a norm with the style that comes closest to its output, if that is near enough."""
        weight = getattr(call.module, "weight", None)
        epsilon = getattr(call.module, "variance_epsilon", getattr(call.module, "eps", None))
        if isinstance(weight, Tensor) and weight.dim() == 1 and isinstance(epsilon, float):
            off = [self._off(norm(call.input, weight, epsilon, style), call.output) for style in STYLES]
            if min(off) <= self._limit:
                return Norm(call.module, epsilon, STYLES[off.index(min(off))])
        return Norm(call.module)

    def _mixer(self, number: int, layer: Any, call: _Call, turned: Any) -> Mixer:
        """Return a layer's attention or what it has in its place.

        Its own module computes it if it is no attention, or if no known arithmetic gives its queries and keys.
        """
        attended, normed, name = self._attention.last, _rows(call.input), "attention"
        settings = {name: value for name, value in call.named.items() if not isinstance(value, _OF_STEPS)}
        given = (name for name, value in call.named.items() if isinstance(value, LayerStates))
        own = Mixer(call.module, None, None, next(given, "past_key_values"), settings)
        if call.module is not self._with_attention.get(number):
            name = next(name for name, child in layer.named_children() if child is call.module)
        else:
            angles = next((at for at, (_, result) in enumerate(self._angles) if _same_angles(result, turned)), None)
            if turned is not None and angles is None:
                raise _UnknownPartError(f"layer {number} gets angles that are not those of the rotary embedding")
            own = replace(own, layer=number, angles=angles)
            if attended is not None and (known := self._projections(call, attended, angles)) is not None:
                attention = replace(own, known=known)
                if self._off(attention(normed, self._step()), call.output) <= self._limit:
                    return attention
        self._own.setdefault(name, []).append(number)
        self._hold(own(normed, self._step()), call.output, f"{name} of layer {number}")
        return own

    def _projections(self, call: _Call, attended: _Attended, angles: int | None) -> Projections | None:
        """Return what gives the queries, keys and values that were attended with; None if it is unknown."""
        linear, others = _by_kind(self._calls.get(call.module, ()))
        products, (_, heads, _, size), kv_heads = linear[:-1], attended.query.shape, attended.key.shape[1]
        layers = [some.module for some in products]
        if (
            len(products) not in (1, 3) or len(others) not in (0, 2) or not _alike(layers)
            or not isinstance(attended.scaling, float)
            or not all(_same(some.input, call.input) for some in products)
            or not attended.key.shape == attended.value.shape == (_ROWS, kv_heads, 1, size)
            or sum(layer.out_features for layer in layers) != (heads + 2 * kv_heads) * size
        ):  # fmt: skip
            return None
        known = Projections(layers, linear[-1].module, heads, kv_heads, size, attended.scaling)
        if others:
            query_norm, key_norm = map(self._styled, others)
            if not query_norm.joins(key_norm) or len(query_norm.module.weight) not in (size, heads * size):
                return None
            known = replace(known, norms=(query_norm, key_norm), whole=len(query_norm.module.weight) != size)
        turns: list[tuple[int, bool] | None] = [None]
        if angles is not None:
            width = self._angles[angles][1][0].shape[-1]
            turns += [(angles, doubled) for doubled in (False, True) if width * (1 + doubled) <= size]
        normed, step, wanted = _rows(call.input), self._step(), (attended.query, attended.key, attended.value)
        candidates = [replace(known, turn=turn) for turn in turns]
        off = [max(map(self._off, some.projected(call.module, normed, step), wanted)) for some in candidates]
        return candidates[off.index(min(off))] if min(off) <= self._limit else None

    def _mlp(self, number: int, call: _Call) -> MLP:
        """Return a layer's MLP; its own module computes it if bits matter, or if no known function gates it."""
        linear, _ = _by_kind(self._calls.get(call.module, ()))
        products, normed, step = [some.module for some in linear[:-1]], _rows(call.input), self._step()
        own = MLP(call.module)
        if products and all(_same(some.input, call.input) for some in linear[:-1]) and _alike(products):
            width, down = sum(layer.out_features for layer in products), linear[-1].module
            if len(products) <= 2 and width == 2 * down.in_features and not self._exact:
                candidates = [replace(own, products=products, down=down, activation=name) for name in LAUNCHED.gated]
                off = [self._off(candidate(normed, step), call.output) for candidate in candidates]
                if min(off) <= self._limit:
                    return candidates[off.index(min(off))]
        if not self._exact:
            self._own.setdefault("MLP", []).append(number)
        self._hold(own(normed, step), call.output, f"the MLP of layer {number}")
        return own

    # --- Comparison ---------------------------------------------------------------------------------------------------

    def _hold(self, values: Tensor, wanted: Tensor, name: str) -> None:
        """Refuse the network unless values are as wanted."""
        off = self._off(values, wanted)
        if off > self._limit:
            far = "in its bits" if self._exact else f"by {off:.2g} of its size"
            raise _UnknownPartError(f"{name} differs from transformers' {far}")

    def _off(self, values: Tensor, wanted: Tensor) -> float:
        """Return how far the worst row is off, relative to its norm; infinity if a bit differs and bits matter."""
        wanted = wanted.reshape(values.shape)
        if values.dtype == wanted.dtype and torch.equal(values, wanted):
            return 0.0
        error, size = (values.double() - wanted.double()).norm(dim=-1), wanted.double().norm(dim=-1)
        off = torch.where(error == 0, 0.0, error / size)
        return float("inf") if self._exact or not bool(off.isfinite().all()) else float(off.max())

    def _step(self) -> Step:
        angles = [result for _, result in self._angles]
        return Step(self._operations, self._attention, self._no_states(), self._positions, angles)

    def _no_states(self) -> LayerStates | None:
        """Return states before the first token; None if all layers have attention."""
        return LayerStates() if len(self._with_attention) < len(self._decoder.layers) else None


class _Order(NamedTuple):
    """The calls of a layer, by their place around its mixer and its MLP; None for norms that it lacks."""

    before_mixer: _Call | None
    mixer: _Call
    after_mixer: _Call | None
    before_mlp: _Call | None
    mlp: _Call
    after_mlp: _Call | None


def _ordered(calls: Sequence[_Call], attention: Any) -> _Order | None:
    """Return a layer's calls by their place; None if there are others.

    A norm has no modules of its own. It comes after the mixer or the MLP if it gets what that returned. ``attention``
    is the layer's attention, which must be its mixer; None if the layer has none.
    """

    def is_norm(call: _Call) -> bool:
        return next(call.module.children(), None) is None

    rest = list(calls)
    before = rest.pop(0) if rest and is_norm(rest[0]) else None
    if len(rest) < 2 or (attention is not None and rest[0].module is not attention):
        return None
    mixer = rest.pop(0)
    after = rest.pop(0) if is_norm(rest[0]) and _same(rest[0].input, mixer.output) else None
    before_mlp = rest.pop(0) if len(rest) > 1 and is_norm(rest[0]) else None
    mlp = rest.pop(0) if rest else None
    after_mlp = rest.pop(0) if mlp and rest and is_norm(rest[0]) and _same(rest[0].input, mlp.output) else None
    return None if rest or mlp is None else _Order(before, mixer, after, before_mlp, mlp, after_mlp)


def _listed(numbers: Sequence[int]) -> str:
    """Return ascending numbers of layers in words: "layer 2", "layers 0 to 3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"layer{'s' if len(numbers) > 1 else ''} {', '.join(words)}"


def _by_kind(calls: Sequence[_Call]) -> tuple[list[_Call], list[_Call]]:
    """Divide calls into those of linear layers, and others."""
    linear = [call for call in calls if type(call.module) in LINEAR]
    return linear, [call for call in calls if type(call.module) not in LINEAR]


def _alike(products: Sequence[nn.Linear]) -> bool:
    """Return whether linear layers can be joined: all of them have a bias, or none has one."""
    return len({layer.bias is None for layer in products}) == 1


def _same(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.numel() == other.numel() and torch.equal(one.reshape(other.shape), other))


def _same_angles(one: Any, other: Any) -> bool:
    pairs = isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other)
    return pairs and all(map(_same, one, other))


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _rows(hidden: Tensor) -> Tensor:
    """Return hidden states as [rows, width]."""
    return hidden.reshape(_ROWS, -1)
