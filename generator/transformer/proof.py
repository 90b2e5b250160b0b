"""Prove, when a model is loaded, that decoding here gives the results of transformers' own forward pass.

The reference is a probe that transformers computes alone: with eager attention, and with evicted entries in fact
removed. Then the probe is decoded here. At each point of the network the values are compared with the reference's, and
computing goes on with the reference's values. So every layer has the reference's own input: errors do not add up over
layers, and a router with two nearly equal scores chooses the reference's experts.

A proof also finds out two traits of layers that selectors need to know: a soft cap, and how queries are rotated.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvdrift.generator.attention.parts import attention_modules
from kvdrift.generator.attention.recording import QueryChunk
from kvdrift.generator.attention.shared_prefix import PrefixLayer, StreamCache
from kvdrift.generator.coupling.streams import SHARE_ALL
from kvdrift.generator.transformer.decoder import Decoder
from kvdrift.generator.transformer.files.configuration import library, rope_switch
from kvdrift.generator.transformer.model_checks import Proof
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.generator.transformer.prompts.streams import PromptCaches, TransformerStreams
from kvdrift.schema.errors import first_line


class Point(NamedTuple):
    """A point of a layer at which values are compared; ``number`` counts the points of one kind in a layer, from 0."""

    layer: int
    kind: str
    number: int = 0

    @property
    def name(self) -> str:
        """The part of the network that computes the values at the point, in words."""
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
        """Visit the hidden states after a layer if it is the last one."""
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
    """The tokens with which a model is tried: a prompt, and two continuations that differ."""

    prompt: Tensor  # int64 [ENTRIES]
    continuations: Tensor  # int64 [2, STEPS]

    @classmethod
    def of(cls, vocabulary: int) -> Probe:
        """Draw the tokens from a vocabulary of this size; equal sizes give equal tokens."""
        drawn = torch.randint(vocabulary, (ENTRIES + 2 * STEPS,), generator=torch.Generator().manual_seed(0))
        return cls(drawn[:ENTRIES], drawn[ENTRIES:].view(2, STEPS))


def kept_positions(layer: int, kv_heads: int) -> Tensor:
    """Return the prompt entries that the evicted cache keeps, int64 [KV heads, KEPT], ascending.

    ``layer`` is the layer's number among layers without a window, from 0.
    """
    generator = torch.Generator().manual_seed(1 + layer)
    ranked = torch.rand(kv_heads, ENTRIES, generator=generator).argsort(-1)
    return ranked[:, :KEPT].sort(-1).values


@contextlib.contextmanager
def short_lengths(network: Any) -> Iterator[None]:
    """Inside the block, make windows, and the length at which RoPE switches, shorter than the probe.

    So a short probe is enough: a model's code treats all lengths in the same way.
    """
    holders = [network.config, *network.modules()]
    named = [
        (holder, vars(holder)["sliding_window"])
        for holder in holders
        if type(vars(holder).get("sliding_window")) is int
    ]
    for holder, _ in named:
        holder.sliding_window = WINDOW
    switch = rope_switch(network.config)
    stated = [] if switch is None else [network.config.rope_parameters, vars(network.config)]  # the second wins
    before = [(content, content[_SWITCH]) for content in stated if _SWITCH in content]
    for content, _ in before:
        content[_SWITCH] = WINDOW
    try:
        yield
    finally:
        for content, length in before:
            content[_SWITCH] = length
        for holder, window in named:
            holder.sliding_window = window


@dataclass(frozen=True)
class Reference:
    """The probe as transformers computes it.

    A row is a token: first the tokens of the prompt, then, step by step, the tokens of the two streams with the whole
    cache, then, step by step, those of the two streams with the evicted cache.

    ``values`` has the values of all rows at each point of the network, [rows, ...], in its dtype. ``logits``, [rows,
    V], lacks the rows of the prompt's tokens before the last. Both are on the CPU. The passes took ``seconds``.
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
    """Remove the entries that are not in ``kept_positions`` from the layers with full attention."""
    number = 0
    for layer in cache.layers:
        if getattr(layer, "is_sliding", False) or not hasattr(layer, "keys"):
            continue
        places = kept_positions(number, layer.keys.shape[1]).to(layer.keys.device)[None, :, :, None]
        layer.keys, layer.values = (
            part.gather(2, places.expand(-1, -1, -1, part.shape[-1])) for part in (layer.keys, layer.values)
        )
        number += 1


TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}
"""The largest error of a row, relative to the row's size, that is allowed; for attention in nine of ten rows.

Errors are rounding, most of all in attention: transformers' eager attention rounds scores to the dtype, so a score s is
off by up to s / 512 in bfloat16 and s / 4096 in float16, and the weight of its key by that share. With scores up to
some 80, attention of nine of ten rows was within .025 in bfloat16, .004 in float16 and 3e-6 in float32, for random
models of 30 families, Gemma 3 270M and SmolLM2-135M. Anything else was within .006, .002 and 1e-5. A wrong sign is an
error of 2; a window with one entry more, an error of .1 to 1 in the rows that it concerns.
"""

WORST = 2.5
"""Every row of attention must be within this multiple of the tolerance.

A row whose largest scores are nearly equal is off by more than others: by up to .13 in bfloat16 and .015 in float16
for the models above. A sink that is left out concerns the first rows most: it is an error of about 1 in the first one,
and may be smaller than the tolerance in most others.
"""

_ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}
_SUMS = 4  # roundings of hidden states by a layer, which adds to them at least twice

_LEAST_LOGIT = -80.0  # logarithms of probabilities below are the same, since float32 cannot hold smaller probabilities


def prove(model: Decoder, probe: Probe, reference: Reference) -> Proof:
    """Compare a loaded model with transformers' own forward pass on the probe; if they agree, find its traits."""
    problem = refusal(model, probe, reference)
    if problem is not None:
        return Proof(problem)

    def as_reference(point: Point, values: Tensor) -> Tensor:
        return reference.values[point][: len(values)].to(values.device)

    tokens = probe.prompt[:_TOKENS].tolist()
    with model.computing(), visited(model.network, as_reference):
        prompt = Prompt(model, tokens, window=0)
        halves = _are_turned_by_halves(model, tokens)
    caps = [layer.terms.softcap for layer in prompt.evictable if layer.terms.softcap is not None]
    return Proof(None, max(caps, default=None), halves)


def refusal(model: Decoder, probe: Probe, reference: Reference) -> str | None:
    """Compare a loaded model with transformers' own forward pass on the probe.

    Returns None if the results agree; else a line that names the differences and their sizes.
    """
    compared = _Comparison(reference, model.dtype)
    try:
        with model.computing():
            _compute(model, probe, compared)
    except Exception as error:  # noqa: BLE001 - its code may raise anything with our attention
        line = first_line(error)
        return f"transformers' own forward pass computes a probe, and with kvdrift's attention it fails ({line})"
    return compared.refusal()


def difference(values: Tensor, wanted: Tensor, size: Tensor | None = None) -> Tensor:
    """Return the norm of each row's error, [rows], relative to ``size``: by default the norm of the wanted row.

    Values are [rows, ...]; equal values have no error, even if they are infinite.
    """
    values, wanted = (part.flatten(1).double().cpu() for part in (values, wanted))
    error = torch.where(values == wanted, 0.0, values - wanted).norm(dim=-1)
    size = wanted.nan_to_num(neginf=0.0).norm(dim=-1) if size is None else size
    return torch.where(error == 0.0, 0.0, error / size)


