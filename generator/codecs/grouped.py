"""The base of codecs with groups: a group size, and a window of last entries that stays exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvdrift.generator.codecs.codec import Codec
from kvdrift.schema.errors import InputError


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
        """How many of m entries lie before the window."""
        return max(entries - self.residual, 0)


def beside_exact(coded: Tensor, numbers: Tensor) -> Tensor:
    """Join coded entries with the exact entries after them, [KV heads, m, size]."""
    return torch.cat([coded, numbers[:, coded.shape[1] :]], dim=1)
