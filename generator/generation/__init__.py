"""Generate documents' units: the steps for a document, the interface of a model, and the rows of units."""

from kvdrift.generator.generation.units import (
    PendingUnit,
    StoppedError,
    StudySampling,
    Work,
    generate_documents,
    generate_together,
    generate_units,
    together,
)

__all__ = [
    "PendingUnit",
    "StoppedError",
    "StudySampling",
    "Work",
    "generate_documents",
    "generate_together",
    "generate_units",
    "together",
]
