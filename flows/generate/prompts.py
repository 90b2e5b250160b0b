"""The prompts of a study's documents as rows of its store, with the positions of their answers."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

from kvdrift.flows.material import Material
from kvdrift.generator.documents.records import find_records
from kvdrift.generator.transformer.files.local_folders import tokenizer_location
from kvdrift.generator.transformer.files.tokenizer import token_reader
from kvdrift.log.store import Store
from kvdrift.schema.document import SPLITS, Document


def record_prompts(store: Store, material: Material) -> int:
    """Write the prompts of documents that the store has rows of, but no prompt yet; return how many are new."""
    study, model = material.study.name, material.model_id
    revisions = store.documents(study, model, ["doc", "document_revision"])
    revision_of = dict(zip(*(revisions[name].to_pylist() for name in ("doc", "document_revision")), strict=True))
    known = store.prompts_of(study, model)
    missing = [
        document
        for split in SPLITS
        for document in material.of_split(split)
        if (document.doc, revision_of[document.doc]) not in known
    ]
    if not missing:
        return 0
    location = tokenizer_location(material.study.model)
    read = token_reader(location, revision=material.study.model.revision)
    text = None if read is None else functools.cache(read)
    names = {"study": study, "model": model, "action": None, "action_revision": 0, "step": 0}
    rows = []
    for document in missing:
        records = None
        if text is not None:
            places = find_records([text(token) for token in document.tokens], document.answers, document.scoring)
            records = [asdict(place) for place in places]
        rows.append(_row(document, records) | names | {"document_revision": revision_of[document.doc]})
    return store.append_prompts(rows)


def _row(document: Document, records: list[dict[str, int]] | None) -> dict[str, Any]:
    tokens, turns = list(document.tokens), [asdict(turn) for turn in document.turns] or None
    return {
        "doc": document.doc, "tokens": tokens, "records": records, "layers": None, "pairs": None, "kept": None,
        "turns": turns,
    }  # fmt: skip
