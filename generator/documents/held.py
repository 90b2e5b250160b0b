"""The documents that a study already has; its strata take these first, whatever the order of their source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeldDocument:
    """A document that a study already has, with its split, which does not change.

    ``place`` is its place among the frozen documents of its split and stratum, from 0. None if no plan has frozen it;
    it then comes after the frozen documents, in the source's order.
    """

    doc: str
    split: str
    stratum: str
    task: str | None
    place: int | None = None


@dataclass(frozen=True)
class HeldDocuments:
    """All documents that a study already has; empty for a new study."""

    documents: tuple[HeldDocument, ...] = ()

    def of(self, stratum: str) -> dict[str, HeldDocument]:
        """Return a stratum's documents by their ids."""
        return {one.doc: one for one in self.documents if one.stratum == stratum}

    def elsewhere(self, stratum: str) -> frozenset[str]:
        """Return the ids of the documents of all other strata."""
        return frozenset(one.doc for one in self.documents if one.stratum != stratum)


NOTHING_HELD = HeldDocuments()
