"""The interface of codecs, which store entries in fewer bits; attention reads the entries as codecs read them back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from kvdrift.generator.attention.holding import StoredBytes
from kvdrift.generator.attention.shared_prefix import PrefixLayer
from kvdrift.schema.errors import InputError, OperationError


class Codec(ABC):
    """A ``Holding`` that stores a layer's kept keys and values in fewer bits (``docs/codecs.md``).

    Subclasses are frozen dataclasses. Their fields, which all have defaults, are the parameters that a study can set;
    they are part of an action's identity.
    """

    summary: ClassVar[str]  # one line for ``kvdrift list codecs``
    paper: ClassVar[str | None] = None  # authors, year and arXiv number

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters by name, defaults included."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]  # a dataclass

    def check(self, size: int) -> None:  # noqa: B027 - most take every size
        """Refuse heads of ``size`` channels if they cannot be coded."""

    @abstractmethod
    def round_trip(self, layer: PrefixLayer) -> PrefixLayer:
        """Store a layer's entries and read them back, in the same shapes.

        Kept keys, as cached, and values are float32 [KV heads, m, size] each; they must not be changed.
        """

    @abstractmethod
    def stored_bytes(self, layer: PrefixLayer) -> StoredBytes:
        """Return the bytes of a layer as stored, from its shapes and dtype alone; its tensors may be on device meta."""

    @final
    def hold(self, layer: PrefixLayer) -> PrefixLayer:
        """Return the layer that attention reads: its round trip in float32, converted to the model's dtype.

        Raises:
            OperationError: Keys or values come back in another shape, or with a number that is not finite.
        """
        back = self.round_trip(PrefixLayer(layer.key.float(), layer.value.float()))
        for name, stored, read in (("keys", layer.key, back.key), ("values", layer.value, back.value)):
            where = f"codec {type(self).__name__}: {name} come back"
            if read.shape != stored.shape:
                raise OperationError(f"{where} as {list(read.shape)}, stored were {list(stored.shape)}")
            if not bool(read.isfinite().all()):
                raise OperationError(f"{where} with a number that is not finite")
        return PrefixLayer(back.key.to(layer.key.dtype), back.value.to(layer.value.dtype))


@dataclass(frozen=True)
class GroupedCodec(Codec):
    """A codec whose scales belong to groups of numbers; the last ``residual`` entries stay exact."""

    group: int = 32
    residual: int = 128

    def __post_init__(self) -> None:
        for name, bound in (("group", 1), ("residual", 0)):
            if (value := getattr(self, name)) < bound:
                raise InputError(f"{name} = {value}: should be at least {bound}")

    def before_window(self, entries: int) -> int:
        """How many of ``entries`` entries lie before the last ``residual`` entries."""
        return max(entries - self.residual, 0)


def beside_exact(coded: Tensor, numbers: Tensor) -> Tensor:
    """Return ``numbers``, [KV heads, m, size], with the first entries replaced by ``coded``; the others stay exact."""
    return torch.cat([coded, numbers[:, coded.shape[1] :]], dim=1)
