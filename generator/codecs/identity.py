"""The codec that changes nothing: the control of its family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvdrift.generator.attention.holding import AsComputed, StoredBytes
from kvdrift.generator.attention.shared_prefix import PrefixLayer
from kvdrift.generator.codecs.codec import Codec


@dataclass(frozen=True)
class Identity(Codec):
    """Entries unchanged, but through the code path of every codec: delta and f must be exactly 0."""

    summary: ClassVar[str] = "every number in the model's own dtype (the control of codecs)"

    def round_trip(self, layer: PrefixLayer) -> PrefixLayer:
        """Return the layer."""
        return layer

    def stored_bytes(self, layer: PrefixLayer) -> StoredBytes:
        """Return the layer's bytes."""
        return AsComputed().stored_bytes(layer)
