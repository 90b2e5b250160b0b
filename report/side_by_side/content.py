"""What a comparison of several stores is made from: one entry for each study and model, and what two have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report.reading.content import PageContent
from report.reading.estimates import Estimate
from report.reading.source import ViewRow

_BUDGET = ("keep", "codec", "codec_parameters", "policy", "policy_parameters")

Identity = tuple[str | None, ...]


@dataclass(frozen=True)
class Entry:
    """One study and model of a store.

    Attributes:
        name: what it is called on the page; no other entry has the same.
        location: the store's folder or URL.
        content: what the study's own page is made from.
        documents: the documents of its split that have events, by name.
        identities: the hashes of what made each action's units: weights, tokenizer, selector, numerics.
        page: the study's own page; None where there is none.

    """

    name: str
    location: str
    content: PageContent
    documents: Mapping[str, ViewRow]
    identities: Mapping[str, Identity]
    page: Path | None = None

    @property
    def study(self) -> str:
        """The study's name."""
        return self.content.facts.study

    @property
    def model(self) -> str:
        """The model's id."""
        return self.content.facts.model

    def budget(self, action: str) -> tuple[Any, ...] | None:
        """What decides how much an action holds, whichever entries; None where nobody said."""
        (row,) = [row for row in self.content.facts.actions if row["action"] == action]
        return None if row["keep"] == "unknown" else tuple(row.get(name) for name in _BUDGET)


@dataclass(frozen=True)
class Difference:
    """The action of a later entry less that of an earlier one, by quantity.

    Attributes:
        first_action: the earlier entry's action.
        other_action: the later entry's action.
        same: whether weights, tokenizer, selector and numerics are known to be the same on both sides.
        estimates: the contrast by quantity, with its interval.

    """

    first_action: str
    other_action: str
    same: bool
    estimates: Mapping[str, Estimate]


@dataclass(frozen=True)
class Pairing:
    """Two entries, and what they have in common.

    Attributes:
        first: the earlier entry.
        other: the later entry.
        documents: how many documents are the same in both.
        by_name: whether documents are matched by name, stratum and cluster alone, since the models are unlike: no
            prompt has the same tokens then.
        obstacle: why nothing is subtracted; None where something is.
        differences: one for each two actions of one name, or that keep as much in as many bits.

    """

    first: Entry
    other: Entry
    documents: int
    by_name: bool
    obstacle: str | None
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Everything on the page of a comparison."""

    entries: tuple[Entry, ...]
    pairings: tuple[Pairing, ...]

    def record(self, pairing: Pairing, difference: Difference, estimate: Estimate) -> dict[str, Any]:
        """One line of the CSV file of differences."""
        return {
            "first": pairing.first.name, "first_action": difference.first_action, "other": pairing.other.name,
            "other_action": difference.other_action, "quantity": estimate.quantity, "estimate": estimate.estimate,
            "low": estimate.low, "high": estimate.high, "level": estimate.level, "draws": estimate.draws,
            "interval": estimate.interval, "documents": estimate.documents, "clusters": estimate.clusters,
            "matched_by_name": pairing.by_name, "same_identity": difference.same, "status": estimate.status,
        }  # fmt: skip
