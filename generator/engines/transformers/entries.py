"""The tensors of a cache: their bytes, copies of caches, and which entries of a prompt a cache still has."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvdrift.log.prompts import KeptEntries, kept_entries

Masks = Sequence[Sequence[Tensor] | None]
"""For each layer the masked entries, as kvpress has them: rows, KV heads and places; None if no entry is masked."""


def tensors_of(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the tensors in an object's attributes, at any depth, in dicts, lists and tuples too; each tensor once."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
    for item in (*inside, *getattr(value, "__dict__", {}).values()):
        yield from tensors_of(item, seen)


def shared_copy(value: Any) -> Any:
    """Copy an object but not its tensors of several dimensions, which both objects then have; counters are copied."""
    return copy.deepcopy(value, {id(tensor): tensor for tensor in tensors_of(value) if tensor.dim() > 1})


def whole_copy(value: Any) -> Any:
    """Copy an object with its tensors; tensors of quantizers, which never change in place, are shared."""
    packed = {id(tensor): tensor for tensor in tensors_of(value) if type(tensor) is not Tensor}
    return copy.deepcopy(value, packed)


def stored_bytes(cache: Any) -> int:
    """Return the bytes of a cache's tensors, those of quantizers as packed."""
    return sum(_bytes(tensor) for tensor in tensors_of(cache.layers))


def held_bytes(cache: Any, masks: Masks) -> int | None:
    """Return the bytes that a cache of one row needs: without masked entries, and without channels of zeros in keys.

    None if entries of a cache that is not stored as computed are masked: their bytes cannot be told.
    """
    held = stored_bytes(cache)
    for layer, mask in zip(cache.layers, masks, strict=False):
        plain = _plain(layer)
        masked = 0 if mask is None else len(mask[0])
        if plain is None:
            if masked:
                return None
            continue
        keys, values = plain
        idle = (keys == 0).all(dim=-2).sum(dim=-1).reshape(-1) * keys.itemsize  # bytes of an entry, for each head
        each = keys.shape[-1] * keys.itemsize + values.shape[-1] * values.itemsize
        lost = 0 if mask is None else torch.bincount(mask[1].cpu(), minlength=keys.shape[1])
        held -= masked * each + int((idle.cpu() * (keys.shape[-2] - lost)).sum())
    return held


@contextmanager
def recorded(cache: Any) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Record the keys and values that attention reads at the first call of each layer inside the block, by layer."""
    computed: dict[int, tuple[Tensor, Tensor]] = {}
    update = cache.update

    def recording(key: Tensor, value: Tensor, layer: int, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        read: tuple[Tensor, Tensor] = update(key, value, layer, *arguments, **options)
        computed.setdefault(layer, read)
        return read

    cache.update = recording
    try:
        yield computed
    finally:
        del cache.update


def kept_count(cache: Any, entries: int, masks: Masks) -> int | None:
    """Return the mean number of entries of a prompt that a KV head of a layer keeps; None if it cannot be told."""
    held, heads = 0, 0
    for number, layer in enumerate(cache.layers):
        plain = _plain(layer)
        if plain is None or plain[0].shape[-2] > entries:
            return None
        held += plain[0].shape[1] * plain[0].shape[-2] - _masked(masks, number)
        heads += plain[0].shape[1]
    return held // heads if heads else None


def kept_positions(
    computed: dict[int, tuple[Tensor, Tensor]], cache: Any, entries: int, masks: Masks
) -> KeptEntries | None:
    """Return which entries of a prompt a cache keeps; None if it cannot be told.

    ``computed`` has what ``recorded`` found. An entry is recognized by the bits of its key and value, or of its key, if
    values were altered; entries whose keys were altered cannot be told.
    """
    of_layer, pairs = [], 0
    for number, layer in enumerate(cache.layers):
        plain, whole = _plain(layer), computed.get(number)
        if plain is None or whole is None or whole[0].shape[-2] != entries:
            return None
        counts = _counts(whole, plain, masks[number] if number < len(masks) else None)
        if counts is None:
            return None
        of_layer.append(counts)
        pairs += plain[0].shape[1]
    return kept_entries(of_layer, pairs) if of_layer else None


def rows_of(masks: Masks, rows: Sequence[int]) -> list[list[Tensor] | None]:
    """Return the masks of a cache whose row i is row ``rows[i]`` of the masked cache."""
    chosen: list[list[Tensor] | None] = []
    for mask in masks:
        if mask is None:
            chosen.append(None)
            continue
        row, head, place = mask
        parts = [(row == before).nonzero().flatten() for before in rows]
        each = torch.cat([torch.full_like(part, new) for new, part in enumerate(parts)])
        of_part = torch.cat(parts).to(head.device)
        chosen.append([each.to(row.device), head[of_part], place[of_part]])
    return chosen


def _counts(
    whole: tuple[Tensor, Tensor], kept: tuple[Tensor, Tensor], mask: Sequence[Tensor] | None
) -> NDArray[np.int64] | None:
    """Return for each position of the prompt how many KV heads of a layer keep its entry, int64 [n]."""
    entries = whole[0].shape[-2]
    if kept[0].shape[-2] == entries:
        places = np.tile(np.arange(entries), (kept[0].shape[1], 1))
    else:
        found = _found(torch.cat(whole, dim=-1), torch.cat(kept, dim=-1)) or _found(whole[0], kept[0])
        if found is None:
            return None
        places = np.array(found)
    counts = np.bincount(places.ravel(), minlength=entries)
    if mask is not None:
        np.subtract.at(counts, places[mask[1].cpu().numpy(), mask[2].cpu().numpy()], 1)
    return counts.astype(np.int64)


def _found(whole: Tensor, kept: Tensor) -> list[list[int]] | None:
    """Return for each KV head the positions of its kept rows; None if a row is not among the whole ones."""
    found = []
    for all_rows, rows in zip(_row_bytes(whole), _row_bytes(kept), strict=True):
        waiting: dict[bytes, list[int]] = defaultdict(list)
        for place, row in enumerate(all_rows):
            waiting[row].append(place)
        try:
            found.append([waiting[row].pop(0) for row in rows])
        except IndexError:
            return None
    return found


def _row_bytes(rows: Tensor) -> Iterator[list[bytes]]:
    """Yield for each KV head a list with the bits of each entry of a cache of one row, [1, heads, entries, size]."""
    for head in rows[0].contiguous().view(torch.uint8).cpu().numpy():
        yield [row.tobytes() for row in head]


def _plain(layer: Any) -> tuple[Tensor, Tensor] | None:
    """Return a layer's keys and values, [rows, heads, entries, size], if all are stored as computed; else None."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or (keys.dim(), values.dim()) != (4, 4):
        return None
    others = [tensor for tensor in tensors_of(layer) if tensor is not keys and tensor is not values]
    return None if any(tensor.dim() > 1 for tensor in others) else (keys, values)


def _masked(masks: Masks, number: int) -> int:
    mask = masks[number] if number < len(masks) else None
    return 0 if mask is None else len(mask[0])


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor; of a quantizer's tensor, those of the tensors inside."""
    if type(tensor) is Tensor or not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(_bytes(getattr(tensor, name)) for name in names)
