"""Rules of a cache: how decode-time policies and codecs change its entries while its streams are decoded.

Without a rule, ``shared_prefix`` attends to all prompt entries of the cache and to the whole suffix of a stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvdrift.generator.attention.cpu_products import fits_onednn, product
from kvdrift.generator.attention.parts import PLAIN, LayerTerms, capped
from kvdrift.generator.attention.prompt_reads import Tile, pack_tiles


@dataclass(frozen=True)
class StreamEntries:
    """The entries to which R streams of one cache can attend in one layer, and the streams' queries.

    R is a multiple of the model's ``row_multiple``; the rows after the first ``streams`` are copies of a stream.

    Attributes:
        layer: The number of the layer among layers without a window, from 0.
        query: The new token's queries, [R, KV heads, query heads of a KV head, size], rotated.
        prompt_key: Keys of the cache's prompt entries, shared by all rows, [KV heads, entries, size].
        prompt_value: Values of the same entries, [KV heads, entries, size].
        suffix_key: Keys of each row's suffix, [R, KV heads, L, size]; the last key is the new token's.
        suffix_value: Values of each row's suffix, [R, KV heads, L, size].
        scaling: The factor of products of queries and keys.
        streams: How many rows, from the first on, are streams; the other rows are copies.
        terms: The layer's soft cap and sinks, if any. Rules do not see layers with windows.
    """

    layer: int
    query: Tensor
    prompt_key: Tensor
    prompt_value: Tensor
    suffix_key: Tensor
    suffix_value: Tensor
    scaling: float
    streams: int = 1
    terms: LayerTerms = PLAIN


class CacheRule:
    """Changes the entries of one cache while its streams are decoded; by default nothing changes.

    All open streams of a cache have suffixes of one length. In a step that feeds the L-th token, ``SharedPrefix`` calls

    1. ``before_step``, after streams were moved, forked or continued from their parked state, and before the token is
    fed; the suffixes then have entries 0 .. L - 2. Changes of the suffixes stay with their streams.
    2. ``attend`` in every layer, for some rows at a time, once the new token's key and value have joined the suffixes,
    unless ``passes`` says that there is nothing to do. It may return attention in place of the usual one.

    L can become smaller: streams go back to the end of the prompt, and parked streams continue at the L at which they
    were parked, or before it if ``cuts_back``.
    """

    scores: int = 0  # prompt entries with a score in every stream; if there are any, suffixes' entries have one, too
    cuts_back: bool = True  # whether a stream's state at L gives its earlier states by dropping the last entries

    def over(self, entries: int, kv_heads: int) -> CacheRule:
        """Return a rule of this kind over ``entries`` other prompt entries, for steps that are tried before decoding.

        The rule returned attends in every step from the second on, and may do so in the first.
        """
        raise NotImplementedError

    def first_scores(self, layer: int) -> Tensor:
        """Return a layer's scores of prompt entries at the end of the prompt, float32 [KV heads, ``self.scores``]."""
        raise NotImplementedError

    def before_step(
        self, prompt: Sequence[Sequence[Tensor]], suffixes: Sequence[Sequence[Tensor]], slots: Sequence[Tensor],
        length: int,
    ) -> None:  # fmt: skip
        """Change entries in place before a token is fed.

        ``prompt`` has for each layer the keys and values of the cache's prompt entries, [KV heads, entries, size] each,
        the tensors that attention reads; ``suffixes`` has those of all slots, [slots, KV heads, H, size] each;
        ``slots`` has the slots of the cache's streams on the layer's device, int64 [streams]. ``length`` is the length
        of suffixes that include the token about to be fed.
        """

    def passes(self, length: int) -> bool:  # noqa: ARG002 - others need it
        """Return whether ``attend`` has nothing to do when suffixes have ``length`` entries."""
        return True

    def replaces(self, length: int) -> bool:  # noqa: ARG002 - others need it
        """Return whether ``attend`` returns attention of its own when suffixes have ``length`` entries."""
        return False

    def left(self, entries: StreamEntries, scores: Tensor) -> Tensor | None:  # noqa: ARG002 - others need it
        """Return which prompt entries streams still have after a step.

        ``entries`` are those that ``attend`` was given, ``scores`` those that it returned. The result is bool [R, KV
        heads, entries of the prompt]; None if the rule does not report it. By default an entry with a negative score
        has been dropped.
        """
        return scores[..., : self.scores] >= 0 if self.scores else None

    def attend(self, entries: StreamEntries, scores: Tensor) -> tuple[Tensor | None, Tensor]:
        """Attend from one new token per row; return attention (None unless ``replaces``) and the scores after the step.

        Scores, those of the prompt's entries before those of the L entries of a suffix, are float32
        [R, KV heads, ``self.scores`` + L]; the new entry's score is 0. They are empty if the rule has no scores.
        Attention is [R, KV heads, query heads of a KV head, size], in the queries' dtype.
        """
        raise NotImplementedError


