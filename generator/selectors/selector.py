"""The interface of selectors, and the base of those that keep the highest scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvdrift.generator.attention.recording import PromptLayer, Statistic
from kvdrift.schema.errors import OperationError


class Selector(ABC):
    """Chooses which m of a layer's n prompt entries each KV head keeps.

    Subclasses are frozen dataclasses. Their fields, which all have defaults, are the parameters that a study can set;
    they are part of an action's identity.
    """

    summary: ClassVar[str]  # one line for ``kvdrift list selectors``
    paper: ClassVar[str | None] = None  # authors, year and arXiv number
    head_reduction: ClassVar[str | None] = None  # how scores of a KV head's query heads are combined, if they are
    applies_softcap: ClassVar[bool] = False  # whether its own products of queries and keys are capped as the model's

    @property
    def window(self) -> int:
        """How many last prompt positions are always kept; ``PromptLayer`` has at least their queries."""
        return 0

    @property
    def sinks(self) -> int:
        """How many first prompt positions are always kept."""
        return 0

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The statistics to gather over all queries of the prompt; ``PromptLayer.gathered`` returns them."""
        return ()

    def working_bytes(self, heads: int, entries: int, item_bytes: int) -> int:  # noqa: ARG002 - others need them
        """Return how many bytes of memory it takes to choose a layer's entries; 0 if the number is negligible.

        A prompt for which this is more than the free memory is refused.

        The layer has ``heads`` query heads and n = ``entries`` entries, each of whose numbers has ``item_bytes`` bytes.
        """
        return 0

    def budgets(self, kept: int, entries: int, layers: int) -> Sequence[int]:  # noqa: ARG002 - others need the length
        """Return m of each of ``layers`` layers, layer 0 first; the mean is exactly ``kept``, the action's m."""
        return [kept] * layers

    @abstractmethod
    def keep(self, layer: PromptLayer, kept: int) -> Tensor:
        """Choose the kept positions of one layer: in 0..n-1, int64 [KV heads, kept], ascending within a head."""

    def identity(self) -> dict[str, Any]:
        """Columns of the ``actions`` table: kernel, pooling, head reduction, and parameters except window and sinks."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]  # a dataclass
        columns = {"kernel": own.pop("kernel", None), "pooling": None, "head_reduction": self.head_reduction}
        return columns | {"parameters": {name: own[name] for name in own if name not in ("window", "sinks")}}


def check_finite(selector: Selector, scores: Tensor, layer: PromptLayer) -> None:
    """Refuse scores that are not finite, such as sums or exponentials that overflowed."""
    if not bool(scores.isfinite().all()):
        raise OperationError(f"selector {type(selector).__name__}: a score in layer {layer.number} is not finite")


class ScoringSelector(Selector):
    """Keeps sinks, window, and the positions between them with the highest scores, of equal scores the earlier one."""

    @abstractmethod
    def score(self, layer: PromptLayer) -> Tensor:
        """Scores, floating-point [KV heads, n]; scores of sinks and window are ignored."""

    def keep(self, layer: PromptLayer, kept: int) -> Tensor:
        """Return the kept positions, int64 [KV heads, kept], ascending in a head: sinks, highest scores, and window.

        Raises:
            OperationError: ``score`` returns another shape than [KV heads, n], or numbers that are not finite between
                sinks and window.
        """
        heads, entries, _ = layer.key.shape
        positions = torch.arange(entries, device=layer.key.device)
        scores = self.score(layer)
        if scores.shape != (heads, entries):
            raise OperationError(
                f"selector {type(self).__name__}: scores of shape {list(scores.shape)}; {heads} KV heads and {entries} "
                f"prompt entries need [{heads}, {entries}]"
            )
        between = scores[:, self.sinks : entries - self.window]
        check_finite(self, between, layer)
        ranked = torch.argsort(between, dim=-1, descending=True, stable=True)
        chosen = ranked[:, : kept - self.sinks - self.window].sort(-1).values + self.sinks
        first, last = (part.expand(heads, -1) for part in (positions[: self.sinks], positions[entries - self.window :]))
        return torch.cat([first, chosen, last], dim=-1)
