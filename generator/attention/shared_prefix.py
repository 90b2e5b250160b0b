"""Decoding attention: prompt entries are stored once per cache, and every stream has a suffix of its own.

A stream attends to its suffix and, separately, to its cache's prompt entries. The queries of all streams of a cache are
multiplied with these entries together. The two results are then joined. A cache can have a rule, which is consulted in
every step (``cache_rules``).

Where suffixes lie, and which of them are copied, is bookkeeping in integers on the CPU (``StreamSlots``).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvdrift.generator.attention.cache_rules import CacheRule, RuledStreams
from kvdrift.generator.attention.fused import FusedAttention, are_fused
from kvdrift.generator.attention.parts import PLAIN, LayerTerms, attend_part, join_parts, with_sinks
from kvdrift.generator.attention.prompt_reads import PrefixLayer, PromptReads, rounded, tile_of
from kvdrift.generator.attention.row_invariance import RowInvariance
from kvdrift.generator.attention.states import LayerStates
from kvdrift.generator.attention.tables import FEWEST_ROWS, few_rows
from kvdrift.schema.errors import InputError

_NONE = torch.empty(0, dtype=torch.int64)
_CPU_BYTES, _OTHER_BYTES = 2**20, 2**28  # of suffixes copied at once
Suffixes = list[Tensor]  # keys and values of one layer


class StreamSlots:
    """The slots of open and parked streams.

    Of n open streams, stream i is in slot ``slots[i]``, a number below n. A stream stays in its slot unless the slot's
    number is n or above; only streams that move or fork are copied. Parked streams are copied, at the next step, to the
    slots from number ``streams`` on, so that all copies of a step are sent to the devices together. At most ``streams``
    streams are open.
    """

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self.slots = _NONE  # int64 [streams]
        self.stream_caches = _NONE  # the cache of each stream, int64 [streams]
        self.length = 0  # entries of every suffix
        self._parked_caches = _NONE
        self._parked_slots = _NONE  # their present slots: those of open streams, until they are copied
        self._waiting_length = 0  # of the longest parked suffix that is still to be copied
        self._source = self._target = _NONE  # of the copies to make

    def open(self, caches: Sequence[int]) -> None:
        """Start one stream at the end of the prompt for each of ``caches``, which ascend."""
        self.rewind()
        self.stream_caches = torch.tensor(caches)
        self.slots = torch.arange(len(caches))

    def select(self, rows: Tensor) -> bool:
        """Replace the open streams: new stream i continues old stream ``rows[i]``.

        Rows are int64 [streams], grouped by cache in ascending order. With n streams open, row n + j is parked stream
        j. Returns whether any stream changes.
        """
        streams, count = len(self.slots), len(rows)
        if torch.equal(rows, torch.arange(streams)):
            return False
        self.stream_caches = torch.cat([self.stream_caches, self._parked_caches])[rows]
        # Parked streams count as lying behind the slots.
        parked = len(self._parked_caches)
        source = torch.cat([self.slots, torch.arange(streams, streams + parked)])[rows]
        entry = torch.arange(count)
        first_entry = torch.full((streams + parked,), count).scatter_reduce_(0, source, entry, "amin")
        stays = (first_entry[source] == entry) & (source < min(streams, count))
        free = torch.ones(count, dtype=torch.bool)
        free[source[stays]] = False
        self.slots = torch.where(stays, source, 0).masked_scatter_(~stays, free.nonzero())
        self._target, moved = self.slots[~stays], source[~stays]
        if parked:
            moved = torch.cat([torch.arange(streams), self._parked_slots])[moved]
        self._source = moved
        return True

    def park(self, rows: Tensor, places: Tensor) -> None:
        """Keep the suffixes of open streams ``rows``, at their current length, as the parked streams ``places``.

        A stream that is already parked at one of these places is discarded. Rows and places are int64 [parked].
        """
        more = int(places.max()) + 1 - len(self._parked_caches)
        if more > 0:
            unused = torch.zeros(more, dtype=torch.int64)
            self._parked_caches = torch.cat([self._parked_caches, unused])
            self._parked_slots = torch.cat([self._parked_slots, unused + self._streams])
        self._parked_caches[places], self._parked_slots[places] = self.stream_caches[rows], self.slots[rows]
        self._waiting_length = max(self._waiting_length, self.length)

    @property
    def waits(self) -> bool:
        """Whether a parked stream is still to be copied."""
        return self._waiting_length > 0

    def rewind(self) -> None:
        """Close all streams and go back to the end of the prompt."""
        self.length = 0
        self.stream_caches, self.slots = _NONE, _NONE
        self._source = self._target = _NONE

    def copies(self) -> tuple[Tensor, Tensor, int]:
        """Return all copies to make: source slots, target slots, int64 [copies], and the length to copy.

        The copies then count as made, so call this once a step, after ``select`` and before a token is fed.
        """
        source, target, length = self._source, self._target, self.length
        self._source = self._target = _NONE
        if self._waiting_length:
            places = self._streams + torch.arange(len(self._parked_slots))
            waits = self._parked_slots < self._streams
            source = torch.cat([source, self._parked_slots[waits]])
            target = torch.cat([target, places[waits]])
            length = max(length, self._waiting_length)
            self._parked_slots, self._waiting_length = places, 0
        return source, target, length


def suffix_buffers(layers: Sequence[Sequence[Tensor]], slots: int, horizon: int) -> tuple[list[Tensor], list[Suffixes]]:
    """Allocate buffers for suffixes, one for all layers' keys and values of one device, dtype and shape.

    A buffer is [parts, slots, KV heads, H, size]; a part is the keys or the values of a layer. ``layers`` has for each
    layer a prompt's keys and values, [KV heads, m, size]. Returns the buffers, and for each layer its keys and values
    in them, [slots, KV heads, H, size] each.
    """
    kinds = [(part.device, part.dtype, part.shape[0], part.shape[2]) for layer in layers for part in layer]
    rooms, buffers = {}, []
    for kind in dict.fromkeys(kinds):
        device, dtype, heads, size = kind
        shape = (kinds.count(kind), slots, heads, horizon, size)
        buffers.append(torch.empty(shape, dtype=dtype, device=device))
        rooms[kind] = iter(buffers[-1].unbind())
    parts = [next(rooms[kind]) for kind in kinds]
    return buffers, [parts[first : first + 2] for first in range(0, len(parts), 2)]


def copy_suffixes(buffer: Tensor, source: Tensor, target: Tensor, others: Sequence[Tensor] = ()) -> None:
    """Copy slots ``source`` to slots ``target`` in a buffer, [parts, slots, ...], and in ``others`` of its shape.

    All reads precede all writes.
    """
    room = _CPU_BYTES if buffer.device.type == "cpu" else _OTHER_BYTES
    moved = len(source) * buffer[0, 0].numel() * buffer.itemsize
    at_once = max(room // max(moved, 1), 1)
    for parts in zip(*(torch.split(whole, at_once) for whole in (buffer, *others)), strict=True):
        suffixes = parts[0][:, source]
        for part in parts:
            part.index_copy_(1, target, suffixes)


__all__ = ["PrefixLayer", "SharedPrefix"]  # codecs import the first from here; their source is part of identities


@dataclass(frozen=True)
class StreamCache:
    """A cache from which streams start."""

    layers: Sequence[PrefixLayer]  # the prompt entries of every layer with attention
    states: LayerStates | None = None  # of layers without attention after the prompt, if there are any
    tile: int = 0  # the most rows that read the cache at once; 0 for the usual number
    rule: CacheRule | None = None  # by which the cache changes while its streams are decoded


_Indices = dict[torch.device, dict[str, Tensor]]  # of each device, vectors by their name


class SharedPrefix(StreamSlots):
    """``LayerAttention`` of one new token per open stream.

    The model computes ``rows`` rows: one for each slot of an open stream, padded to a multiple. A step begins with
    ``select``; ``take`` then makes room for the token about to be fed.

    Args:
        caches: The caches, whose layers have equal shapes but for the number of entries.
        streams: The most streams that can be open at once.
        parked: The most streams that can be parked.
        horizon: The most tokens of a stream.
        heads: The number of query heads of a layer.
        rows: The multiples to which a step's rows, and the streams that read a prompt at once, are padded.
        share_reads: Whether streams of one cache read its prompt entries together.
        fused: As ``SharingOptions.fused``.
    """

    def __init__(
        self, caches: Sequence[StreamCache], streams: int, parked: int, horizon: int, heads: int, rows: RowInvariance,
        *, share_reads: bool = True, fused: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(streams)
        self._caches = [cache.layers for cache in caches]
        self._row_multiple, self._layers = rows.multiple, rows.layer_rows or rows.multiple
        first = caches[0].layers
        usual = tile_of(first[0].key, rows.multiple) if share_reads else 1
        self._at_once = [(cache.tile if share_reads else 0) or usual for cache in caches]
        prompt_read_rows = rows.prompt_read_rows or rows.multiple
        self._reads = PromptReads(self._caches, self._at_once, rows.multiple, prompt_read_rows)
        entries = [(layer.key, layer.value) for layer in first]
        self._buffers, self._suffix = suffix_buffers(entries, streams + parked, horizon)
        self._ruled: RuledStreams | None = None
        # A rule sees the layers without a window, numbered from 0.
        whole = [number for number, layer in enumerate(first) if layer.terms.window is None]
        self._whole = {number: place for place, number in enumerate(whole)}
        self._fused: FusedAttention | None = None
        if are_fused(self.devices, fused):
            if any(cache.tile for cache in caches):
                raise InputError(
                    "row_tile: fused operations, which this device uses, have fixed tiles; leave row_tile out"
                )
            self._fused = FusedAttention(list(zip(*self._caches, strict=True)), heads)
        if any(cache.rule is not None for cache in caches):
            parts = [[(layers[number].key, layers[number].value) for number in whole] for layers in self._caches]
            terms, rules = [first[number].terms for number in whole], [cache.rule for cache in caches]
            is_fused = self._fused is not None
            self._ruled = RuledStreams(rules, parts, streams + parked, horizon, terms, fused=is_fused)
        self._packing: dict[str, Tensor] = {}
        self._copied_length = 0
        self._indices: _Indices = {}

    @property
    def devices(self) -> set[torch.device]:
        """The devices of the layers; a device map spreads the layers over several devices."""
        return {buffer.device for buffer in self._buffers}

    @property
    def rows(self) -> int:
        """The number of rows that the model computes."""
        return self.rows_of(len(self.slots))

    def rows_of(self, streams: int) -> int:
        """Return the number of rows for ``streams`` streams; with fused operations it is one of few numbers."""
        if self._fused is None:
            return rounded(streams, self._layers)
        return few_rows(max(streams, FEWEST_ROWS), self._row_multiple)

    def counts_to_try(self, streams: int) -> list[int]:
        """Return numbers of streams, up to ``streams``, with which steps are tried, the largest first.

        If operations are fused, all possible numbers of rows are tried. Otherwise these are too many: only ``streams``,
        half of it, a quarter and so on are tried.
        """
        if self._fused is not None:
            rows = {self.rows_of(count) for count in range(1, streams + 1)}
            return [min(count, streams) for count in sorted(rows, reverse=True)]
        counts = [streams]
        while counts[-1] > self._layers:
            counts.append(counts[-1] // 2)
        return counts

    @property
    def cuts_back(self) -> bool:
        """Whether parked streams can be continued from positions before the position at which they were parked."""
        return self._ruled is None or self._ruled.cuts_back

    def open(self, caches: Sequence[int]) -> None:
        """Start one stream at the end of the prompt for each of ``caches``, which ascend."""
        super().open(caches)
        if self._ruled is not None:
            self._ruled.open(self.stream_caches)
        self._pack()

    def select(self, rows: Tensor) -> bool:
        """Replace the open streams as ``StreamSlots.select`` does, and pack them anew."""
        changed = super().select(rows)
        if changed:
            self._pack()
        return changed

    def indices(self) -> dict[str, Tensor]:
        """Return the vectors that ``take`` needs on every device for this step, int64 on the CPU, by name."""
        length = torch.tensor([self.length + 1])  # with the token about to be fed
        return {"length": length, **self._packing, **self._copies()}

    def take(self, indices: _Indices) -> None:
        """Copy the suffixes that move, and make room for the token about to be fed.

        The argument is what the method ``indices`` returned, on every device of ``devices``; it is used until the next
        step.
        """
        self._indices = indices
        self._copy(indices)
        self.length += 1
        if self._ruled is not None and self._ruled.steady:
            self._ruled.begin_step()
        elif self._ruled is not None:
            slots = {device: indices[device]["ruled"] for device in self.devices}
            self._ruled.before_step(slots, self._ruled_suffixes, self.length)

    def _copies(self) -> dict[str, Tensor]:
        """Return the slots from which and to which streams move; the copies then count as made."""
        source, target, self._copied_length = self.copies()
        return {"source": source, "target": target}

    def _copy(self, indices: _Indices, *, before: bool = False) -> None:
        """Copy the suffixes and scores that move; scores are those after the last step, or before it if ``before``."""
        for buffer in self._buffers:
            moved = indices[buffer.device]
            if len(moved["source"]):
                copy_suffixes(buffer[:, :, :, : self._copied_length], moved["source"], moved["target"])
        for scores, *others in [] if self._ruled is None else self._ruled.buffers(self._copied_length, before=before):
            moved = indices[scores.device]
            if len(moved["source"]):
                copy_suffixes(scores, moved["source"], moved["target"], others)

    @property
    def _ruled_suffixes(self) -> list[Suffixes]:
        """The keys and values of all slots in the layers that rules see."""
        return [self._suffix[number] for number in self._whole]

    @property
    def unsteady(self) -> list[str]:
        """Why the steps of caches with rules cannot be repeated although operations are fused."""
        return [] if self._fused is None or self._ruled is None else self._ruled.unsteady

    @property
    def repeats(self) -> bool:
        """Whether ``repeat`` can be called: the two fused operations and steady rules compute all attention."""
        return self._fused is not None and (self._ruled is None or self._ruled.steady)

    @property
    def bucket(self) -> Hashable:
        """What fused operations and rules depend on besides the shapes and addresses of the vectors of ``indices``."""
        partials = 0 if self._fused is None else self._fused.partials
        return partials, None if self._ruled is None else self._ruled.bucket

    def repeat(self) -> None:
        """Make room for one more token of the same streams in the same slots, without data from the host."""
        self.length += 1
        for device in self.devices:
            self._indices[device]["length"].add_(1)
        if self._ruled is not None:
            self._ruled.begin_step()

    def take_back(self) -> None:
        """Give up the token of the last ``repeat``; its entries are written over."""
        self.length -= 1
        if self._ruled is not None:
            self._ruled.take_back()

    def parked_copies(self) -> dict[str, Tensor]:
        """Return the vectors that ``keep_parked`` needs on every device, int64 on the CPU; {} if no stream waits."""
        return self._copies() if self.waits else {}

    def keep_parked(self, indices: _Indices) -> None:
        """Copy the streams that were parked since the last ``repeat``, as they were before it."""
        self._copy(indices, before=True)

    def after_step(self) -> None:
        """Let rules look at what the last step has left, which will not be given up."""
        if self._ruled is not None and self._ruled.steady:
            self._ruled.after_step(self._ruled_suffixes, self._indices, self.length)

    def fill(self, contents: Tensor) -> None:
        """Set the keys and the values of slot s's suffix to ``contents[s mod kinds]``, in every layer.

        ``contents`` are [kinds, KV heads, entries, size].
        """
        kinds, _, entries, _ = contents.shape
        for part in (part for layer in self._suffix for part in layer):
            _, heads, _, size = part.shape
            for kind, content in enumerate(contents[:, :heads, :, :size].to(part.device, part.dtype)):
                part[kind::kinds, :, :entries] = content

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        terms: LayerTerms = PLAIN,  # noqa: ARG002
    ) -> Tensor:
        """Attend from one new token per row, whose keys and values join the suffixes of the slots.

        Queries and result are [rows, heads, 1, size], keys and values [rows, KV heads, 1, size]; zeros come back in
        rows without a stream. The terms stored with the prompt are used in place of ``terms``.
        """
        if self._fused is not None:
            indices = self._indices[query.device]
            result = self._fused.attend(layer, query, key, value, self._suffix[layer], indices, scaling)
        else:
            result = self._attend_plainly(layer, query, key, value, scaling)
        place = self._whole.get(layer)
        if self._ruled is not None and place is not None:
            indices, suffix = self._indices[query.device], self._suffix[layer]
            if self._ruled.steady:
                self._ruled.attend_steadily(place, query, suffix, indices, scaling, result)
            else:
                self._ruled.attend(place, query, suffix, indices["ruled"], self.length, scaling, result)
        return result

    def _attend_plainly(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend as ``attend`` does, for caches without a rule, if operations are not fused."""
        suffix_key, suffix_value = self._suffix[layer]
        indices = self._indices[query.device]
        streams, length = len(self.slots), self.length
        suffix_key[:streams, :, length - 1] = key[:streams, :, 0]
        suffix_value[:streams, :, length - 1] = value[:streams, :, 0]
        rows, heads, _, size = query.shape
        kv_heads = key.shape[1]
        group = heads // kv_heads
        grouped = query.reshape(rows, kv_heads, group, size)
        terms = self._caches[0][layer].terms
        seen = slice(terms.first_seen(length), length)
        suffix = attend_part(
            grouped[:streams], suffix_key[:streams, :, seen], suffix_value[:streams, :, seen], scaling,
            softcap=terms.softcap,
        )  # fmt: skip

        shared = self._reads.attend(layer, grouped, indices, scaling, length, self._replaced)
        result = query.new_zeros((rows, heads, 1, size))
        output = with_sinks(*join_parts(suffix, shared), terms.sinks)
        result[:streams] = output.reshape(streams, heads, 1, size)
        return result

    def _replaced(self, cache: int) -> bool:
        """Return whether the cache's rule computes the cache's attention in this step."""
        return self._ruled is not None and self._ruled.replaced(cache, self.length)

    def _pack(self) -> None:
        """Pack the streams that read the same entries into tiles, and pad the tiles to a multiple of rows."""
        self._packing = {}
        if self._ruled is not None:
            packed = self._ruled.pack(self.stream_caches, self.slots, self._at_once, self._row_multiple)
            self._packing |= packed
        if self._fused is not None:
            self._packing |= self._fused.pack(*self._reads.grouped(self.stream_caches, self.slots), self.rows)
            return
        self._packing |= self._reads.pack(self.stream_caches, self.slots)
