"""How the compressed side stores the prompt entries that an action keeps (definitions, "Interventions").

A holding takes keys and values in the model's dtype. It returns the numbers that attention reads in their place, in the
same dtype, and the bytes of the stored form. Generated entries are stored as computed.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Protocol

import torch

from kvdrift.generator.attention.shared_prefix import PrefixLayer
from kvdrift.schema.errors import OperationError, failing_as

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of keys and values as stored.

    Attributes:
        payload: Bytes of the numbers themselves, in whatever number of bits each.
        scales: Bytes of scales and zero points, if integers need them.
    """

    payload: int
    scales: int = 0

    @property
    def total(self) -> int:
        """All bytes together."""
        return self.payload + self.scales


class Holding(Protocol):
    """A way to store a layer's kept keys and values. Equal holdings store equal entries in equal bytes."""

    def hold(self, layer: PrefixLayer) -> PrefixLayer:
        """Return the layer that attention reads, of the same shapes, dtype and device."""
        ...

    def stored_bytes(self, layer: PrefixLayer) -> StoredBytes:
        """Return the bytes that the layer's keys and values take as they are stored."""
        ...


@dataclass(frozen=True)
class AsComputed:
    """Stores keys and values as the model computed them."""

    def hold(self, layer: PrefixLayer) -> PrefixLayer:
        """Return the layer."""
        return layer

    def stored_bytes(self, layer: PrefixLayer) -> StoredBytes:
        """Return the layer's bytes."""
        return StoredBytes(layer.key.nbytes + layer.value.nbytes)


@dataclass(frozen=True)
class InDtype:
    """Stores keys and values rounded to another dtype, a name of ``DTYPES``."""

    dtype: str

    def hold(self, layer: PrefixLayer) -> PrefixLayer:
        """Return the layer rounded to the dtype and back to the model's."""
        stored, own = DTYPES[self.dtype], layer.key.dtype
        return PrefixLayer(layer.key.to(stored).to(own), layer.value.to(stored).to(own))

    def stored_bytes(self, layer: PrefixLayer) -> StoredBytes:
        """Return the bytes of the layer's numbers in the dtype."""
        return StoredBytes((layer.key.numel() + layer.value.numel()) * DTYPES[self.dtype].itemsize)


def bytes_as_stored(layer: PrefixLayer, holding: Holding) -> StoredBytes:
    """Return the stored bytes of a layer's keys and values, which may be tensors without data."""
    with failing_as("codec", holding):
        size = holding.stored_bytes(layer)
        size = StoredBytes(operator.index(size.payload), operator.index(size.scales))
    if min(size.payload, size.scales) < 0:
        raise OperationError(f"codec {type(holding).__name__}: stored_bytes returned {size}; bytes are 0 or more")
    return size
