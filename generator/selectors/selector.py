"""What a selector is, and the kind that most are: the highest scores stay."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from generator.attention.recording import PromptLayer
from generator.attention.statistics import Statistic


class Selector(ABC):
    """Chooses which m of a layer's n prompt entries each KV head keeps.

    Subclasses are frozen dataclasses; their fields, all with defaults, are the parameters that a study may set and part
    of an action's identity.
    """

    summary: ClassVar[str]  # one line for ``kvdrift list selectors``
    head_reduction: ClassVar[str | None] = None  # how scores of a KV head's query heads become one; None without such

    @property
    def window(self) -> int:
        """Last prompt positions kept whole, and the number of last queries that ``PromptLayer`` must have."""
        return 0

    @property
    def sinks(self) -> int:
        """First prompt positions always kept."""
        return 0

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """What must be gathered over all queries of the prompt; ``PromptLayer.gathered`` gives it back."""
        return ()

    def budgets(self, kept: int, entries: int, layers: int) -> Sequence[int]:  # noqa: ARG002 - others need the length
        """m of each layer, from 0; their mean is exactly ``kept``, m of the action, of a prompt of n ``entries``."""
        return [kept] * layers

    @abstractmethod
    def keep(self, layer: PromptLayer, kept: int) -> Tensor:
        """Indices of the kept positions, int64 [KV heads, kept], ascending within a head; 0 <= index < n."""

    def identity(self) -> dict[str, Any]:
        """Kernel, pooling, head reduction and all further parameters, as the ``actions`` table records them."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]  # a dataclass
        columns = {"kernel": own.pop("kernel", None), "pooling": None, "head_reduction": self.head_reduction}
        return columns | {"parameters": {name: own[name] for name in own if name not in ("window", "sinks")}}


class ScoringSelector(Selector):
    """Sinks, window, and of the positions between them those with the highest scores; earlier positions win ties."""

    @abstractmethod
    def score(self, layer: PromptLayer) -> Tensor:
        """Floating-point scores [KV heads, n]; those of sinks and window are not looked at."""

    def keep(self, layer: PromptLayer, kept: int) -> Tensor:
        """See ``Selector.keep``."""
        heads, entries, _ = layer.key.shape
        positions = torch.arange(entries, device=layer.key.device)
        between = self.score(layer)[:, self.sinks : entries - self.window]
        ranked = torch.argsort(between, dim=-1, descending=True, stable=True)
        chosen = ranked[:, : kept - self.sinks - self.window].sort(-1).values + self.sinks
        first, last = (part.expand(heads, -1) for part in (positions[: self.sinks], positions[entries - self.window :]))
        return torch.cat([first, chosen, last], dim=-1)
