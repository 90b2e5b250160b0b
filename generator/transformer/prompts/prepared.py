"""A prompt with the caches of its actions, ready to decode streams, and the columns of ``units`` about each cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvdrift.generator.attention.cache_rules import CacheRule
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.attention.shared_prefix import PrefixLayer
from kvdrift.generator.attention.streams.states import LayerStates
from kvdrift.generator.coupling.streams import Savings
from kvdrift.generator.selectors.policies.watched import WatchedRule
from kvdrift.generator.transformer.decoder import Decoder
from kvdrift.generator.transformer.memory import available_bytes, replicates_within
from kvdrift.generator.transformer.prompts.eviction import CompactCache
from kvdrift.generator.transformer.prompts.kernels import PromptCaches, TransformerKernels
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.generator.transformer.prompts.tried_steps import try_steps
from kvdrift.log.prompts import KeptEntries
from kvdrift.schema.sampling import SamplingLaw


@dataclass(frozen=True)
class PreparedCache:
    """The cache from which an action's streams start.

    Attributes:
        compact: The kept entries of the prompt.
        layers: Kept entries, and entries of windows, for every layer with attention.
        states: The states of other layers after the prompt; None if there are none.
        entries: The number of entries, per KV head and layer, whose bytes count: the kept entries, and with a
            decode-time policy the most that a step reads.
        tile: The most rows that read the cache at once; 0 for the usual number.
        rule: The rule of a decode-time policy, unless m is never too few; or of a codec that codes generated entries.
    """

    compact: CompactCache
    layers: tuple[PrefixLayer, ...]
    states: LayerStates | None
    entries: int
    tile: int = 0
    rule: CacheRule | None = None

    @property
    def counted_bytes(self) -> tuple[int, int]:
        """Bytes of payload and index of ``entries`` entries."""
        compact = self.compact
        payload, index, kept = compact.payload_bytes, compact.index_bytes, compact.kept_entries
        if self.entries != kept:  # a policy's, which holds all entries alike
            payload, index = payload // kept * self.entries, index // kept * self.entries
        return payload, index


class PreparedPrompt:
    """``PreparedDocument`` of a transformer: layers of the whole prompt, and one cache for each action.

    ``seconds`` has for each action the seconds of prefill and eviction.
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
        """Return kernels with room for open and parked streams; all kernels share the memory of prompts and caches."""
        prompts = [prompt.caches for prompt in (self, *beside)]
        longest = max(prompt.entries for prompt in prompts)
        rules = [cache.rule for cache in self._caches]
        try_steps(self._model, self._prompt, longest, self._horizon, streams, savings, rules)
        return TransformerKernels(self._model, prompts, streams, self._horizon, savings, parked)

    def under(self, law: SamplingLaw) -> PreparedPrompt:
        """Return the same caches, with tokens drawn by another law."""
        model = replace(self._model, law=law)
        return PreparedPrompt(model, self._prompt, self._whole, self._caches, self._seconds, self._horizon)

    @property
    def caches(self) -> PromptCaches:
        """The starting point of the prompt's streams."""
        layers = [self._whole, *(cache.layers for cache in self._caches)]
        tiles, rules = [cache.tile for cache in self._caches], [cache.rule for cache in self._caches]
        states = [cache.states for cache in self._caches]
        first = self._prompt.first_law_under(self._model.law)
        return PromptCaches(
            self._prompt.entries, first, layers, (0, *tiles), (None, *rules), (self._prompt.states, *states)
        )

    def replicates_at_once(self, actions: int, estimator: str) -> int:
        """Return how many replicates of each action fit into the memory that is left now; at least 1."""
        available = int(self._model.memory_share * available_bytes(self._model.device))
        return replicates_within(available, self.replicate_bytes(actions, estimator))

    def replicate_bytes(self, actions: int, estimator: str) -> int:
        """Return how many bytes decoding one replicate of each action takes."""
        scored = max((cache.rule.scores for cache in self._caches if cache.rule is not None), default=0)
        return self._model.shape.replicate_bytes(actions, self._prompt.entries, self._horizon, estimator, scored)

    def record(self, number: int, streams: int) -> dict[str, Any]:
        """Return the columns of ``units`` about cache ``number``, from 1; resident bytes are those before step 1."""
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
            "metadata_bytes": compact.metadata_bytes, "fixed_bytes": beside,
            "resident_bytes": compact.stored_bytes + beside + (suffix + states) * streams,
            "kept_sha256": list(compact.kept_sha256),
            "read_checksums": None if compact.read_checksums is None else list(compact.read_checksums),
            "prefill_seconds": self._seconds[number - 1],
        }  # fmt: skip

    def kept(self, number: int) -> tuple[KeptEntries, ...]:
        """Return the prompt entries that cache ``number`` has right after prefill, and after steps of a policy."""
        cache, entries = self._caches[number - 1], self._prompt.entries
        kept = [cache.compact.kept_by_position(entries)]
        if isinstance(cache.rule, WatchedRule):
            left = sorted(cache.rule.left_after.items())
            kept += [cache.compact.kept_by_position(entries, own, step) for step, own in left]
        return tuple(kept)


def beside_windows(prompt: Sequence[PromptLayer], kept: Sequence[PrefixLayer]) -> tuple[PrefixLayer, ...]:
    """Return the kept entries of layers without a window and the entries of layers with a window, in order."""
    own = iter(kept)
    return tuple(
        replace(next(own), terms=layer.terms)
        if layer.terms.window is None
        else PrefixLayer(layer.key, layer.value, layer.terms)
        for layer in prompt
    )
