"""The documents that a study holds already: its strata take them before any others, whatever order their source has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeldDocument:
    """A document that a study holds.

    Attributes:
        doc: The document's id.
        split: The split that it stays in.
        stratum: Its stratum.
        task: Its task.
        place: Its place among the frozen documents of its split and stratum, from 0; None if no plan has frozen it, so
            that it comes after these, in the source's order.
    """

    doc: str
    split: str
    stratum: str
    task: str | None
    place: int | None = None


@dataclass(frozen=True)
class HeldDocuments:
    """All documents that a study holds; none of a study that is new."""

    documents: tuple[HeldDocument, ...] = ()

    def of(self, stratum: str) -> dict[str, HeldDocument]:
        """Return a stratum's documents by their ids."""
        return {one.doc: one for one in self.documents if one.stratum == stratum}

    def elsewhere(self, stratum: str) -> frozenset[str]:
        """Return the ids of the documents of all other strata."""
        return frozenset(one.doc for one in self.documents if one.stratum != stratum)


NOTHING_HELD = HeldDocuments()
