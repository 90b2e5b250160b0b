"""A document's prompt, prefilled for all its actions, and the eviction of each action."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from kvdrift.generator.actions import Action
from kvdrift.generator.attention.checksums import first_decisions, in_words
from kvdrift.generator.attention.streams.prompt_reads import PrefixLayer, same_entries, with_packed_keys
from kvdrift.generator.selectors.policies.guarded import rule_of
from kvdrift.generator.selectors.policies.watched import WatchedRule, watched_steps
from kvdrift.generator.transformer.decoder import Decoder
from kvdrift.generator.transformer.memory import PREFILL_CHUNK, available_bytes
from kvdrift.generator.transformer.needs import check_layers
from kvdrift.generator.transformer.prompts.eviction import SharedScores, evict
from kvdrift.generator.transformer.prompts.prepared import PreparedCache, PreparedPrompt, beside_windows
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.schema.document import Document
from kvdrift.schema.errors import InputError, failing_as


class PrefilledPrompt:
    """``PrefilledDocument`` of a transformer; ``seconds`` are those of prefill.

    ``sharing`` is the number of actions that share the prefill's time, if not ``actions`` alone.
    """

    def __init__(
        self, model: Decoder, document: Document, actions: Sequence[Action], horizon: int, sharing: int | None = None
    ) -> None:
        entries = document.prompt_tokens
        self._sharing = len(actions) if sharing is None else sharing
        kept = [action.kept_entries(entries, f"document '{document.doc}'") for action in actions]
        self._model, self._horizon, self._entries, self._tokens = model, horizon, entries, document.tokens
        self._actions = list(zip(actions, kept, strict=True))
        ranking = {action.name: action.chooser for action, m in self._actions if m < entries}
        self._scores = SharedScores(ranking.values())
        choosing = [  # the others keep everything
            action for action, m in self._actions if m < entries or action.budget(entries, horizon) is not None
        ]
        for action in choosing:
            check_layers(action, model.traits)
            self._check_room(document.doc, action)
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

    def _check_room(self, doc: str, action: Action) -> None:
        entries, shape, chooser = self._entries, self._model.shape, action.chooser
        with failing_as("selector", chooser, "working_bytes: "):
            needed = int(chooser.working_bytes(shape.heads, entries, shape.item_bytes))
        if needed and needed > (free := available_bytes(self._model.device)):
            raise InputError(
                f"action '{action.name}': choosing among the {entries} prompt entries of document '{doc}' takes "
                f"{needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free; "
                f"give shorter prompts or another {'selector' if action.policy is None else 'policy'}"
            )

    def evict(self) -> PreparedPrompt:
        """Make one compact cache for each action; repeated actions share one cache and its time.

        If several actions share scores, each is charged the seconds that it would have taken alone.
        """
        shared = self.seconds / self._sharing
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
        return PreparedPrompt(self._model, self._prompt, self._whole, caches, seconds, self._horizon)

    def _cache_of(self, action: Action, kept: int) -> PreparedCache:
        prompt = self._prompt_of(action)
        compact = evict(prompt.evictable, self._scores.of(action.chooser), kept, action.holding)
        budget, rule = action.budget(self._entries, self._horizon), None
        if action.generated is not None:
            rule = action.generated.rule(prompt.evictable, compact.indices, compact.layers, self._horizon)
        elif action.policy is not None and budget is not None:
            own = rule_of(action.policy, prompt.evictable, compact.indices, budget)
            rule = WatchedRule(own, watched_steps(self._horizon))
            decided = in_words(first_decisions(rule, prompt.evictable, compact.layers))
            # Steps remove entries, if prefill did not.
            compact = replace(compact, indexed=True, read_checksums=decided)
        layers = beside_windows(prompt.layers, compact.layers)
        if rule is None:  # which might change entries
            layers = self._whole if same_entries(layers, self._whole) else with_packed_keys(layers)
            compact = replace(compact, layers=tuple(layer for layer in layers if layer.terms.window is None))
        return PreparedCache(
            compact, layers, prompt.states,
            action.most_entries(self._entries, self._horizon), action.row_tile or 0, rule,
        )  # fmt: skip

    def _prompt_of(self, action: Action) -> Prompt:
        """Return the prompt from which an action keeps entries: the reference's, or one prefilled in other chunks."""
        chunk = action.prefill_chunk
        if chunk is None or min(chunk, self._entries) == min(PREFILL_CHUNK, self._entries):
            return self._prompt
        return Prompt(self._model, self._tokens, window=0, at_once=chunk)
