"""The codec that changes nothing: the control of its family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvdrift.generator.attention.holding import StoredBytes
from kvdrift.generator.codecs.codec import EntryCodec, Part


@dataclass(frozen=True)
class Identity(EntryCodec):
    """Entries unchanged, but through the code path of every codec: delta and f must be exactly 0."""

    summary: ClassVar[str] = "every number in the model's own dtype (the control of codecs)"

    def round_trip(self, numbers: Tensor, part: Part) -> Tensor:  # noqa: ARG002
        """Return the numbers."""
        return numbers

    def stored_bytes(self, numbers: Tensor, part: Part) -> StoredBytes:  # noqa: ARG002
        """Return the bytes of the numbers in the model's dtype."""
        return StoredBytes(numbers.nbytes)
