"""One prompt under a transformer: prefilled once, then one compact cache for each action."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from generator.actions import Action
from generator.attention.cache_rules import CacheRule
from generator.attention.checksums import first_decisions, in_words
from generator.attention.recording import PromptLayer, PromptRecording
from generator.attention.row_invariance import step_deviation
from generator.attention.shared_prefix import PrefixLayer
from generator.attention.statistics import Statistic
from generator.codecs.coded_streams import CodedStreams
from generator.coupling.streams import Savings
from generator.selectors.policies.guarded import rule_of
from generator.selectors.policies.watched import WatchedRule, watched_steps
from generator.transformer.decoder import Decoder
from generator.transformer.eviction import CompactCache, SharedScores, check_choosable, evict
from generator.transformer.fused.head import Head
from generator.transformer.kernels import PromptCaches, TransformerKernels
from generator.transformer.memory import PREFILL_CHUNK, available_bytes, replicates_within
from log.prompts import KeptEntries
from schema.document import Document
from schema.errors import InputError, OperationError, failure_of
from schema.sampling import FULL_SOFTMAX, SamplingLaw

_TRIED_ENTRIES = 1024  # whole steps are tried with a multiple of so many entries
_TRIED_SUFFIXES = 8  # different ones
_LITTLE = 2**26  # bytes of suffixes


class Prompt:
    """A prefilled prompt: what selectors see of every layer, and the law of position 1.

    Args:
        window: How many last queries to keep.
        statistics: What to gather over all queries.
        at_once: How many tokens are processed at once; PREFILL_CHUNK by default.
    """

    def __init__(
        self, model: Decoder, tokens: Sequence[int], window: int, statistics: Iterable[Statistic[Any]] = (),
        at_once: int | None = None,
    ) -> None:  # fmt: skip
        prompt = hashlib.sha256(np.array(tokens, dtype="<i4").tobytes()).digest()
        recording = PromptRecording(len(tokens), max(window, 1), statistics, prompt)
        chunks = torch.split(torch.tensor([list(tokens)]), at_once or PREFILL_CHUNK, dim=1)  # [1, chunk]
        first = 0
        with torch.inference_mode(), recording.gathering.listening(model.network):
            for chunk in chunks:
                model.before_pass()
                hidden = model.network.model(
                    input_ids=chunk.to(model.device),
                    position_ids=torch.arange(first, first + chunk.shape[1], device=model.device)[None],
                    use_cache=False,
                    kvdrift_attention=recording,
                )[0]  # [1, chunk, width]
                first += chunk.shape[1]
            # With a device map the last layers may lie on another device than what draws tokens.
            self._model, self._last = model, hidden[0, -1:].to(model.device, copy=True)  # [1, width]
        self.entries = len(tokens)
        self.layers: list[PromptLayer] = recording.layers
        self.evictable = [layer for layer in self.layers if layer.terms.window is None]
        self._gathering = recording.gathering

        self._first_laws = {model.law: self._first_law(model.law)}

    @property
    def first_law(self) -> Tensor:
        """The law of position 1, [V], by the model's law."""
        return self.first_law_under(self._model.law)

    def first_law_under(self, law: SamplingLaw) -> Tensor:
        """The law of position 1, [V], where tokens are drawn by ``law``."""
        if law not in self._first_laws:
            self._first_laws[law] = self._first_law(law)
        return self._first_laws[law]

    def _first_law(self, law: SamplingLaw) -> Tensor:
        with torch.inference_mode():
            head = Head(self._model.network, self._model.device, self._model.logits_dtype, law)
            return head.laws(self._last, head.room(1))[0]

    def forget_statistics(self) -> None:
        """Drop what was gathered for selectors; it may take as much memory as the cache."""
        self._gathering.forget()


