"""The interface of selectors, and the base of those that keep the highest scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvdrift.generator.attention.recording import PromptLayer, Statistic
from kvdrift.schema.errors import OperationError

EVEN, ADAKV = "even", "adakv"
BUDGETS = (EVEN, ADAKV)
"""The ways in which the heads of a layer share its budget: equally, or by their scores."""
_SAFEGUARD = Fraction(1, 5)  # the share of m that every head keeps under AdaKV


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

    def least_of_head(self, kept: int) -> int:
        """Return the fewest entries that a KV head keeps in a layer of budget m = ``kept``; m if all heads keep m."""
        return kept

    @abstractmethod
    def keep(self, layer: PromptLayer, kept: int) -> Tensor:
        """Choose the kept positions of one layer: in 0..n-1, int64 [KV heads, kept], ascending within a head.

        If heads keep different numbers, ``kept`` on average, the result is [KV heads, most]: the rows of heads that
        keep fewer positions end with n.
        """

    def identity(self) -> dict[str, Any]:
        """Columns of the ``actions`` table: kernel, pooling, head reduction, and parameters except window and sinks."""
        own = parameters_of(self)
        columns = {"kernel": own.pop("kernel", None), "pooling": None, "head_reduction": self.head_reduction}
        return columns | {"parameters": {name: own[name] for name in own if name not in ("window", "sinks")}}


def parameters_of(selector: Selector) -> dict[str, Any]:
    """Return a selector's parameters by name, defaults included; an even budget of heads is left out."""
    named = {field.name: getattr(selector, field.name) for field in fields(selector)}  # type: ignore[arg-type]  # a dataclass
    if isinstance(selector, ScoringSelector) and selector.budget == EVEN:
        del named["budget"]
    return named


def check_finite(selector: Selector, scores: Tensor, layer: PromptLayer) -> None:
    """Refuse scores that are not finite, such as sums or exponentials that overflowed."""
    if not bool(scores.isfinite().all()):
        raise OperationError(f"selector {type(selector).__name__}: a score in layer {layer.number} is not finite")


@dataclass(frozen=True)
class ScoringSelector(Selector):
    """Keeps sinks, window, and the positions between them with the highest scores, of equal scores the earlier one.

    With ``budget = "adakv"`` the heads of a layer share its m x heads entries by their scores (Feng et al. 2024,
    arXiv:2407.11550): every head keeps sinks, window and its best positions, m / 5 in all, rounded down. The other
    entries go to the highest scores over all heads, of equal scores to the lower head, then to the earlier position.
    """

    choices: ClassVar[Mapping[str, tuple[int | str, ...]]] = {"budget": BUDGETS}
    budget: str = field(default=EVEN, kw_only=True)

    @abstractmethod
    def score(self, layer: PromptLayer) -> Tensor:
        """Scores, floating-point [KV heads, n]; scores of sinks and window are ignored."""

    def always_kept(self, kept: int) -> tuple[int, int]:  # noqa: ARG002 - others need m
        """Return how many first and how many last positions every head keeps at m = ``kept``, whatever the scores."""
        return self.sinks, self.window

    def least_of_head(self, kept: int) -> int:
        """Return the fewest entries that a KV head keeps: m, or with AdaKV a fifth of it, or sinks and window."""
        return kept if self.budget == EVEN else max(int(_SAFEGUARD * kept), sum(self.always_kept(kept)))

    def keep(self, layer: PromptLayer, kept: int) -> Tensor:
        """Return the kept positions, int64 [KV heads, kept], ascending in a head: sinks, highest scores, and window.

        With AdaKV the result is [KV heads, most], and the rows of heads that keep fewer positions end with n.

        Raises:
            OperationError: ``score`` returns another shape than [KV heads, n], or numbers that are not finite between
                sinks and window.
        """
        heads, entries, _ = layer.key.shape
        positions = torch.arange(entries, device=layer.key.device)
        sinks, window = self.always_kept(kept)
        scores = self.score(layer)
        if scores.shape != (heads, entries):
            raise OperationError(
                f"selector {type(self).__name__}: scores of shape {list(scores.shape)}; {heads} KV heads and {entries} "
                f"prompt entries need [{heads}, {entries}]"
            )
        between = scores[:, sinks : entries - window]
        check_finite(self, between, layer)
        ranked = torch.argsort(between, dim=-1, descending=True, stable=True)
        if self.budget == ADAKV:
            safe = ranked[:, : self.least_of_head(kept) - sinks - window]
            return _ragged(between, safe, heads * (kept - sinks - window), sinks, window)
        chosen = ranked[:, : kept - sinks - window].sort(-1).values + sinks
        first, last = (part.expand(heads, -1) for part in (positions[:sinks], positions[entries - window :]))
        return torch.cat([first, chosen, last], dim=-1)


def _ragged(scores: Tensor, safe: Tensor, count: int, sinks: int, window: int) -> Tensor:
    """Choose ``count`` positions over all heads: those in ``safe``, and those with the highest of the other scores.

    ``scores`` [KV heads, positions] are those between ``sinks`` first and ``window`` last positions, which every head
    keeps, too. ``safe``, int64 [KV heads, some], has places among them. The result is that of ``Selector.keep``.
    """
    chosen = scores.new_zeros(scores.shape, dtype=torch.bool).scatter_(1, safe, value=True)
    others = scores.masked_fill(chosen, -torch.inf).flatten()  # in the order of heads, then of positions
    ranked = torch.argsort(others, descending=True, stable=True)
    chosen.view(-1)[ranked[: count - safe.numel()]] = True
    kept = torch.nn.functional.pad(chosen, (sinks, window), value=True)
    heads, entries = kept.shape
    positions = torch.arange(entries, device=kept.device).expand(heads, -1)
    most = int(kept.sum(-1).amax())
    return positions.masked_fill(~kept, entries).sort(-1).values[:, :most]