class _Comparison:
    """Compares decoding here with the reference, and keeps the errors of all rows at each point."""

    def __init__(self, reference: Reference, dtype: str) -> None:
        self._reference, self._dtype = reference, dtype
        self._rows = self._places = torch.empty(0, dtype=torch.int64)
        self._errors: dict[Point, list[Tensor]] = {}
        self._of_logits: list[Tensor] = []

    def expect(self, rows: Tensor, places: Tensor | None = None) -> None:
        """Say which rows of the reference the next pass computes.

        Args:
            rows: the rows of the reference, int64 [n].
            places: the row of the pass that computes each of ``rows``, int64 [n]; by default 0 .. n - 1.
        """
        self._rows, self._places = rows, torch.arange(len(rows)) if places is None else places

    def visit(self, point: Point, values: Tensor) -> Tensor:
        """Compare the values at a point, and return the reference's values; this method is a ``Visit``."""
        reference = self._reference.values.get(point)
        if reference is None or reference.shape[1:] != values.shape[1:]:
            return values  # the point lacks rows, which ``refusal`` finds
        rows = self._rows[:1].repeat(len(values))  # rows without a stream repeat the first row
        rows[self._places] = self._rows
        wanted = reference[rows].to(values.device)
        places = self._places.to(values.device)
        errors = difference(values[places], wanted[places], self._added(point, reference))
        self._errors.setdefault(point, []).append(errors)
        return wanted

    def see_distributions(self, distributions: Tensor) -> None:
        """Compare the next-token distributions of the expected rows, [n, V], by the logarithms of probabilities."""
        wanted = self._reference.logits[self._rows - (ENTRIES - 1)].to(distributions.device).double().log_softmax(-1)
        values, wanted = (part.clamp(min=_LEAST_LOGIT) for part in (distributions.double().log(), wanted))
        values, wanted = (part - part.mean(-1, keepdim=True) for part in (values, wanted))
        self._of_logits.append(difference(values, wanted))

    def refusal(self) -> str | None:
        """Return a line about the first point that differs by more than is allowed; None if there is none."""
        for point, values in self._reference.values.items():
            errors = self._errors.get(point, [])
            if sum(map(len, errors)) != len(values):
                return f"{point.name} is not computed as often as by transformers' own forward pass, or in other shapes"
            if (problem := self._problem(torch.cat(errors), attention=point.kind == ATTENTION)) is not None:
                return f"{point.name} differs from transformers' own forward pass {problem}"
        problem = self._problem(torch.cat(self._of_logits))
        return None if problem is None else f"its logits differ from transformers' own forward pass {problem}"

    def _added(self, point: Point, reference: Tensor) -> Tensor | None:
        """Return the norms of a layer's addition to its input, by which errors of its output are divided.

        The result is None if the point is no layer's output. Hidden states may be much larger than a layer's addition.
        Rounding them is no error of the layer, so the norms include an allowance for ``_SUMS`` roundings.
        """
        before = self._reference.values.get(Point(point.layer - (point.kind == INPUT), INPUT))
        if point.kind not in (INPUT, OUTPUT) or before is None or before.shape != reference.shape:
            return None
        wanted, computed = (part[self._rows].flatten(1).double() for part in (reference, before))
        rounding = _SUMS * _ROUNDING[self._dtype] / TOLERANCES[self._dtype]
        added: Tensor = (wanted - computed).norm(dim=-1) + rounding * wanted.norm(dim=-1)
        return added

    def _problem(self, errors: Tensor, *, attention: bool = False) -> str | None:
        most, allowed = errors.max(), TOLERANCES[self._dtype]
        if attention and (usual := errors.quantile(0.9)) <= allowed:
            allowed *= WORST
        elif attention:
            most = usual
        return None if most <= allowed else f"by {most:.2g} of its size on a probe, and {allowed:g} is allowed"


