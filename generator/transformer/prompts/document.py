"""A document's prompt, prefilled for all its actions, evicted for each, and ready to decode streams."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvdrift.generator.actions import Action
from kvdrift.generator.attention.holding import AsComputed, first_decisions, in_words
from kvdrift.generator.attention.prompt_reads import PrefixLayer, same_entries, with_packed_keys
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.attention.shared_prefix import StreamCache
from kvdrift.generator.coupling.steps import captures
from kvdrift.generator.coupling.streams import SharingOptions
from kvdrift.generator.selectors.policies.around import WatchedRule, rule_of, watched_steps
from kvdrift.generator.transformer.decoder import Decoder
from kvdrift.generator.transformer.memory import PREFILL_CHUNK, available_bytes, replicates_within
from kvdrift.generator.transformer.model_checks import check_layers
from kvdrift.generator.transformer.prompts.eviction import CompactCache, evict
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.generator.transformer.prompts.streams import PromptCaches, TransformerStreams, try_steps
from kvdrift.log.prompts import KeptEntries
from kvdrift.schema.document import Document
from kvdrift.schema.errors import InputError, failing_as
from kvdrift.schema.sampling import Sampling


@dataclass(frozen=True)
class PreparedCache:
    """The cache of an action.

    ``start`` has a rule if a decode-time policy ever drops an entry, or if a codec codes generated entries.
    """

    compact: CompactCache  # the kept entries of the prompt
    entries: int  # counted in bytes, per KV head and layer: the kept entries, or the most that a policy's step reads
    start: StreamCache  # the kept entries, and the entries of windows

    @property
    def counted_bytes(self) -> tuple[int, int]:
        """Bytes of payload and index of ``entries`` entries."""
        compact = self.compact
        payload, index, kept = compact.payload_bytes, compact.index_bytes, compact.kept_entries
        if self.entries != kept:  # a policy's cache, which holds all entries
            payload, index = payload // kept * self.entries, index // kept * self.entries
        return payload, index


class PreparedPrompt:
    """A transformer's ``PreparedDocument``: the layers of the whole prompt, and one cache for each action.

    Several occurrences of an action share a cache and divide its time. ``seconds`` are those of prefill; ``sharing`` is
    the number of actions among which they are divided, None for the number of ``actions``.
    """

    def __init__(
        self, model: Decoder, document: Document, actions: Sequence[Action], horizon: int, sharing: int | None = None
    ) -> None:
        self._model, self._document, self._horizon = model, document, horizon
        entries = document.prompt_tokens
        kept = [action.kept_entries(entries, f"document '{document.doc}'") for action in actions]
        choosing = [  # the others keep everything
            action
            for action, m in zip(actions, kept, strict=True)
            if m < entries or action.budget(entries, horizon) is not None
        ]
        for action in actions:
            action.check_layer_numbers(model.shape.evictable_layers)
        for action in choosing:
            check_layers(action, model.traits)
            self._check_room(action)
        began = time.perf_counter()
        selectors = [action.chooser for action in choosing]
        self._prompt = Prompt(
            model,
            document.tokens,
            window=max((selector.window for selector in selectors), default=0),
            statistics=[statistic for selector in selectors for statistic in selector.statistics],
        )
        layers = [PrefixLayer(layer.key, layer.value, layer.terms) for layer in self._prompt.layers]
        self._whole = with_packed_keys(layers)
        self.seconds = time.perf_counter() - began
        caches: dict[str, tuple[PreparedCache, float]] = {}
        times = Counter(action.name for action in actions)
        for action, m in zip(actions, kept, strict=True):
            if action.name not in caches:
                began = time.perf_counter()
                cache = self._cache_of(action, m)
                caches[action.name] = cache, (time.perf_counter() - began) / times[action.name]
        self._caches = [caches[action.name][0] for action in actions]
        # Each action is charged its share of the prefill and the time of its eviction.
        sharing = len(actions) if sharing is None else sharing
        self._seconds = [self.seconds / sharing + caches[action.name][1] for action in actions]
        self._prompt.forget_statistics()

    def kernels(
        self, streams: int, sharing: SharingOptions, beside: Sequence[PreparedPrompt] = (), parked: int = 0
    ) -> TransformerStreams:
        """Return a decoder of the streams of this prompt and of the prompts ``beside`` it.

        It has room for ``streams`` open and ``parked`` parked streams. ``try_steps`` tests steps of this size first.
        All decoders share the memory of prompts and caches.
        """
        prompts = [prompt.caches for prompt in (self, *beside)]
        longest = max(prompt.entries for prompt in prompts)
        rules = [cache.start.rule for cache in self._caches]
        try_steps(self._model, self._prompt, longest, self._horizon, streams, sharing, rules)
        kernels = TransformerStreams(self._model, prompts, streams, self._horizon, sharing, parked)
        if captures(device := torch.device(self._model.device)):
            for reason in kernels.attention.unsteady:
                self._model.steps.say_once(
                    f"decoding on {device} takes longer than it could: steps are no graphs ({reason})"
                )
        return kernels

    def under(self, sampling: Sampling) -> PreparedPrompt:
        """Return a prepared prompt with the same caches and another sampling."""
        other = copy.copy(self)
        other._model = replace(self._model, sampling=sampling)  # noqa: SLF001 - a copy of its own
        return other

    @property
    def caches(self) -> PromptCaches:
        """The starting point of the prompt's streams."""
        whole = StreamCache(self._whole, self._prompt.states)
        first = self._prompt.first_distribution_under(self._model.sampling)
        return PromptCaches(self._prompt.entries, first, [whole, *(cache.start for cache in self._caches)])

    def replicates_at_once(self, actions: int, estimator: str) -> int:
        """Return how many replicates of each action fit into the memory that is left now; at least 1."""
        available = int(self._model.memory_share * available_bytes(self._model.device))
        return replicates_within(available, self.replicate_bytes(actions, estimator))

    def replicate_bytes(self, actions: int, estimator: str) -> int:
        """Return how many bytes decoding one replicate of each action takes."""
        rules = [cache.start.rule for cache in self._caches]
        scored = max((rule.scores for rule in rules if rule is not None), default=0)
        return self._model.shape.decoding_bytes([1] * actions, self._prompt.entries, self._horizon, estimator, scored)

    def record(self, number: int, streams: int) -> dict[str, Any]:
        """Return the columns of ``units`` about cache ``number``, counted from 1.

        Resident bytes include the room for suffixes and states of ``streams`` streams.
        """
        compact, (payload, index) = self._caches[number - 1].compact, self._caches[number - 1].counted_bytes
        # A layer with a window never holds more than the window, whatever an action keeps.
        suffix = sum(
            2
            * layer.key[:, :1].nbytes
            * (layer.terms.held(self._prompt.entries + self._horizon) - layer.terms.held(self._prompt.entries))
            for layer in self._prompt.layers
        )
        windows = [layer for layer in self._prompt.layers if layer.terms.window is not None]
        states = 0 if self._prompt.states is None else self._prompt.states.nbytes
        beside = sum(layer.key.nbytes + layer.value.nbytes for layer in windows) + states
        return {
            "prompt_entries": self._prompt.entries, "kept_entries": compact.kept_entries,
            "payload_bytes": payload + beside, "scale_bytes": compact.scale_bytes, "index_bytes": index,
            "metadata_bytes": compact.metadata_bytes, "fixed_bytes": beside,
            "resident_bytes": compact.stored_bytes + beside + (suffix + states) * streams,
            "kept_sha256": list(compact.kept_sha256),
            "read_checksums": None if compact.read_checksums is None else list(compact.read_checksums),
            "prefill_seconds": self._seconds[number - 1],
        }  # fmt: skip

    def kept(self, number: int) -> tuple[KeptEntries, ...]:
        """Return the prompt entries that cache ``number`` has right after prefill, and after steps of a policy."""
        cache, entries = self._caches[number - 1], self._prompt.entries
        kept, rule = [cache.compact.kept_by_position(entries)], cache.start.rule
        if isinstance(rule, WatchedRule):
            left = sorted(rule.left_after.items())
            kept += [cache.compact.kept_by_position(entries, cache_entries, step) for step, cache_entries in left]
        return tuple(kept)

    def _check_room(self, action: Action) -> None:
        entries, shape, chooser = self._document.prompt_tokens, self._model.shape, action.chooser
        with failing_as("selector", chooser, "working_bytes: "):
            needed = int(chooser.working_bytes(shape.heads, entries, shape.item_bytes))
        if needed and needed > (free := available_bytes(self._model.device)):
            raise InputError(
                f"action '{action.name}': choosing among the {entries} prompt entries of document "
                f"'{self._document.doc}' takes {needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free; "
                f"give shorter prompts or another {'selector' if action.policy is None else 'policy'}"
            )

    def _cache_of(self, action: Action, kept: int) -> PreparedCache:
        prompt, entries = self._prompt_of(action), self._document.prompt_tokens
        layers = len(prompt.evictable)
        holdings, whole = action.holdings(layers), action.chosen.left_out(layers)
        compact = evict(prompt.evictable, action.chooser, kept, holdings, whole)
        if action.policy is not None and any(layer.lengths is not None for layer in compact.layers):
            raise InputError(
                f"action '{action.name}': the first_cut of policy '{action.policy_name}' lets heads keep different "
                "numbers of entries; it must keep equally many in every head"
            )
        budget, rule = action.budget(entries, self._horizon), None
        if action.generated is not None:
            exact = [number for number, holding in enumerate(holdings) if isinstance(holding, AsComputed)]
            rule = action.generated.rule(prompt.evictable, compact.indices, compact.layers, exact, self._horizon)
        elif action.policy is not None and budget is not None:
            rule_of_action = rule_of(action.policy, prompt.evictable, compact.indices, budget)
            rule = WatchedRule(rule_of_action, watched_steps(self._horizon))
            decided = in_words(first_decisions(rule_of_action, prompt.evictable, compact.layers))
            # Steps remove entries, if prefill did not.
            compact = replace(compact, indexed=True, read_checksums=decided)
        held = beside_windows(prompt.layers, compact.layers)
        if rule is None:  # a rule might change entries
            held = self._whole if same_entries(held, self._whole) else with_packed_keys(held)
            compact = replace(compact, layers=tuple(layer for layer in held if layer.terms.window is None))
        start = StreamCache(held, prompt.states, action.row_tile or 0, rule)
        policy = action.policy is not None
        counted = action.most_entries(entries, self._horizon) if policy else compact.kept_entries
        return PreparedCache(compact, counted, start)

    def _prompt_of(self, action: Action) -> Prompt:
        """Return the prompt from which an action keeps entries: the reference's, or one prefilled in other chunks."""
        chunk, entries = action.prefill_chunk, self._document.prompt_tokens
        if chunk is None or min(chunk, entries) == min(PREFILL_CHUNK, entries):
            return self._prompt
        return Prompt(self._model, self._document.tokens, window=0, at_once=chunk)


def beside_windows(prompt: Sequence[PromptLayer], kept: Sequence[PrefixLayer]) -> tuple[PrefixLayer, ...]:
    """Return all layers of a prompt in order: those without a window with the entries in ``kept``, others unchanged."""
    kept_layers = iter(kept)
    return tuple(
        replace(next(kept_layers), terms=layer.terms)
        if layer.terms.window is None
        else PrefixLayer(layer.key, layer.value, layer.terms)
        for layer in prompt
    )
