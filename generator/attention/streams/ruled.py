"""Streams of caches that have rules: their rows, the scores of their entries, and attention by the rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvdrift.generator.attention.cache_rules import CacheRule, StreamEntries
from kvdrift.generator.attention.layer_terms import LayerTerms
from kvdrift.generator.attention.streams.rows import Tile, pack_tiles


class RuledStreams:
    """The streams of the caches that have rules; ``SharedPrefix`` has this object if any cache has a rule.

    Args:
        rules: For each cache its rule, if any.
        caches: For each cache and layer the keys and values of the prompt entries, [KV heads, m, size] each.
        slots: The most streams that can be open or parked.
        horizon: The most tokens of a stream.
        terms: For each layer the terms of its attention besides a softmax over all entries.

    Layers whose attention has a window are left out, and the other layers are numbered from 0.
    """

    def __init__(
        self, rules: Sequence[CacheRule | None], caches: Sequence[Sequence[Sequence[Tensor]]], slots: int, horizon: int,
        terms: Sequence[LayerTerms],
    ) -> None:  # fmt: skip
        self._terms = terms
        self._rules = {cache: rule for cache, rule in enumerate(rules) if rule is not None}
        self._caches = caches
        self._prompt = max((rule.scores for rule in self._rules.values()), default=0)
        self._parts: list[Tile] = []  # of the caches that have rules
        kinds = [(key.device, key.shape[0]) for key, _ in caches[0]] if self._prompt else []
        # Scores of prompt entries end where those of the suffix begin, whatever the cache.
        shapes = {kind: (kinds.count(kind), slots, kind[1], self._prompt + horizon) for kind in kinds}
        self.buffers = {kind: torch.zeros(shape, device=kind[0]) for kind, shape in shapes.items()}
        rooms = {kind: iter(buffer.unbind()) for kind, buffer in self.buffers.items()}
        self._scores = [next(rooms[kind]) for kind in kinds]  # of each layer, float32 [slots, KV heads, entries]

    @property
    def cuts_back(self) -> bool:
        """Whether parked streams can be continued from earlier positions."""
        return all(rule.cuts_back for rule in self._rules.values())

    def columns(self, length: int) -> slice:
        """Return the columns of ``buffers`` with the scores of streams whose suffixes have ``length`` entries."""
        return slice(self._prompt + length)

    def open(self, stream_cache: Tensor) -> None:
        """Give each stream the scores of its prompt's entries; stream i is in slot i and at the end of its prompt.

        The cache of each stream, ascending, is int64 [streams] on the CPU.
        """
        for cache, rule in self._rules.items():
            own = (stream_cache == cache).nonzero().squeeze(-1)
            if len(own) and rule.scores:
                rows = slice(int(own[0]), int(own[-1]) + 1)
                for layer, scores in enumerate(self._scores):
                    scores[rows, :, self._prompt - rule.scores : self._prompt] = rule.first_scores(layer)
                    scores[rows, :, self._prompt :] = 0.0

    def pack(self, stream_cache: Tensor, slots: Tensor, at_once: Sequence[int], multiple: int) -> Tensor:
        """Take over the open streams; return the slots that ``before_step`` and ``attend`` need on the layers' devices.

        Arguments are those of ``pack_tiles``.
        """
        tiles, indices = pack_tiles(stream_cache, slots, at_once, multiple)
        self._parts = [tile for tile in tiles if tile.cache in self._rules]
        return indices["packed"]

    def before_step(
        self, slots: Mapping[torch.device, Tensor], suffixes: Sequence[Sequence[Tensor]], length: int
    ) -> None:
        """Let every rule with open streams change entries, before the token is fed that makes L = ``length``.

        ``slots`` are those that ``pack`` returned, on every device; ``suffixes`` has for each layer the keys and values
        of all slots, [slots, KV heads, H, size] each.
        """
        for cache in dict.fromkeys(part.cache for part in self._parts):
            own = {device: self._slots_of(cache, there) for device, there in slots.items()}
            rule, prompt = self._rules[cache], self._caches[cache]
            rule.before_step(prompt, suffixes, [own[key.device] for key, _ in prompt], length)
            if rule.scores:
                for buffer in self.buffers.values():
                    buffer[:, own[buffer.device], :, self._prompt + length - 1] = 0.0

    def replaced(self, cache: int, length: int) -> bool:
        """Tell whether ``attend`` computes the attention of a cache's streams."""
        return cache in self._rules and self._rules[cache].replaces(length)

    def attend(
        self, layer: int, query: Tensor, suffix: Sequence[Tensor], slots: Tensor, length: int, scaling: float,
        result: Tensor,
    ) -> None:  # fmt: skip
        """Let the rules attend, and write their results into ``result``, attention of all rows, [rows, heads, 1, size].

        Queries are [rows, heads, 1, size]; a stream's row is its slot. ``suffix`` has the keys and values of all slots,
        [slots, KV heads, H, size] each, with the new entries; ``slots`` are those of ``pack`` on the layer's device;
        ``length`` is L.
        """
        kv_heads, size = suffix[0].shape[1], suffix[0].shape[3]
        for part in self._parts:
            rule = self._rules[part.cache]
            if rule.passes(length):
                continue
            rows = slots[part.first : part.last]
            prompt_key, prompt_value = self._caches[part.cache][layer]
            suffix_key, suffix_value = (own[:, :, :length][rows] for own in suffix)
            grouped = query[rows].view(len(rows), kv_heads, -1, size)
            entries = StreamEntries(
                layer,
                grouped,
                prompt_key,
                prompt_value,
                suffix_key,
                suffix_value,
                scaling,
                part.streams,
                self._terms[layer],
            )
            columns = slice(self._prompt - rule.scores, self._prompt + length)
            before = self._scores[layer][:, :, columns][rows] if rule.scores else torch.empty(0)
            found, after = rule.attend(entries, before)
            streams = rows[: part.streams]
            if rule.scores:
                self._scores[layer][streams, :, columns] = after[: part.streams]
            if found is not None:
                result[streams] = found[: part.streams].reshape(part.streams, -1, 1, size)

    def _slots_of(self, cache: int, packed: Tensor) -> Tensor:
        parts = [part for part in self._parts if part.cache == cache]
        return torch.cat([packed[part.first : part.first + part.streams] for part in parts])
