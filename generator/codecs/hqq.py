"""HQQ (https://github.com/mobiusml/hqq): a prompt as transformers' quantized cache stores and reads it.

HQQ takes scales from the extremes of a group, and fits zero points by half-quadratic splitting.

When prefill hands the prompt to a layer of such a cache, all of it is stored in integers: ``residual_length`` counts
generated entries alone. So no entry of the prompt stays exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

from torch import Tensor

from kvdrift.generator.attention.holding import StoredBytes
from kvdrift.generator.codecs.codec import Codec, Part
from kvdrift.schema.errors import InputError, OperationError, installing

_LIBRARY, _AXES = "hqq", (0, 1)
_PACKED_ENTRIES = 8  # of which all numbers fill whole bytes, whatever the bits


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
    def heads_together(self) -> bool:
        """Return true: groups may extend over KV heads."""
        return True

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

    def check(self, size: int, part: Part) -> None:  # noqa: ARG002
        """Refuse heads of ``size`` channels if these do not fill whole groups.

        A layer could then be stored only if its number of entries happened to fill whole groups.
        """
        if size % self.group:
            line = f"heads of {size} channels cannot be coded in groups of {self.group}"
            raise InputError(f"{line}; set group to a divisor of {size}")

    def round_trip(self, numbers: Tensor, part: Part) -> Tensor:
        """Store a layer's keys or values and read them back, in their own dtype."""
        self._check_packing(numbers, part)
        stored, few = self.cache_layer(), numbers[:, :_PACKED_ENTRIES]  # the cache takes keys and values together
        pair = (numbers, few) if part == "keys" else (few, numbers)
        stored.update(pair[0][None], pair[1][None])
        key, value = stored.update(numbers[None, :, :0], numbers[None, :, :0])  # a step without tokens
        back: Tensor = key[0] if part == "keys" else value[0]
        return back

    def held(self, numbers: Tensor, part: Part) -> Tensor:
        """Return what attention reads: the round trip in the model's dtype, as transformers computes it."""
        back = self.round_trip(numbers, part)
        if not bool(back.isfinite().all()):
            raise OperationError(f"codec {type(self).__name__}: {part} come back with a number that is not finite")
        return back

    def stored_bytes(self, numbers: Tensor, part: Part) -> StoredBytes:
        """Return the bytes of packed integers, and of a scale and a zero point for each group, in the model's dtype."""
        self._check_packing(numbers, part)
        count = numbers.numel()
        return StoredBytes(count // self._packed, 2 * (count // self.group) * numbers.itemsize)

    def _check_packing(self, numbers: Tensor, part: Part) -> None:
        """Check that the numbers fill whole groups, and that hqq can pack the groups into whole bytes."""
        axis = self.axis_key if part == "keys" else self.axis_value
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
