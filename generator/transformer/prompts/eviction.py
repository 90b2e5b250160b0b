"""Eviction after prefill: check a selector's choice, hash it, and gather the kept entries into a compact cache."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvdrift.generator.attention.holding import AsComputed, Holding, bytes_as_stored, checksum, in_words
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.attention.shared_prefix import PrefixLayer
from kvdrift.generator.selectors import Full, Selector
from kvdrift.generator.selectors.policies.around import Left
from kvdrift.log.prompts import KeptEntries, kept_entries
from kvdrift.schema.errors import OperationError, failing_as

_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class CompactCache:
    """The entries of a prompt that an action keeps, their positions, and their bytes."""

    layers: tuple[PrefixLayer, ...]  # keys and values, as attention reads them
    indices: tuple[Tensor, ...]  # per layer the kept positions, int32, as ``Selector.keep`` returns them
    extents: Tensor  # the true prompt length n and the kept entries of each layer, int64 [layers, 2]
    kept_sha256: tuple[str, ...]  # per layer, of the indices as little-endian int32
    payload_bytes: int  # of keys and values as stored
    scale_bytes: int  # of their scales and zero points
    indexed: bool  # whether positions are stored; a cache from which nothing is ever removed needs no index
    read_checksums: tuple[str, ...] | None = None  # per layer, of the entries read back; None if stored as computed
    whole: frozenset[int] = frozenset()  # layers that keep every entry, so that they need no index

    @property
    def kept_entries(self) -> int:
        """The number m of kept entries of a KV head in a layer: the mean over layers and heads, rounded down."""
        return sum(self._positions) // sum(len(index) for index in self.indices)

    @property
    def _positions(self) -> list[int]:
        """The number of kept positions of each layer, over its KV heads."""
        pairs = zip(self.layers, self.indices, strict=True)
        return [index.numel() if layer.lengths is None else sum(layer.lengths) for layer, index in pairs]

    def kept_by_position(self, entries: int, left: Left | None = None, step: int = 0) -> KeptEntries:
        """Count, for each of ``entries`` positions, the (layer, KV head) pairs whose cache has the position's entry.

        Without ``left``, the cache right after prefill is counted. ``left`` has the entries that streams still have
        after ``step`` generated tokens; the pairs of all streams are then counted.
        """
        streams = 1 if left is None else left.streams
        of_layer = []
        for layer, index in enumerate(self.indices):
            counts = np.ones(index.shape) if left is None else left.of_layer[layer].cpu().numpy()
            counted = np.bincount(index.cpu().numpy().ravel(), counts.ravel(), minlength=entries)
            of_layer.append(counted[:entries].astype(np.int64))  # rows of heads that keep fewer end with ``entries``
        return kept_entries(of_layer, sum(len(index) for index in self.indices) * streams, step)

    @property
    def stored_bytes(self) -> int:
        """Bytes of everything that is stored: payload, scales, index and metadata."""
        return self.payload_bytes + self.scale_bytes + self.index_bytes + self.metadata_bytes

    @property
    def index_bytes(self) -> int:
        """Bytes of the kept indices; 0 unless the cache is indexed."""
        indexed = (count for layer, count in enumerate(self._positions) if self.indexed and layer not in self.whole)
        return sum(indexed) * torch.int32.itemsize

    @property
    def metadata_bytes(self) -> int:
        """Bytes of ``extents``: the prompt's length and the kept entries of each layer."""
        return int(self.extents.nbytes)


def evict(
    prompt: Sequence[PromptLayer], selector: Selector, kept: int, holdings: Sequence[Holding] | None = None,
    whole: frozenset[int] = frozenset(),
) -> CompactCache:  # fmt: skip
    """Evict all entries but those that a selector chooses, and those of the layers numbered in ``whole``.

    ``kept`` is the number of entries to keep for each KV head and layer; a selector with budgets of layers or heads
    keeps this number on average. If heads keep different numbers, they are stored one by one, as layers of one head. If
    everything is kept, the selector is not called. ``holdings`` are the forms in which layers are stored; by default,
    all are stored as computed.
    """
    entries = prompt[0].key.shape[1]
    chooser: Selector = Full() if kept >= entries else selector  # m >= n keeps everything, whatever the scores
    chosen = iter(_budgets(chooser, kept, entries, len(prompt) - len(whole)))
    budgets = [entries if number in whole else next(chosen) for number in range(len(prompt))]
    holdings = holdings or [AsComputed()] * len(prompt)
    coded = not all(isinstance(holding, AsComputed) for holding in holdings)
    layers, indices, hashes, stored, sums = [], [], [], [], []
    for number, (layer, budget, holding) in enumerate(zip(prompt, budgets, holdings, strict=True)):
        choosing = Full() if number in whole else chooser
        with failing_as("selector", choosing):
            index = choosing.keep(layer, budget)
        lengths = _check(index, layer, budget, choosing, number)
        parts = _gathered(layer, index, lengths)
        stored += [bytes_as_stored(part, holding) for part in parts if part.key.shape[1]]
        held = [_held(part, holding) if part.key.shape[1] else part for part in parts]
        layers.append(held[0] if lengths is None else _padded(held, lengths))
        if coded:
            sums.append(checksum(*(part.key for part in held), *(part.value for part in held)))
        indices.append(index.to(torch.int32).contiguous())
        hashes.append(hashlib.sha256(indices[-1].cpu().numpy().astype("<i4").tobytes()).hexdigest())
    extents = torch.tensor([[entries, budget] for budget in budgets], device=prompt[0].key.device)
    payload, scales = sum(part.payload for part in stored), sum(part.scales for part in stored)
    checksums = in_words(sums) if sums else None
    return CompactCache(
        tuple(layers), tuple(indices), extents, tuple(hashes), payload, scales, kept < entries, checksums, whole
    )