class RuledStreams:
    """The streams of the caches that have rules; ``SharedPrefix`` has this object if any cache has a rule.

    ``caches`` has for each cache and layer the keys and values of the prompt entries, [KV heads, m, size] each. At most
    ``slots`` streams are open or parked. Layers whose attention has a window are left out, and the others are numbered
    from 0.
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
        # The scores of prompt entries end in the same column for every cache; scores of the suffix follow.
        shapes = {kind: (kinds.count(kind), slots, kind[1], self._prompt + horizon) for kind in kinds}
        self.buffers = {kind: torch.zeros(shape, device=kind[0]) for kind, shape in shapes.items()}
        rooms = {kind: iter(buffer.unbind()) for kind, buffer in self.buffers.items()}
        self._scores = [next(rooms[kind]) for kind in kinds]  # of each layer, float32 [slots, KV heads, entries]

    @property
    def cuts_back(self) -> bool:
        """Whether parked streams can be continued from positions before the one at which they were parked."""
        return all(rule.cuts_back for rule in self._rules.values())

    def columns(self, length: int) -> slice:
        """Return the columns of ``buffers`` with the scores of streams whose suffixes have ``length`` entries."""
        return slice(self._prompt + length)

    def open(self, stream_cache: Tensor) -> None:
        """Give each stream the scores of its prompt's entries; stream i is in slot i and at the end of its prompt.

        The cache of each stream, ascending, is int64 [streams] on the CPU.
        """
        for cache, rule in self._rules.items():
            ruled = (stream_cache == cache).nonzero().squeeze(-1)
            if len(ruled) and rule.scores:
                rows = slice(int(ruled[0]), int(ruled[-1]) + 1)
                for layer, scores in enumerate(self._scores):
                    scores[rows, :, self._prompt - rule.scores : self._prompt] = rule.first_scores(layer)
                    scores[rows, :, self._prompt :] = 0.0

    def pack(self, stream_cache: Tensor, slots: Tensor, at_once: Sequence[int], multiple: int) -> Tensor:
        """Pack the open streams into tiles; return the slots that ``before_step`` and ``attend`` need.

        The slots have yet to be sent to the layers' devices. Arguments are those of ``pack_tiles``.
        """
        tiles, indices = pack_tiles(stream_cache, slots, at_once, multiple)
        self._parts = [tile for tile in tiles if tile.cache in self._rules]
        return indices["packed"]

    def before_step(
        self, slots: Mapping[torch.device, Tensor], suffixes: Sequence[Sequence[Tensor]], length: int
    ) -> None:
        """Let every rule with open streams change entries, before a token is fed.

        ``slots`` are those that ``pack`` returned, on every device; ``suffixes`` has for each layer the keys and values
        of all slots, [slots, KV heads, H, size] each; ``length`` is the length of suffixes that include the token.
        """
        for cache in dict.fromkeys(part.cache for part in self._parts):
            parts = [slice(part.first, part.first + part.streams) for part in self._parts if part.cache == cache]
            step_slots = {device: torch.cat([packed[part] for part in parts]) for device, packed in slots.items()}
            rule, prompt = self._rules[cache], self._caches[cache]
            rule.before_step(prompt, suffixes, [step_slots[key.device] for key, _ in prompt], length)
            if rule.scores:
                for buffer in self.buffers.values():
                    buffer[:, step_slots[buffer.device], :, self._prompt + length - 1] = 0.0

    def replaced(self, cache: int, length: int) -> bool:
        """Return whether the cache's rule computes attention when suffixes have ``length`` entries."""
        return cache in self._rules and self._rules[cache].replaces(length)

    def attend(
        self, layer: int, query: Tensor, suffix: Sequence[Tensor], slots: Tensor, length: int, scaling: float,
        result: Tensor,
    ) -> None:  # fmt: skip
        """Let the rules attend, and write their results into ``result``, attention of all rows, [rows, heads, 1, size].

        Queries are [rows, heads, 1, size]; a stream's row is its slot. ``suffix`` has the keys and values of all slots,
        [slots, KV heads, H, size] each, with the new entries; ``slots`` are those of ``pack`` on the layer's device;
        ``length`` is the length of suffixes with the new entries.
        """
        kv_heads, size = suffix[0].shape[1], suffix[0].shape[3]
        for part in self._parts:
            rule = self._rules[part.cache]
            if rule.passes(length):
                continue
            rows = slots[part.first : part.last]
            prompt_key, prompt_value = self._caches[part.cache][layer]
            suffix_key, suffix_value = (slot_entries[:, :, :length][rows] for slot_entries in suffix)
            grouped = query[rows].view(len(rows), kv_heads, -1, size)
            entries = StreamEntries(
                layer, grouped, prompt_key, prompt_value, suffix_key, suffix_value, scaling, part.streams,
                self._terms[layer],
            )  # fmt: skip
            columns = slice(self._prompt - rule.scores, self._prompt + length)
            before = self._scores[layer][:, :, columns][rows] if rule.scores else torch.empty(0)
            output, after = rule.attend(entries, before)
            streams = rows[: part.streams]
            if rule.scores:
                self._scores[layer][streams, :, columns] = after[: part.streams]
            if output is not None:
                result[streams] = output[: part.streams].reshape(part.streams, -1, 1, size)