class PrefilledPrompt:
    """``PrefilledDocument`` of a transformer."""

    def __init__(self, model: Decoder, document: Document, actions: Sequence[Action], horizon: int) -> None:
        entries = document.prompt_tokens
        kept = [action.kept_entries(entries, f"document '{document.doc}'") for action in actions]
        self._model, self._horizon, self._entries, self._tokens = model, horizon, entries, document.tokens
        self._actions = list(zip(actions, kept, strict=True))
        ranking = {action.name: action.chooser for action, m in self._actions if m < entries}
        self._scores = SharedScores(ranking.values())
        choosing = [  # the others keep everything
            action for action, m in self._actions if m < entries or action.budget(entries, horizon) is not None
        ]
        for action in choosing:
            config = model.network.config
            check_choosable(action.chooser, config.model_type, getattr(config, "attn_logit_softcapping", None))
            self._check_room(document.doc, action)
        began = time.perf_counter()
        selectors = [action.chooser for action in choosing]
        self._prompt = Prompt(
            model,
            document.tokens,
            window=max((selector.window for selector in selectors), default=0),
            statistics=[statistic for selector in selectors for statistic in selector.statistics],
        )
        self._seconds = time.perf_counter() - began

    def _check_room(self, doc: str, action: Action) -> None:
        entries, shape, chooser = self._entries, self._model.shape, action.chooser
        try:
            needed = int(chooser.working_bytes(shape.heads, entries, shape.item_bytes))
        except Exception as error:
            line = f"selector {type(chooser).__name__}: working_bytes: {failure_of(error, chooser)}"
            raise OperationError(line) from error
        if needed and needed > (free := available_bytes(self._model.device)):
            raise InputError(
                f"action '{action.name}': choosing among the {entries} prompt entries of document '{doc}' takes "
                f"{needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free; "
                f"give shorter prompts or another {'selector' if action.policy is None else 'policy'}"
            )

    def evict(self) -> PreparedPrompt:
        """Make one compact cache for each action; one that is there several times has one, whose time they share.

        Of actions that share scores each has the seconds that it would have taken alone.
        """
        shared = self._seconds / len(self._actions)
        times = Counter(action.name for action, _ in self._actions)
        evicted: dict[str, tuple[PreparedCache, float]] = {}
        for action, m in self._actions:
            if action.name not in evicted:
                began, spared = time.perf_counter(), self._scores.spared_seconds
                cache = self._cache_of(action, m)
                took = time.perf_counter() - began + self._scores.spared_seconds - spared
                evicted[action.name] = cache, took / times[action.name]
        caches = [evicted[action.name][0] for action, _ in self._actions]
        seconds = [shared + evicted[action.name][1] for action, _ in self._actions]
        self._scores.forget()
        self._prompt.forget_statistics()
        return PreparedPrompt(self._model, self._prompt, caches, seconds, self._horizon)

    def _cache_of(self, action: Action, kept: int) -> PreparedCache:
        layers = self._prompt_of(action).evictable
        compact = evict(layers, self._scores.of(action.chooser), kept, action.holding)
        most = action.most_entries(self._entries, self._horizon)
        budget = action.budget(self._entries, self._horizon)
        if action.generated is not None:
            rule = action.generated.rule(layers, compact.indices, compact.layers, self._horizon)
            return PreparedCache(compact, most, 0, rule)
        if action.policy is None or budget is None:
            return PreparedCache(compact, most, action.row_tile or 0)
        rule = WatchedRule(rule_of(action.policy, layers, compact.indices, budget), watched_steps(self._horizon))
        decided = in_words(first_decisions(rule, layers, compact.layers))
        held = replace(compact, indexed=True, read_checksums=decided)  # steps remove entries, if prefill did not
        return PreparedCache(held, most, 0, rule)

    def _prompt_of(self, action: Action) -> Prompt:
        """The prompt whose entries an action keeps: the reference's, or one that is prefilled in other chunks."""
        chunk = action.prefill_chunk
        if chunk is None or min(chunk, self._entries) == min(PREFILL_CHUNK, self._entries):
            return self._prompt
        return Prompt(self._model, self._tokens, window=0, at_once=chunk)


