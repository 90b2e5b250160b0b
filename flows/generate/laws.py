"""The work of several laws merged: all units of a document that any law lacks are generated from one prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvdrift.generator.generation import PendingUnit, StudyLaw, Work
from kvdrift.schema.document import Document
from kvdrift.schema.study import Study


def of_all_laws(lacking: Sequence[tuple[Study, Work]]) -> Work:
    """Merge the work of studies of one file and model, which differ only in names and laws.

    Each document comes once, with all units that some study lacks; each unit names its study.
    """
    documents: dict[str, tuple[Document, list[PendingUnit]]] = {}
    for study, work in lacking:
        of = StudyLaw(study.name, study.law)
        for document, pending in work:
            _, together = documents.setdefault(document.doc, (document, []))
            together += [replace(unit, of=of) for unit in pending]
    return list(documents.values())
