"""Try whole steps before the first step of their size, to find out whether a row depends on the rows beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kvdrift.generator.attention.cache_rules import CacheRule
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.attention.row_invariance import step_deviation
from kvdrift.generator.attention.shared_prefix import PrefixLayer
from kvdrift.generator.attention.streams.prompt_reads import with_packed_keys
from kvdrift.generator.attention.threads import stay_alone
from kvdrift.generator.codecs.coded_streams import CodedStreams
from kvdrift.generator.coupling.streams import Savings
from kvdrift.generator.transformer.decoder import Decoder
from kvdrift.generator.transformer.memory import tried_entries, tried_streams
from kvdrift.generator.transformer.prompts.kernels import PromptCaches, TransformerKernels
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.schema.sampling import FULL_SOFTMAX

_TRIED_SUFFIXES = 8  # different ones


def try_steps(
    model: Decoder, prompt: Prompt, entries: int, horizon: int, streams: int, savings: Savings,
    rules: Sequence[CacheRule | None],
) -> None:  # fmt: skip
    """Try steps of these sizes, unless larger ones were tried; the memory is freed afterwards.

    The prompt gives the shapes of layers; ``entries`` are those of the longest prompt, ``rules`` those of the caches.
    """
    entries, streams = tried_entries(entries), tried_streams(streams, horizon, model.shape.entry_bytes)
    tried: Sequence[CacheRule | None] = _to_try(rules, horizon) or [None]
    for rule in tried:
        of_codec = isinstance(rule, CodedStreams)
        model.steps.cover(
            (entries, horizon, streams, int(rule is not None and not of_codec), int(of_codec)),
            partial(_tried, model, partial(_step_deviation, model, prompt, entries, horizon, streams, savings, rule)),
        )


def _tried(model: Decoder, deviation: Callable[[Sequence[int | None]], float]) -> float:
    """Return the deviation of steps that are computed with any number of threads, or else with one thread.

    If steps have other laws with more threads than one, only one thread computes from then on.
    """
    steps, most = model.steps, model.most_threads
    found = deviation((1, most) if most > 1 else (None,))
    if found and most > 1:
        steps.alone = True
        stay_alone()
        steps.say(
            f"with {most} threads rows of a step depend on each other or on the number of threads, by {found:.2g} of "
            "the largest probability: one thread computes"
        )
        found = deviation((None,))
    if found > model.batch_deviation:
        steps.say(
            f"a row of a step depends on the rows beside it, by {found:.2g} of the largest probability, also with one "
            "thread: the control may move; another device or dtype may compute alike"
        )
    return found


def _to_try(rules: Sequence[CacheRule | None], horizon: int) -> list[CacheRule]:
    """Return the rules to try: of the rules that ever attend, one of a policy and one of a codec."""
    attending = [rule for rule in rules if rule and not rule.passes(horizon - 1)]
    kinds = [[rule for rule in attending if isinstance(rule, CodedStreams) is coded] for coded in (False, True)]
    return [max(some, key=lambda one: one.scores) for some in kinds if some]


def _step_deviation(
    model: Decoder, prompt: Prompt, entries: int, horizon: int, streams: int, savings: Savings, rule: CacheRule | None,
    threads: Sequence[int | None] = (None,),
) -> float:  # fmt: skip
    """Return ``step_deviation`` for a prompt of random keys and values, equal in all layers, and the prompt's states.

    The last cache has a rule like a policy's or a codec's.
    """
    layers = prompt.layers
    whole, copy, half = (_random_layers(layers, entries, step) for step in (1, 1, 2))
    own = rule and rule.over(-(-entries // 2), prompt.evictable[0].key.shape[0])
    caches = PromptCaches(
        prompt.entries, prompt.first_law, [whole, copy, half], (0,) * 3, (None, None, own), (prompt.states,) * 3
    )
    model = replace(model, law=FULL_SOFTMAX)  # greedy laws would show few deviations, and those as large
    kernels = TransformerKernels(model, [caches], streams, horizon, savings)
    kv_heads, size = (max(layer.key.shape[dimension] for layer in layers) for dimension in (0, 2))
    generator = torch.Generator().manual_seed(1)
    suffixes = torch.randn(_TRIED_SUFFIXES, kv_heads, horizon - 1, size, generator=generator)
    return step_deviation(kernels, suffixes, streams, threads)


def _random_layers(layers: Sequence[PromptLayer], entries: int, step: int) -> list[PrefixLayer]:
    """Draw the prompt entries of a cache at random.

    A layer with a window has as many entries as the window holds. Every other layer has each ``step``-th of ``entries``
    entries. Layers of one shape share their entries.
    """
    made: dict[tuple[Any, ...], PrefixLayer] = {}
    found = []
    for layer in layers:
        kv_heads, _, size = layer.key.shape
        held = layer.terms.held(entries)
        kind = layer.key.device, layer.key.dtype, kv_heads, size, layer.terms.window
        if kind not in made:
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randn(2, kv_heads, held, size, generator=generator).to(layer.key.dtype)
            part = drawn if layer.terms.window is not None else drawn[:, :, ::step].contiguous()
            key, value = part.to(layer.key.device, copy=True)
            (made[kind],) = with_packed_keys([PrefixLayer(key, value, layer.terms)])
        found.append(replace(made[kind], terms=layer.terms))
    return found