@dataclass(frozen=True)
class PreparedCache:
    """What an action's streams start from.

    Attributes:
        compact: What is kept of the prompt.
        entries: What its bytes are counted of, per KV head and layer: the kept entries, and with a decode-time policy
            the most that a step reads.
        tile: How many rows read it at once, at most; 0 for the usual number.
        rule: What a decode-time policy does with the entries, unless m is never too few; or a codec, with those that
            are generated.
    """

    compact: CompactCache
    entries: int
    tile: int = 0
    rule: CacheRule | None = None

    @property
    def counted_bytes(self) -> tuple[int, int]:
        """Bytes of payload and index of so many entries."""
        compact = self.compact
        payload, index, kept = compact.payload_bytes, compact.index_bytes, compact.kept_entries
        if self.entries != kept:  # a policy's, which holds all entries alike
            payload, index = payload // kept * self.entries, index // kept * self.entries
        return payload, index


class PreparedPrompt:
    """``PreparedDocument`` of a transformer.

    Args:
        caches: One for each action.
        seconds: Of each action, what prefill and eviction took.
    """

    def __init__(
        self, model: Decoder, prompt: Prompt, caches: Sequence[PreparedCache], seconds: Sequence[float], horizon: int
    ) -> None:
        self._model, self._prompt, self._caches = model, prompt, caches
        self._seconds, self._horizon = seconds, horizon

    def kernels(
        self, streams: int, savings: Savings, beside: Sequence[PreparedPrompt] = (), parked: int = 0
    ) -> TransformerKernels:
        """Make kernels with room for so many streams; they share the memory of the prompts and the caches."""
        prompts = [prompt.caches for prompt in (self, *beside)]
        self._try_steps(max(prompt.entries for prompt in prompts), streams, savings)
        return TransformerKernels(self._model, prompts, streams, self._horizon, savings, parked)

    def _try_steps(self, entries: int, streams: int, savings: Savings) -> None:
        """Try whole steps of such sizes before the first ones are made; the memory taken is free again afterwards."""
        entries = -(-entries // _TRIED_ENTRIES) * _TRIED_ENTRIES
        more = 1 << (streams - 1).bit_length()  # the next ones may be a few more
        if more * self._horizon * self._model.shape.entry_bytes <= _LITTLE:
            streams = more
        rules: Sequence[CacheRule | None] = self._rules_to_try() or [None]
        for rule in rules:
            of_codec = isinstance(rule, CodedStreams)
            self._model.steps.cover(
                (entries, self._horizon, streams, int(rule is not None and not of_codec), int(of_codec)),
                partial(self._step_deviation, entries, streams, savings, rule),
            )

    def _rules_to_try(self) -> list[CacheRule]:
        """Of rules that ever attend one of a policy, and one of a codec."""
        rules = [cache.rule for cache in self._caches if cache.rule and not cache.rule.passes(self._horizon - 1)]
        kinds = [[rule for rule in rules if isinstance(rule, CodedStreams) is coded] for coded in (False, True)]
        return [max(some, key=lambda one: one.scores) for some in kinds if some]

    def _step_deviation(self, entries: int, streams: int, savings: Savings, rule: CacheRule | None = None) -> float:
        """``step_deviation`` with a prompt of random keys and values, the same ones in all layers.

        The last cache has such a rule as a policy's or a codec's.
        """
        layers = self._prompt.layers
        whole, copy, half = (_random_layers(layers, entries, step) for step in (1, 1, 2))
        half_entries = -(-entries // 2)
        caches = PromptCaches(
            self._prompt.entries,
            self._prompt.first_law,
            [whole, copy, half],
            (0,) * 3,
            (None, None, rule and rule.over(half_entries, self._prompt.evictable[0].key.shape[0])),
        )
        model = replace(self._model, law=FULL_SOFTMAX)  # greedy laws would show few deviations, and those as large
        kernels = TransformerKernels(model, [caches], streams, self._horizon, savings)
        kv_heads, size = (max(layer.key.shape[dimension] for layer in layers) for dimension in (0, 2))
        generator = torch.Generator().manual_seed(1)
        suffixes = torch.randn(_TRIED_SUFFIXES, kv_heads, self._horizon - 1, size, generator=generator)
        return step_deviation(kernels, suffixes, streams)

    def under(self, law: SamplingLaw) -> PreparedPrompt:
        """The same caches where tokens are drawn by another law."""
        model = replace(self._model, law=law)
        return PreparedPrompt(model, self._prompt, self._caches, self._seconds, self._horizon)

    @property
    def caches(self) -> PromptCaches:
        """What its streams start from."""
        whole = tuple(PrefixLayer(layer.key, layer.value, layer.terms) for layer in self._prompt.layers)
        layers = [whole, *(_beside_windows(whole, cache.compact.layers) for cache in self._caches)]
        tiles, rules = [cache.tile for cache in self._caches], [cache.rule for cache in self._caches]
        first = self._prompt.first_law_under(self._model.law)
        return PromptCaches(self._prompt.entries, first, layers, (0, *tiles), (None, *rules))

    def replicates_at_once(self, actions: int, estimator: str) -> int:
        """How many replicates of each of so many actions fit the memory that is left now; at least 1."""
        scored = max((cache.rule.scores for cache in self._caches if cache.rule is not None), default=0)
        needed = self._model.shape.replicate_bytes(actions, self._prompt.entries, self._horizon, estimator, scored)
        return replicates_within(int(self._model.memory_share * available_bytes(self._model.device)), needed)

    def record(self, number: int, streams: int) -> dict[str, Any]:
        """What ``units`` says of cache ``number``, from 1; resident bytes are those of its streams before step 1."""
        compact, (payload, index) = self._caches[number - 1].compact, self._caches[number - 1].counted_bytes
        # What a layer with a window holds does not grow beyond it, and is the same whatever an action keeps.
        suffix = sum(
            2
            * layer.key[:, :1].nbytes
            * (layer.terms.held(self._prompt.entries + self._horizon) - layer.terms.held(self._prompt.entries))
            for layer in self._prompt.layers
        )
        windows = [layer for layer in self._prompt.layers if layer.terms.window is not None]
        window_bytes = sum(layer.key.nbytes + layer.value.nbytes for layer in windows)
        return {
            "prompt_entries": self._prompt.entries, "kept_entries": compact.kept_entries,
            "payload_bytes": payload + window_bytes, "scale_bytes": compact.scale_bytes, "index_bytes": index,
            "metadata_bytes": compact.metadata_bytes,
            "resident_bytes": compact.stored_bytes + window_bytes + suffix * streams,
            "kept_sha256": list(compact.kept_sha256),
            "read_checksums": None if compact.read_checksums is None else list(compact.read_checksums),
            "prefill_seconds": self._seconds[number - 1],
        }  # fmt: skip

    def kept(self, number: int) -> tuple[KeptEntries, ...]:
        """Return what cache ``number`` has of the prompt's entries right after prefill, and after steps of a policy."""
        cache, entries = self._caches[number - 1], self._prompt.entries
        kept = [cache.compact.kept_by_position(entries)]
        if isinstance(cache.rule, WatchedRule):
            left = sorted(cache.rule.left_after.items())
            kept += [cache.compact.kept_by_position(entries, own, step) for step, own in left]
        return tuple(kept)


def _beside_windows(whole: Sequence[PrefixLayer], kept: Sequence[PrefixLayer]) -> tuple[PrefixLayer, ...]:
    """What an action keeps of the layers without a window, between those with one, which every cache has."""
    own = iter(kept)
    return tuple(layer if layer.terms.window is not None else replace(next(own), terms=layer.terms) for layer in whole)


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
            made[kind] = PrefixLayer(*part.to(layer.key.device, copy=True))
        found.append(replace(made[kind], terms=layer.terms))
    return found
