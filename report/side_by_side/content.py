"""The content of a comparison of stores: an entry for each study and model, and what each two entries share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Estimate, ViewRow

_BUDGET = ("keep", "codec", "codec_parameters", "policy", "policy_parameters")

Identity = tuple[str | None, ...]


@dataclass(frozen=True)
class Entry:
    """One study and model of a store."""

    name: str  # its name on the page, which no other entry has
    location: str  # the store's folder or URL
    content: PageContent  # the content of the study's own page
    documents: Mapping[str, ViewRow]  # the documents of the page's split that have events, by name
    # the hashes of what made each action's units: weights, tokenizer, selector, numerics
    identities: Mapping[str, Identity]
    page: Path | None = None  # the study's own page; None if there is none

    @property
    def study(self) -> str:
        """The study's name."""
        return self.content.facts.study

    @property
    def model(self) -> str:
        """The model's id."""
        return self.content.facts.model

    def budget(self, action: str) -> tuple[Any, ...] | None:
        """Return the settings that decide how many bytes an action keeps; None if they are unknown."""
        (row,) = [row for row in self.content.facts.actions if row["action"] == action]
        return None if row["keep"] == "unknown" else tuple(row.get(name) for name in _BUDGET)


@dataclass(frozen=True)
class Difference:
    """The difference of two actions by quantity: a later entry's action less an earlier entry's."""

    first_action: str
    other_action: str
    same: bool
    estimates: Mapping[str, Estimate]


@dataclass(frozen=True)
class Pairing:
    """Two entries, and what they have in common."""

    first: Entry  # the earlier entry
    other: Entry  # the later entry
    documents: int  # how many documents both entries have
    # whether documents are matched by name, stratum and cluster alone, since prompts have other tokens under another
    # model
    by_name: bool
    obstacle: str | None  # why nothing is subtracted; None if actions are subtracted
    differences: tuple[Difference, ...] = ()  # one for each two actions of the same name or of the same budget


@dataclass(frozen=True)
class Comparison:
    """The content of a comparison's page."""

    entries: tuple[Entry, ...]
    pairings: tuple[Pairing, ...]

    def record(self, pairing: Pairing, difference: Difference, estimate: Estimate) -> dict[str, Any]:
        """Return one line of the CSV file of differences."""
        return {
            "first": pairing.first.name, "first_action": difference.first_action, "other": pairing.other.name,
            "other_action": difference.other_action, "quantity": estimate.quantity, "estimate": estimate.estimate,
            "low": estimate.low, "high": estimate.high, "level": estimate.level, "draws": estimate.draws,
            "interval": estimate.interval, "documents": estimate.documents, "clusters": estimate.clusters,
            "matched_by_name": pairing.by_name, "same_identity": difference.same, "status": estimate.status,
        }  # fmt: skip
