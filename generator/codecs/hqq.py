"""HQQ: scales from the extremes of a group, zero points fitted by half-quadratic splitting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvdrift.generator.codecs.quantized_cache import QuantizedCacheCodec


@dataclass(frozen=True)
class HQQ(QuantizedCacheCodec):
    """HQQ (https://github.com/mobiusml/hqq) as transformers' cache uses it.

    With axis 1 a group is ``group`` consecutive channels of an entry. With axis 0, transformers' default, it is
    ``group`` numbers that lie equally far apart in all of a layer's keys or values.
    """

    library: ClassVar[str] = "hqq"
    axes: ClassVar[tuple[int, ...]] = (0, 1)

    def cache_layer(self) -> Any:
        """Make an empty ``HQQQuantizedLayer``."""
        from transformers.cache_utils import HQQQuantizedLayer  # noqa: PLC0415 - it imports hqq

        return HQQQuantizedLayer(
            nbits=self.bits, axis_key=self.axis_key, axis_value=self.axis_value, q_group_size=self.group
        )


@dataclass(frozen=True)
class HQQInt8(HQQ):
    """HQQ in 8 bits."""

    summary: ClassVar[str] = "8-bit integers by hqq, as transformers' quantized cache; needs the extra [quantizers]"
    bits: ClassVar[int] = 8


@dataclass(frozen=True)
class HQQInt4(HQQ):
    """HQQ in 4 bits."""

    summary: ClassVar[str] = "4-bit integers by hqq, as transformers' quantized cache; needs the extra [quantizers]"
    bits: ClassVar[int] = 4


@dataclass(frozen=True)
class HQQInt2(HQQ):
    """HQQ in 2 bits."""

    summary: ClassVar[str] = "2-bit integers by hqq, as transformers' quantized cache; needs the extra [quantizers]"
    bits: ClassVar[int] = 2
