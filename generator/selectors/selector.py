"""What a selector is."""

from __future__ import annotations

from typing import ClassVar, Protocol

from torch import Tensor

from generator.attention import PromptLayer


class Selector(Protocol):
    """Chooses which m of a layer's n prompt entries each KV head keeps.

    Its dataclass fields are its parameters and part of an action's identity. ``window`` is the number of last prompt
    positions kept whole (and the number of last queries that it is shown), ``sinks`` that of initial ones.
    """

    summary: ClassVar[str]

    @property
    def window(self) -> int:
        """Last prompt positions kept whole; 0 for none."""

    @property
    def sinks(self) -> int:
        """First prompt positions always kept; 0 for none."""

    def keep(self, layer: PromptLayer, kept: int) -> Tensor:
        """Indices of the kept positions, int64 [KV heads, kept], ascending within a head; 0 <= index < n."""

    def identity(self) -> dict[str, str | int | None]:
        """Kernel, pooling and head reduction as the ``actions`` table records them; null where there is none."""
