"""Generation of documents' units: the story of a document, what it needs of a model, and the rows that it makes."""

from generator.generation.units import (
    PendingUnit,
    StoppedError,
    StudyLaw,
    Work,
    generate_documents,
    generate_together,
    generate_units,
    together,
)

__all__ = [
    "PendingUnit",
    "StoppedError",
    "StudyLaw",
    "Work",
    "generate_documents",
    "generate_together",
    "generate_units",
    "together",
]
