"""A prompt with the caches of its actions, from which streams are decoded, and what is recorded of each cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from generator.attention.cache_rules import CacheRule
from generator.attention.recording import PromptLayer
from generator.attention.shared_prefix import PrefixLayer
from generator.attention.streams.states import LayerStates
from generator.coupling.streams import Savings
from generator.selectors.policies.watched import WatchedRule
from generator.transformer.decoder import Decoder
from generator.transformer.memory import available_bytes, replicates_within
from generator.transformer.prompts.eviction import CompactCache
from generator.transformer.prompts.kernels import PromptCaches, TransformerKernels
from generator.transformer.prompts.prompt import Prompt
from generator.transformer.prompts.tried_steps import try_steps
from log.prompts import KeptEntries
from schema.sampling import SamplingLaw


@dataclass(frozen=True)
class PreparedCache:
    """What an action's streams start from.

    Attributes:
        compact: What is kept of the prompt.
        layers: Kept entries, and those of windows, of every layer with attention.
        states: What other layers have after the prompt; None if there are none.
        entries: What its bytes are counted of, per KV head and layer: the kept entries, and with a decode-time policy
            the most that a step reads.
        tile: How many rows read it at once, at most; 0 for the usual number.
        rule: What a decode-time policy does with the entries, unless m is never too few; or a codec, with those that
            are generated.
    """

    compact: CompactCache
    layers: tuple[PrefixLayer, ...]
    states: LayerStates | None
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
        whole: Layers of the whole prompt.
        caches: One for each action.
        seconds: Of each action, what prefill and eviction took.
    """

    def __init__(
        self, model: Decoder, prompt: Prompt, whole: Sequence[PrefixLayer], caches: Sequence[PreparedCache],
        seconds: Sequence[float], horizon: int,
    ) -> None:  # fmt: skip
        self._model, self._prompt, self._whole, self._caches = model, prompt, whole, caches
        self._seconds, self._horizon = seconds, horizon

    def kernels(
        self, streams: int, savings: Savings, beside: Sequence[PreparedPrompt] = (), parked: int = 0
    ) -> TransformerKernels:
        """Make kernels with room for so many streams; they share the memory of the prompts and the caches."""
        prompts = [prompt.caches for prompt in (self, *beside)]
        longest = max(prompt.entries for prompt in prompts)
        rules = [cache.rule for cache in self._caches]
        try_steps(self._model, self._prompt, longest, self._horizon, streams, savings, rules)
        return TransformerKernels(self._model, prompts, streams, self._horizon, savings, parked)

    def under(self, law: SamplingLaw) -> PreparedPrompt:
        """The same caches where tokens are drawn by another law."""
        model = replace(self._model, law=law)
        return PreparedPrompt(model, self._prompt, self._whole, self._caches, self._seconds, self._horizon)

    @property
    def caches(self) -> PromptCaches:
        """What its streams start from."""
        layers = [self._whole, *(cache.layers for cache in self._caches)]
        tiles, rules = [cache.tile for cache in self._caches], [cache.rule for cache in self._caches]
        states = [cache.states for cache in self._caches]
        first = self._prompt.first_law_under(self._model.law)
        return PromptCaches(
            self._prompt.entries, first, layers, (0, *tiles), (None, *rules), (self._prompt.states, *states)
        )

    def replicates_at_once(self, actions: int, estimator: str) -> int:
        """How many replicates of each of so many actions fit the memory that is left now; at least 1."""
        available = int(self._model.memory_share * available_bytes(self._model.device))
        return replicates_within(available, self.replicate_bytes(actions, estimator))

    def replicate_bytes(self, actions: int, estimator: str) -> int:
        """How many bytes decoding one replicate of each of so many actions takes."""
        scored = max((cache.rule.scores for cache in self._caches if cache.rule is not None), default=0)
        return self._model.shape.replicate_bytes(actions, self._prompt.entries, self._horizon, estimator, scored)

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
        states = 0 if self._prompt.states is None else self._prompt.states.nbytes
        beside = sum(layer.key.nbytes + layer.value.nbytes for layer in windows) + states
        return {
            "prompt_entries": self._prompt.entries, "kept_entries": compact.kept_entries,
            "payload_bytes": payload + beside, "scale_bytes": compact.scale_bytes, "index_bytes": index,
            "metadata_bytes": compact.metadata_bytes,
            "resident_bytes": compact.stored_bytes + beside + (suffix + states) * streams,
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


def beside_windows(prompt: Sequence[PromptLayer], kept: Sequence[PrefixLayer]) -> tuple[PrefixLayer, ...]:
    """Put what is kept of the layers without a window between those with a window, which keep what they hold."""
    own = iter(kept)
    return tuple(
        replace(next(own), terms=layer.terms)
        if layer.terms.window is None
        else PrefixLayer(layer.key, layer.value, layer.terms)
        for layer in prompt
    )
