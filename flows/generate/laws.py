"""Work of several laws put together: all that the laws lack of a document is generated from one prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from generator.generation import PendingUnit, StudyLaw, Work
from schema.document import Document
from schema.study import Study


def of_all_laws(lacking: Sequence[tuple[Study, Work]]) -> Work:
    """Put together the work of studies of one file and model, which differ in their names and laws alone.

    Args:
        lacking: The studies, each with its work.

    Returns:
        Each document once, with the units that any study lacks of it; each unit says whose it is.
    """
    documents: dict[str, tuple[Document, list[PendingUnit]]] = {}
    for study, work in lacking:
        of = StudyLaw(study.name, study.law)
        for document, pending in work:
            _, together = documents.setdefault(document.doc, (document, []))
            together += [replace(unit, of=of) for unit in pending]
    return list(documents.values())
