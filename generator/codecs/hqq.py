"""HQQ (https://github.com/mobiusml/hqq): a prompt as transformers' quantized cache stores and reads it.

HQQ takes scales from the extremes of a group, and fits zero points by half-quadratic splitting.

When prefill hands the prompt to a layer of such a cache, all of it is stored in integers: ``residual_length`` counts
generated entries alone. So no entry of the prompt stays exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

from kvdrift.generator.attention.holding import StoredBytes
from kvdrift.generator.attention.shared_prefix import PrefixLayer
from kvdrift.generator.codecs.codec import Codec
from kvdrift.schema.errors import InputError, OperationError, installing

_LIBRARY, _AXES = "hqq", (0, 1)


@dataclass(frozen=True)
class HQQ(Codec):
    """A layer of transformers' quantized cache.

    A layer's keys are quantized together, those of all its KV heads, and so are its values. With axis 1 a group is
    ``group`` consecutive channels of an entry. With axis 0 it is ``group`` numbers that lie equally far apart in all of
    a layer's keys or values. ``group`` is transformers' ``q_group_size``; all defaults are transformers' own.
    """

    bits: ClassVar[int]
    group: int = 64
    axis_key: int = 0
    axis_value: int = 0

    def __post_init__(self) -> None:
        if self.group < 1 or self.group % self._packed:
            multiple = f", a multiple of {self._packed}" if self._packed > 1 else ""
            raise InputError(f"group = {self.group}: should be at least {self._packed}{multiple}")
        for name, axis in (("axis_key", self.axis_key), ("axis_value", self.axis_value)):
            if axis not in _AXES:
                raise InputError(f"{name} = {axis}: should be {' or '.join(map(str, _AXES))}")
        try:
            version(_LIBRARY)
            self.cache_layer()
        except (PackageNotFoundError, ImportError):
            raise InputError(
                f"{type(self).__name__} needs {_LIBRARY}, which is not installed or too old; "
                f"install it by: {installing('quantizers')}"
            ) from None

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters by name, with the library's version."""
        return {_LIBRARY: version(_LIBRARY)} | super().parameters

    @property
    def _packed(self) -> int:
        """How many coded numbers are in a byte."""
        return 8 // self.bits

    def cache_layer(self) -> Any:
        """Make an empty ``HQQQuantizedLayer``; raise ImportError if transformers needs a later version of hqq."""
        from transformers.cache_utils import HQQQuantizedLayer  # noqa: PLC0415 - it imports hqq

        return HQQQuantizedLayer(
            nbits=self.bits, axis_key=self.axis_key, axis_value=self.axis_value, q_group_size=self.group
        )

    def check(self, size: int) -> None:
        """Refuse heads of ``size`` channels if these do not fill whole groups.

        A layer could then be stored only if its number of entries happened to fill whole groups.
        """
        if size % self.group:
            line = f"heads of {size} channels cannot be coded in groups of {self.group}"
            raise InputError(f"{line}; set group to a divisor of {size}")

    def round_trip(self, layer: PrefixLayer) -> PrefixLayer:
        """Store a layer's entries and read them back, in their own dtype."""
        self._check_packing(layer)
        stored = self.cache_layer()
        stored.update(layer.key[None], layer.value[None])
        key, value = stored.update(layer.key[None, :, :0], layer.value[None, :, :0])  # a step without tokens
        return PrefixLayer(key[0], value[0])

    def hold(self, layer: PrefixLayer) -> PrefixLayer:  # type: ignore[misc]  # other codecs compute in float32
        """Return the layer that attention reads: the round trip in the model's dtype, as transformers computes it."""
        back = self.round_trip(layer)
        for name, read in (("keys", back.key), ("values", back.value)):
            if not bool(read.isfinite().all()):
                raise OperationError(f"codec {type(self).__name__}: {name} come back with a number that is not finite")
        return back

    def stored_bytes(self, layer: PrefixLayer) -> StoredBytes:
        """Return the bytes of packed integers, and of a scale and a zero point for each group, in the model's dtype."""
        self._check_packing(layer)
        numbers = layer.key.numel() + layer.value.numel()
        return StoredBytes(numbers // self._packed, 2 * (numbers // self.group) * layer.key.itemsize)

    def _check_packing(self, layer: PrefixLayer) -> None:
        """Check that the layer's numbers fill whole groups, and that hqq can pack the groups into whole bytes."""
        for axis, numbers in ((self.axis_key, layer.key), (self.axis_value, layer.value)):
            rows = self.group if axis == 0 else numbers.numel() // self.group
            if numbers.numel() % self.group or rows % self._packed:
                heads, entries, size = numbers.shape
                raise InputError(
                    f"{type(self).__name__}: {_LIBRARY} cannot store {entries} entries of {heads} KV heads of "
                    f"{size} channels with group = {self.group} and axis {axis} in {self.bits} bits; "
                    "change group or the axis"
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