def _budgets(selector: Selector, kept: int, entries: int, layers: int) -> list[int]:
    """Ask a selector for the budget m of each layer, and check the budgets: whole numbers, range, count and sum."""
    with failing_as("selector", selector):
        returned = list(selector.budgets(kept, entries, layers))
    named, least = f"selector {type(selector).__name__}: returned", max(selector.window + selector.sinks, 1)
    try:
        budgets = [operator.index(budget) for budget in returned]
    except TypeError:
        raise OperationError(f"{named} budgets {returned}; they must be whole numbers of entries") from None
    if len(budgets) != layers or sum(budgets) != kept * layers:
        raise OperationError(
            f"{named} {len(budgets)} budgets with the sum {sum(budgets)}; {layers} layers that keep {kept} entries on "
            f"average need the sum {kept * layers}"
        )
    if min(budgets) < least or max(budgets) > entries:
        raise OperationError(f"{named} budgets {budgets}; each layer must keep {least} to {entries} entries")
    return budgets


def _gathered(layer: PromptLayer, index: Tensor, lengths: Sequence[int] | None) -> list[PrefixLayer]:
    """Gather the entries at positions ``index``; with ``lengths``, each head's as a layer of one head."""
    gather = index[:, :, None].expand(-1, -1, layer.key.shape[-1])
    if lengths is None:
        return [PrefixLayer(layer.key.gather(1, gather), layer.value.gather(1, gather), layer.terms)]
    heads = [(slice(head, head + 1), slice(entries)) for head, entries in enumerate(lengths)]
    return [
        PrefixLayer(
            layer.key[head].gather(1, gather[head, own]), layer.value[head].gather(1, gather[head, own]), layer.terms
        )
        for head, own in heads
    ]


def _padded(heads: Sequence[PrefixLayer], lengths: tuple[int, ...]) -> PrefixLayer:
    """Join layers of one head, which have ``lengths`` entries; shorter heads are padded to the longest."""
    key, value = (
        torch.cat([pad(part, (0, 0, 0, max(lengths) - part.shape[1])) for part in parts])
        for parts in ([head.key for head in heads], [head.value for head in heads])
    )
    return PrefixLayer(key, value, heads[0].terms, lengths=lengths)


def _held(layer: PrefixLayer, holding: Holding) -> PrefixLayer:
    with failing_as("codec", holding):
        held = holding.hold(layer)
    if layer.key.device.type == "cpu":
        return held
    return PrefixLayer(held.key.contiguous(), held.value.contiguous())  # kernels there take a head's entries in a row


def _check(index: Tensor, layer: PromptLayer, kept: int, selector: Selector, number: int) -> tuple[int, ...] | None:
    """Check a selector's kept positions, int64 [KV heads, most]: count, order, range, window and sinks.

    Returns how many positions each head keeps; None if all keep m.
    """
    heads, entries, _ = layer.key.shape
    if not isinstance(index, Tensor) or index.dtype not in _INTEGERS or index.device != layer.key.device:
        returned = f"{index.dtype} on {index.device}" if isinstance(index, Tensor) else f"a {type(index).__name__}"
        raise OperationError(
            f"selector {type(selector).__name__}: returned {returned} in layer {number}; it must return int64 "
            f"positions on {layer.key.device}"
        )
    least = selector.least_of_head(kept)
    real = index < entries
    lengths = tuple(real.sum(-1).tolist()) if index.dim() == 2 else ()
    sound = (
        len(lengths) == heads
        and sum(lengths) == kept * heads
        and least <= min(lengths)
        and index.shape[1] == max(lengths)
        and bool(((index[:, 1:] > index[:, :-1]) | ~real[:, 1:]).all())
        and bool((index >= 0).all() and (index <= entries).all())
        and bool((((index >= entries - selector.window) & real).sum(-1) == selector.window).all())
        and bool(((index < selector.sinks).sum(-1) == selector.sinks).all())
    )
    if not sound:
        count = f"exactly {kept}" if least == kept else f"{kept} on average and at least {least}"
        raise OperationError(
            f"selector {type(selector).__name__}: wrong positions in layer {number}; it must return {count} "
            f"ascending positions of 0..{entries - 1} per head, among them the last {selector.window} and the first "
            f"{selector.sinks} ones"
        )
    return None if min(lengths) == kept else lengths