def _compute(model: Decoder, probe: Probe, compared: _Comparison) -> None:
    """Compute the probe as documents are computed: in chunks, with shared prompts and forks."""
    chunks: Iterator[Tensor] = iter(torch.split(torch.arange(ENTRIES), CHUNK))
    with short_lengths(model.network), visited(model.network, compared.visit):
        by_chunks = replace(model, before_pass=lambda: compared.expect(next(chunks)))
        prompt = Prompt(by_chunks, probe.prompt.tolist(), window=0, at_once=CHUNK)
        if (attending := len(prompt.layers)) != (expected := len(attention_modules(model.network))):
            raise ValueError(f"{attending} of {expected} layers attend through transformers' attention interface")
        compared.expect(torch.tensor([ENTRIES - 1]))
        compared.see_distributions(prompt.first_distribution[None])
        whole = [PrefixLayer(layer.key, layer.value, layer.terms) for layer in prompt.layers]
        evicted = [
            layer_entries
            if layer.terms.window is not None
            else _kept(layer_entries, kept_positions(layer.number, layer_entries.key.shape[0]))
            for layer, layer_entries in zip(prompt.layers, whole, strict=True)
        ]
        caches = PromptCaches(
            ENTRIES, prompt.first_distribution, [StreamCache(layers, prompt.states) for layers in (whole, evicted)]
        )
        kernels = TransformerStreams(model, [caches], 4, STEPS + 1, SHARE_ALL)
        kernels.open([0, 1])
        kernels.select(torch.tensor([0, 0, 1, 1]))
        for step in range(STEPS):
            compared.expect(step_rows(step), kernels.attention.slots)
            compared.see_distributions(kernels.advance(probe.continuations[:, step].repeat(2)))
            kernels.select(torch.arange(4))


def _kept(layer: PrefixLayer, positions: Tensor) -> PrefixLayer:
    """Return a layer with only the entries at positions [KV heads, m]."""
    places = positions.to(layer.key.device)[:, :, None]
    key, value = (part.gather(1, places.expand(-1, -1, part.shape[-1])) for part in (layer.key, layer.value))
    return PrefixLayer(key, value, layer.terms)


_FIRST = (0, 7)  # tried positions of the first token; queries rotated back differ unless RoPE is by halves
_TOKENS = 4  # of the probe; a token's queries depend on nothing but its own input, which is the reference's


@dataclass(frozen=True)
class _PlainQueries:
    """A statistic: a layer's queries, rotated back as if RoPE turned them by halves, [heads, positions, size].

    If RoPE does turn whole heads by halves (``rotate_half``), these are the queries before rotation. The prompt's first
    token is at position ``first``.
    """

    first: int

    def update(self, gathered: Tensor | None, chunk: QueryChunk) -> Tensor:
        """Rotate a chunk's queries back by the embedding's angles for their positions."""
        start = self.first + chunk.first
        positions = torch.arange(start, start + chunk.query.shape[1], device=chunk.query.device)
        cos, sin = (part[0].double() for part in chunk.rotary(chunk.hidden[None], positions[None]))
        query = chunk.query.double()
        first, second = query.chunk(2, dim=-1)
        plain = (query * cos - torch.cat([-second, first], -1) * sin) / (cos**2 + sin**2)
        return plain if gathered is None else torch.cat([gathered, plain], 1)


def _are_turned_by_halves(model: Decoder, tokens: list[int]) -> bool:
    """Return whether the queries of a prompt, rotated back by halves, are equal for two positions of its first token.

    Queries before rotation do not depend on where the prompt begins, since attention with RoPE depends only on
    distances. Rotating back by halves gives these queries only if RoPE rotates by halves.
    """
    gathered = []
    try:
        for first in _FIRST:
            statistic = _PlainQueries(first)
            prompt = Prompt(model, tokens, window=0, statistics=[statistic], first=first)
            gathered.append([layer.gathered(statistic) for layer in prompt.evictable])
    except Exception:  # noqa: BLE001 - the embedding gives no angles for whole heads, or none in the usual way
        return False
    off = max(float(difference(first, second).max()) for first, second in zip(*gathered, strict=True))
    return off <= TOLERANCES[model.dtype]