def attend_with_weights(entries: StreamEntries, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Attend from the queries of R rows by one softmax over E entries, first the prompt's, then the suffix's.

    ``hidden`` is added to the scores: 0, or minus infinity for an entry that is not read; float32 [R, KV heads, E].
    Returns the output in the queries' dtype, [R, KV heads, query heads of a KV head, size], and the weights, float32
    [R, KV heads, query heads of a KV head, E].
    """
    rows, kv_heads, group, size = entries.query.shape
    prompt = entries.prompt_key.shape[1]
    query = entries.query * entries.scaling
    packed = query.transpose(0, 1).reshape(kv_heads, rows * group, size)
    shared = _products(packed, entries.prompt_key).view(kv_heads, rows, group, prompt).transpose(0, 1)
    suffix_scores = query @ entries.suffix_key.transpose(-1, -2)
    scores = capped(torch.cat([shared, suffix_scores], -1).float(), entries.terms.softcap).add_(hidden[:, :, None])
    if entries.terms.sinks is not None:  # one more key, whose value is 0
        sinks = entries.terms.sinks.float().view(1, kv_heads, group, 1).expand(rows, -1, -1, -1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    share = weights.to(entries.query.dtype)
    to_prompt = share[..., :prompt].transpose(0, 1).reshape(kv_heads, rows * group, prompt)
    output = _products(to_prompt, entries.prompt_value.transpose(-1, -2)).view(kv_heads, rows, group, size)
    return output.transpose(0, 1) + share[..., prompt:] @ entries.suffix_value, weights


def _products(rows: Tensor, others: Tensor) -> Tensor:
    """Multiply each head's rows [heads, R, in] by its transposed ``others`` [heads, out, in]: [heads, R, out].

    oneDNN computes the products if it can.
    """
    if fits_onednn(rows):
        return torch.stack([product(row, column) for row, column in zip(rows, others, strict=True)])
    return rows @ others.transpose(-1, -2)
