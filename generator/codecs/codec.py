"""The interface of codecs, which store entries in fewer bits; attention reads the entries as codecs read them back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor

from kvdrift.generator.attention.holding import StoredBytes
from kvdrift.generator.attention.shared_prefix import PrefixLayer
from kvdrift.schema.errors import InputError, OperationError

Part = Literal["keys", "values"]


class Codec(ABC):
    """A ``Holding`` that stores a layer's kept keys and values in fewer bits (``docs/codecs.md``).

    Keys and values are stored apart, so that an action can store them by unlike codecs. Subclasses are frozen
    dataclasses. Their fields, which all have defaults, are the parameters that a study can set; they are part of an
    action's identity.
    """

    summary: ClassVar[str]  # one line for ``kvdrift list codecs``
    paper: ClassVar[str | None] = None  # authors, year and arXiv number
    choices: ClassVar[Mapping[str, tuple[int | str, ...]]] = {}  # the values of parameters that take only some
    exact_ends: ClassVar[int] = 0  # layers at either end that stay exact, unless a study names layers

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters by name, defaults included."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]  # a dataclass

    def of(self, part: Part) -> Codec:  # noqa: ARG002 - one codec stores both, by default
        """Return the codec that stores keys or values, as ``part`` says."""
        return self

    @property
    def heads_together(self) -> bool:
        """Whether what is read of a KV head depends on the entries of other heads."""
        return False

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The codecs whose source and parameters an action's identity covers."""
        return (self,)

    def check(self, size: int, part: Part) -> None:  # noqa: B027 - most take every size
        """Refuse heads of ``size`` channels if their keys or values, as ``part`` says, cannot be coded."""

    @abstractmethod
    def round_trip(self, numbers: Tensor, part: Part) -> Tensor:
        """Store a layer's kept keys, as cached, or values, and read them back, in the same shape.

        Numbers are float32 [KV heads, m, size]; they must not be changed. ``part`` says whether they are keys or
        values.
        """

    @abstractmethod
    def stored_bytes(self, numbers: Tensor, part: Part) -> StoredBytes:
        """Return the bytes of a layer's keys or values as stored, from shape and dtype alone.

        Numbers are [KV heads, m, size] in the model's dtype; they may be on device meta.
        """

    def held(self, numbers: Tensor, part: Part) -> Tensor:
        """Return the keys or values that attention reads: their round trip, converted to the model's dtype.

        Raises:
            OperationError: The numbers come back in another shape, or not all of them are finite.
        """
        back = self.round_trip(numbers.float(), part)
        where = f"codec {type(self).__name__}: {part} come back"
        if back.shape != numbers.shape:
            raise OperationError(f"{where} as {list(back.shape)}, stored were {list(numbers.shape)}")
        if not bool(back.isfinite().all()):
            raise OperationError(f"{where} with a number that is not finite")
        return back.to(numbers.dtype)

    @final
    def hold(self, layer: PrefixLayer) -> PrefixLayer:
        """Return the layer that attention reads."""
        return PrefixLayer(self.held(layer.key, "keys"), self.held(layer.value, "values"))

    @final
    def layer_bytes(self, layer: PrefixLayer) -> StoredBytes:
        """Return the bytes of a layer's keys and values as stored.

        Raises:
            OperationError: ``stored_bytes`` returned anything but whole numbers, 0 or more.
        """
        parts = self.stored_bytes(layer.key, "keys"), self.stored_bytes(layer.value, "values")
        for stored in parts:
            if not all(type(count) is int and count >= 0 for count in (stored.payload, stored.scales)):
                line = f"codec {type(self).__name__}: stored_bytes returned {stored}"
                raise OperationError(f"{line}; bytes must be whole numbers, 0 or more")
        return StoredBytes(sum(part.payload for part in parts), sum(part.scales for part in parts))


class EntryCodec(Codec):
    """A codec that stores each entry by itself, whatever the entries beside it."""


class ScaledCodec(Codec):
    """A codec with scales for all entries of a layer; entries that are generated later are stored at these scales."""

    @abstractmethod
    def scale_of(self, numbers: Tensor) -> Tensor:
        """Return the scales of a layer's keys or values, float32 [KV heads or 1, 1, 1]."""

    @abstractmethod
    def at_scale(self, numbers: Tensor, scale: Tensor) -> Tensor:
        """Return what is read of float32 numbers [..., KV heads, m, size] that are stored at scales."""

    def round_trip(self, numbers: Tensor, part: Part) -> Tensor:  # noqa: ARG002
        """Return the numbers as they are read at the scales of their layer."""
        return self.at_scale(numbers, self.scale_of(numbers))


@dataclass(frozen=True)
class GroupedCodec(Codec):
    """A codec whose scales belong to groups of numbers; the last ``residual`` entries stay exact."""

    group: int = 32
    residual: int = 128

    def __post_init__(self) -> None:
        for name, bound in (("group", 1), ("residual", 0)):
            if (value := getattr(self, name)) < bound:
                raise InputError(f"{name} = {value}: should be at least {bound}")

    @property
    def keys_together(self) -> int:
        """How many consecutive keys are coded together."""
        return 1

    def before_window(self, entries: int) -> int:
        """How many of ``entries`` entries lie before the last ``residual`` entries."""
        return max(entries - self.residual, 0)


def beside_exact(coded: Tensor, numbers: Tensor) -> Tensor:
    """Return ``numbers``, [KV heads, m, size], with the first entries replaced by ``coded``; the others stay exact."""
    return torch.cat([coded, numbers[:, coded.shape[1] :]], dim=1)


def check_blocks(size: int, block: int, codec: str) -> None:
    """Refuse heads whose channels do not fill whole blocks."""
    if size % block:
        raise InputError(f"heads of {size} channels do not fill blocks of {block}, in which {codec} stores them")


def in_blocks(numbers: Tensor, block: int) -> Tensor:
    """Return numbers [..., size] as [..., size / block, block]."""
    return numbers.reshape(*numbers.shape[:-1], -1, block)
