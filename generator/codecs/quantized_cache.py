"""Codecs of libraries: a prompt as transformers' quantized cache stores and reads it.

When prefill hands the prompt to a layer of such a cache, all of it is stored in integers: ``residual_length`` counts
generated entries alone. So no entry of the prompt stays exact.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

from kvdrift.generator.attention.holding import StoredBytes
from kvdrift.generator.attention.shared_prefix import PrefixLayer
from kvdrift.generator.codecs.codec import Codec
from kvdrift.schema.errors import InputError, OperationError


@dataclass(frozen=True)
class QuantizedCacheCodec(Codec):
    """A layer of transformers' quantized cache, with the library that quantizes for it.

    A layer's keys are quantized together, those of all its KV heads, and so are its values. ``group`` is transformers'
    ``q_group_size``; its other names and all defaults are transformers' own.
    """

    library: ClassVar[str]  # the name under which it is installed
    bits: ClassVar[int]
    axes: ClassVar[tuple[int, ...]]  # the axes that the library supports
    group: int = 64
    axis_key: int = 0
    axis_value: int = 0

    def __post_init__(self) -> None:
        if self.group < 1 or self.group % self._packed:
            multiple = f", a multiple of {self._packed}" if self._packed > 1 else ""
            raise InputError(f"group = {self.group}: should be at least {self._packed}{multiple}")
        for name, axis in (("axis_key", self.axis_key), ("axis_value", self.axis_value)):
            if axis not in self.axes:
                raise InputError(f"{name} = {axis}: should be {' or '.join(map(str, self.axes))}")
        try:
            version(self.library)
            self.cache_layer()
        except (PackageNotFoundError, ImportError):
            raise InputError(
                f"{type(self).__name__} needs {self.library}, which is not installed or too old; "
                "install it by: pip install -e '.[quantizers]'"
            ) from None

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters by name, with the library's version."""
        return {self.library: version(self.library)} | super().parameters

    @property
    def _packed(self) -> int:
        """How many numbers are in a byte."""
        return 8 // self.bits

    @abstractmethod
    def cache_layer(self) -> Any:
        """Make an empty layer of transformers' cache.

        Raises:
            ImportError: The library cannot be imported, or transformers asks for a later version.
        """

    def check(self, size: int) -> None:
        """Check that groups divide a head vector, so that they divide any number of entries.

        Raises:
            InputError: They do not.
        """
        if size % self.group:
            raise InputError(f"heads of {size} channels cannot be coded in groups of {self.group}; set group")

    def round_trip(self, layer: PrefixLayer) -> PrefixLayer:
        """Store a layer's entries and read them back, in their own dtype."""
        self._check_packing(layer)
        stored = self.cache_layer()
        stored.update(layer.key[None], layer.value[None])
        key, value = stored.update(layer.key[None, :, :0], layer.value[None, :, :0])  # a step without tokens
        return PrefixLayer(key[0], value[0])

    def hold(self, layer: PrefixLayer) -> PrefixLayer:  # type: ignore[misc]  # other codecs compute in float32
        """Return the layer that attention reads: the round trip in the model's dtype, as transformers computes it.

        Raises:
            InputError: The library cannot pack so many numbers.
            OperationError: A number comes back that is not finite.
        """
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
        """Check that groups divide the numbers, and that rows of groups can be packed, as libraries do it."""
        for axis, numbers in ((self.axis_key, layer.key), (self.axis_value, layer.value)):
            rows = self.group if axis == 0 else numbers.numel() // self.group
            if numbers.numel() % self.group or rows % self._packed:
                heads, entries, size = numbers.shape
                raise InputError(
                    f"{type(self).__name__}: {self.library} cannot store {entries} entries of {heads} KV heads of "
                    f"{size} channels with group = {self.group} and axis {axis} in {self.bits} bits; change one of them"
                )
