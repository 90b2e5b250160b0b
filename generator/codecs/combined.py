"""Keys by one codec, and values by another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from kvdrift.generator.attention.holding import StoredBytes
from kvdrift.generator.codecs.codec import Codec, Part
from kvdrift.generator.codecs.identity import Identity

_EXACT = Identity()


@dataclass(frozen=True)
class KeysAndValues(Codec):
    """Stores keys by one codec and values by another; ``Identity`` leaves them exact."""

    summary: ClassVar[str] = "keys by one codec, values by another"
    keys: Codec = _EXACT
    values: Codec = _EXACT

    def of(self, part: Part) -> Codec:
        """Return the codec of keys or of values."""
        return self.keys if part == "keys" else self.values

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of both codecs."""
        return {"keys": self.keys.parameters, "values": self.values.parameters}

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The codec itself, and those of keys and of values."""
        return (self, *self.keys.codecs, *self.values.codecs)

    def check(self, size: int, part: Part) -> None:
        """Refuse heads whose keys or values cannot be coded."""
        self.of(part).check(size, part)

    def round_trip(self, numbers: Tensor, part: Part) -> Tensor:
        """Return keys or values as their codec reads them back."""
        return self.of(part).round_trip(numbers, part)

    def held(self, numbers: Tensor, part: Part) -> Tensor:
        """Return keys or values as their codec holds them."""
        return self.of(part).held(numbers, part)

    def stored_bytes(self, numbers: Tensor, part: Part) -> StoredBytes:
        """Return the bytes of keys or values as their codec stores them."""
        return self.of(part).stored_bytes(numbers, part)
