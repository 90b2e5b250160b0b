"""Rules of a cache: how decode-time policies and codecs change its entries while its streams are decoded.

Without a rule, ``shared_prefix`` attends to all prompt entries of the cache and to the whole suffix of a stream.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

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

    A rule is steady if it can decide by an L that only the device knows. If operations are fused and all rules are
    steady, all steps do the same operations, and ``attend_steadily`` is called in every step and layer in place of the
    methods above.
    """

    scores: int = 0  # prompt entries with a score in every stream; if there are any, suffixes' entries have one, too
    cuts_back: bool = True  # whether a stream's state at L gives its earlier states by dropping the last entries
    unsteady: str | None = "a rule decides on the CPU"  # why the rule is not steady; None if it is

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

    def attend_steadily(
        self, entries: StreamEntries, scores: Tensor, length: Tensor, usual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attend as ``attend`` does, by operations whose shapes do not depend on L and that never wait for the device.

        ``length``, L, is int64 [1] on the layer's device. Suffixes and scores have room for H entries, and zeros behind
        the first L. ``usual`` is the usual attention, which is returned if ``replaces`` is false. Returns attention
        and the scores after the step; scores behind the first L do not count, and none does if ``passes`` is true.
        """
        raise NotImplementedError

    def watches(self, length: int) -> bool:  # noqa: ARG002 - others need it
        """Return whether ``after_step`` is called once a step after which suffixes have ``length`` entries is over."""
        return False

    def after_step(self, entries: StreamEntries, scores: Tensor) -> None:
        """Look at the entries of a layer and at the scores after a step of ``attend_steadily``.

        Arguments are those of ``attend``, but without queries: ``entries.query`` is [R, KV heads, 0, size].
        """


class RuledStreams:
    """The streams of the caches that have rules; ``SharedPrefix`` has this object if any cache has a rule.

    If the rules attend steadily, scores have two versions: a step reads one and writes the other, so that it can be
    given up.

    Args:
        rules: For each cache its rule, or None.
        caches: For each cache and layer the keys and values of the prompt entries, [KV heads, m, size] each. Layers
            whose attention has a window are left out, and the others are numbered from 0.
        slots: The most streams that are open or parked.
        horizon: The most tokens of a stream.
        terms: The terms of each layer.
        fused: Whether operations are fused; steady rules then attend steadily, unless another rule is not steady.
    """

    def __init__(
        self, rules: Sequence[CacheRule | None], caches: Sequence[Sequence[Sequence[Tensor]]], slots: int, horizon: int,
        terms: Sequence[LayerTerms], *, fused: bool,
    ) -> None:  # fmt: skip
        self._terms = terms
        self._rules = {cache: rule for cache, rule in enumerate(rules) if rule is not None}
        self._caches = caches
        self._prompt = max((rule.scores for rule in self._rules.values()), default=0)
        self._parts: list[Tile] = []  # of the caches that have rules
        kinds = [(key.device, key.shape[0]) for key, _ in caches[0]] if self._prompt else []
        # The scores of prompt entries end in the same column for every cache; scores of the suffix follow.
        shapes = {kind: (kinds.count(kind), slots, kind[1], self._prompt + horizon) for kind in kinds}
        self.steady = fused and not self.unsteady
        self.version = 0  # of the scores after the last step
        self._versions = [
            {kind: torch.zeros(shape, device=kind[0]) for kind, shape in shapes.items()}
            for _ in range(2 if self.steady and self._prompt else 1)
        ]
        self._scores = []  # of each version and layer, float32 [slots, KV heads, entries]
        for buffers in self._versions:
            rooms = {kind: iter(buffer.unbind()) for kind, buffer in buffers.items()}
            self._scores.append([next(rooms[kind]) for kind in kinds])

    @property
    def cuts_back(self) -> bool:
        """Whether parked streams can be continued from positions before the one at which they were parked."""
        return all(rule.cuts_back for rule in self._rules.values())

    @property
    def unsteady(self) -> list[str]:
        """Why rules are not steady: each reason once."""
        return list(dict.fromkeys(rule.unsteady for rule in self._rules.values() if rule.unsteady is not None))

    @property
    def bucket(self) -> Hashable:
        """What the operations of a steady step depend on besides the shapes and addresses of vectors."""
        return self.version, tuple((part.cache, part.first, part.last) for part in self._parts)

    def begin_step(self) -> None:
        """Let the next step write the other version of the scores, if there is one; ``take_back`` undoes this."""
        self.version = (self.version + 1) % len(self._versions)

    def take_back(self) -> None:
        """Give up the scores that the last step has written."""
        self.begin_step()

    def buffers(self, length: int, *, before: bool = False) -> list[list[Tensor]]:
        """Return all versions of the scores of streams whose suffixes have ``length`` entries.

        There is a list for each device and number of KV heads. Its first buffer, [layers, slots, KV heads, entries],
        has the scores after the last step, or those before it if ``before``.
        """
        first = self.version - before
        ordered = [self._versions[(first + place) % len(self._versions)] for place in range(len(self._versions))]
        columns = slice(self._prompt + length)
        return [[version[kind][..., columns] for version in ordered] for kind in ordered[0]]

    def open(self, stream_cache: Tensor) -> None:
        """Give each stream the scores of its prompt's entries; stream i is in slot i and at the end of its prompt.

        The cache of each stream, ascending, is int64 [streams] on the CPU.
        """
        for cache, rule in self._rules.items():
            ruled = (stream_cache == cache).nonzero().squeeze(-1)
            if len(ruled) and rule.scores:
                rows = slice(int(ruled[0]), int(ruled[-1]) + 1)
                for layer, scores in enumerate(self._scores[self.version]):
                    scores[rows, :, self._prompt - rule.scores : self._prompt] = rule.first_scores(layer)
                    scores[rows, :, self._prompt :] = 0.0

    def pack(self, stream_cache: Tensor, slots: Tensor, at_once: Sequence[int], multiple: int) -> dict[str, Tensor]:
        """Pack the open streams into tiles; return the vectors that the other methods need, int64, by name.

        They have yet to be sent to the layers' devices. "ruled" has the slot of each packed row. If rules attend
        steadily, only their caches' streams are packed, and "ruled_rows" has for each row the row of its part that
        represents it: its own, or the first if the row is a copy. Arguments are those of ``pack_tiles``.
        """
        tiles, indices = pack_tiles(stream_cache, slots, at_once, multiple)
        self._parts = [tile for tile in tiles if tile.cache in self._rules]
        if not self.steady:
            return {"ruled": indices["packed"]}
        packed = [indices["packed"][part.first : part.last] for part in self._parts]
        rows, parts, first = [], [], 0
        for part in self._parts:
            row = torch.arange(part.last - part.first)
            rows.append(row.where(row < part.streams, 0))
            parts.append(replace(part, first=first, last=first + len(row)))
            first += len(row)
        self._parts, none = parts, slots[:0]
        return {"ruled": torch.cat([*packed, none]), "ruled_rows": torch.cat([*rows, none])}

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
                for buffer in self._versions[self.version].values():
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
            own = [slot_entries[:, :, :length][rows] for slot_entries in suffix]
            entries = self._entries(part, layer, query[rows].view(len(rows), kv_heads, -1, size), own, scaling)
            columns = slice(self._prompt - rule.scores, self._prompt + length)
            scores = self._scores[self.version]
            before = scores[layer][:, :, columns][rows] if rule.scores else torch.empty(0)
            output, after = rule.attend(entries, before)
            streams = rows[: part.streams]
            if rule.scores:
                scores[layer][streams, :, columns] = after[: part.streams]
            if output is not None:
                result[streams] = output[: part.streams].reshape(part.streams, -1, 1, size)

    def attend_steadily(
        self, layer: int, query: Tensor, suffix: Sequence[Tensor], indices: Mapping[str, Tensor], scaling: float,
        result: Tensor,
    ) -> None:  # fmt: skip
        """Let the rules attend steadily; ``result`` has the usual attention of all rows, [rows, heads, 1, size].

        ``indices`` are the vectors of ``pack`` on the layer's device, and "length", the length of suffixes with the new
        entries, int64 [1]. Other arguments are those of ``attend``.
        """
        _, kv_heads, horizon, size = suffix[0].shape
        length, entry = indices["length"], torch.arange(self._prompt + horizon, device=query.device)
        # What lies behind the suffixes is whatever the memory held, maybe NaN.
        behind, unscored = (entry[:horizon] >= length)[:, None], entry >= self._prompt + length - 1
        for part in self._parts:
            rule, packed = self._rules[part.cache], slice(part.first, part.last)
            rows, represents = indices["ruled"][packed], indices["ruled_rows"][packed]
            own = [slot_entries[rows].masked_fill_(behind, 0.0) for slot_entries in suffix]
            grouped, usual = (numbers[rows].view(len(rows), kv_heads, -1, size) for numbers in (query, result))
            entries = self._entries(part, layer, grouped, own, scaling)
            columns, before = slice(self._prompt - rule.scores, None), torch.empty(0)
            if rule.scores:  # the new entry's score is 0
                scores = self._scores[1 - self.version][layer][:, :, columns]
                before = scores[rows].masked_fill_(unscored[columns], 0.0)
            output, after = rule.attend_steadily(entries, before, length, usual)
            # A stream's copies write the stream's own numbers, so the operations do not depend on how many there are.
            result.index_copy_(0, rows, output[represents].view(len(rows), -1, 1, size))
            if rule.scores:
                self._scores[self.version][layer][:, :, columns].index_copy_(0, rows, after[represents])

    def after_step(
        self, suffixes: Sequence[Sequence[Tensor]], indices: Mapping[torch.device, Mapping[str, Tensor]], length: int
    ) -> None:
        """Let the rules look at what a steady step has left, if they watch it; arguments are those of the step.

        ``suffixes`` has for each layer the keys and values of all slots, [slots, KV heads, H, size] each.
        """
        for part in (part for part in self._parts if self._rules[part.cache].watches(length)):
            rule = self._rules[part.cache]
            for layer, suffix in enumerate(suffixes):
                rows = indices[suffix[0].device]["ruled"][part.first : part.first + part.streams]
                own = [slot_entries[:, :, :length][rows] for slot_entries in suffix]
                entries = self._entries(part, layer, own[0][:, :, :0], own, 1.0)
                columns = slice(self._prompt - rule.scores, self._prompt + length)
                scores = self._scores[self.version][layer][:, :, columns][rows] if rule.scores else torch.empty(0)
                rule.after_step(entries, scores)

    def _entries(
        self, part: Tile, layer: int, query: Tensor, suffix: Sequence[Tensor], scaling: float
    ) -> StreamEntries:
        """Return the entries of a part's rows; ``suffix`` has the keys and values of their suffixes."""
        key, value = self._caches[part.cache][layer]
        return StreamEntries(layer, query, key, value, suffix[0], suffix[1], scaling, part.streams, self._terms[layer])


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
