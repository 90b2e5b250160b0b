"""Check an action on the embedded model: its events must not depend on the other actions of a run."""

from __future__ import annotations

from typing import Any

from generator.actions import Action
from generator.checks.check import require
from generator.embedded.documents import make_document
from generator.generation import PendingUnit, generate_units
from generator.transformer.files.local_folders import EMBEDDED_ID
from generator.transformer.loading import load_model
from log.store import Unit
from schema.document import Document


def embedded_document() -> Document:
    """Return the document on which actions are tried."""
    return make_document("needle", 384, 0, 7)


def same_events(own: Action, beside: Action, document: Document) -> str:
    """Generate an action alone, beside another action, and replicate by replicate; return a line about the result."""
    model = load_model(EMBEDDED_ID)

    def events(*pending: PendingUnit) -> list[dict[str, Any]]:
        units: list[Unit] = generate_units(model, "study", document, list(pending), 8, 7)
        return [row for unit in units for row in unit.events.to_pylist() if row["action"] == own.name]

    alone = events(PendingUnit(own, 0, 2))
    parts = events(PendingUnit(beside, 0, 2), PendingUnit(own, 0, 1)) + events(PendingUnit(own, 1, 1))
    require(alone == parts, "the events are others beside another action, or replicate by replicate")
    apart = sum(row["x_token"] != row["y_token"] for row in alone)
    return f"the same events alone, beside another action and in parts; {apart} of {len(alone)} tokens differ from X"
