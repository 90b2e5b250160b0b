"""Slots of streams: in which slot each open stream is, which suffixes are copied where, and the suffixes' buffers.

The bookkeeping is in integers on the CPU. ``kvdrift.generator.attention.shared_prefix`` has the copies done on the
devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_NONE = torch.empty(0, dtype=torch.int64)
_CPU_BYTES, _OTHER_BYTES = 2**20, 2**28  # of suffixes copied at once
Suffixes = list[Tensor]  # keys and values of one layer


class StreamSlots:
    """The slots of open and parked streams.

    Of n open streams, stream i is in slot ``slots[i]``, a number below n. A stream stays in its slot unless its number
    is n or above; only streams that move or fork are copied. Parked streams are copied, at the next step, to the slots
    from ``streams``, the most open streams, on, so that all copies of a step are sent to the devices together.
    """

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self.slots = _NONE  # int64 [streams]
        self.caches = _NONE  # the cache of each stream, [streams]
        self.length = 0  # entries of every suffix
        self._parked_caches = _NONE
        self._parked_slots = _NONE  # where they lie now: still open streams' slots, until they are copied
        self._waiting_length = 0  # of the longest parked suffix that is still to be copied
        self._source = self._target = _NONE  # of the copies to make

    def open(self, caches: Sequence[int]) -> None:
        """Start one stream at the end of the prompt for each of ``caches``, which ascend."""
        self.rewind()
        self.caches = torch.tensor(caches)
        self.slots = torch.arange(len(caches))

    def select(self, rows: Tensor) -> bool:
        """Replace the open streams: new stream i continues open stream ``rows[i]``; higher numbers are parked streams.

        Rows are int64 [streams], grouped by cache in ascending order. Returns whether any stream changes.
        """
        streams, count = len(self.slots), len(rows)
        if torch.equal(rows, torch.arange(streams)):
            return False
        self.caches = torch.cat([self.caches, self._parked_caches])[rows]
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

        A stream that is already parked at such a place is given up. Both are int64 [parked].
        """
        more = int(places.max()) + 1 - len(self._parked_caches)
        if more > 0:
            unused = torch.zeros(more, dtype=torch.int64)
            self._parked_caches = torch.cat([self._parked_caches, unused])
            self._parked_slots = torch.cat([self._parked_slots, unused + self._streams])
        self._parked_caches[places], self._parked_slots[places] = self.caches[rows], self.slots[rows]
        self._waiting_length = max(self._waiting_length, self.length)

    def rewind(self) -> None:
        """Close all streams and go back to the end of the prompt."""
        self.length = 0
        self.caches, self.slots = _NONE, _NONE
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
    """Allocate buffers for suffixes; parts of one device and shape share a buffer, [parts, slots, KV heads, H, size].

    ``layers`` has for each layer a prompt's keys and values, [KV heads, m, size]. Returns the buffers, and for each
    layer its keys and values in them, [slots, KV heads, H, size] each.
    """
    kinds = [(part.device, part.dtype, part.shape[0], part.shape[2]) for layer in layers for part in layer]
    rooms, buffers = {}, []
    for kind in dict.fromkeys(kinds):
        device, dtype, heads, size = kind
        shape = (kinds.count(kind), slots, heads, horizon, size)
        buffers.append(torch.empty(shape, dtype=dtype, device=device))
        rooms[kind] = iter(buffers[-1].unbind())
    own = [next(rooms[kind]) for kind in kinds]
    return buffers, [own[first : first + 2] for first in range(0, len(own), 2)]


def copy_suffixes(buffer: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy slots ``source`` to slots ``target``, all at once, in every part of a buffer, [parts, slots, ...]."""
    room = _CPU_BYTES if buffer.device.type == "cpu" else _OTHER_BYTES
    moved = len(source) * buffer[0, 0].numel() * buffer.itemsize
    for parts in torch.split(buffer, max(room // max(moved, 1), 1)):
        parts.index_copy_(1, target, parts[:, source])
