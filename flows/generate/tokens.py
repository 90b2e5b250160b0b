"""The texts of a study's tokens: rows of ``tokens`` for the whole vocabulary, written once, for later units too.

Only the model's tokenizer is needed.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.generator.transformer.files.tokenizer import token_texts
from kvdrift.log.store import Store
from kvdrift.schema.progress import SILENT, Progress
from kvdrift.schema.study import FINITE_STATE
from kvdrift.schema.tables import TOKENS


def record_tokens(
    store: Store,
    study: str,
    model: str,
    *,
    revision: str | None = None,
    location: str | None = None,
    progress: Progress = SILENT,
) -> int:
    """Record the text of each token of a study's model, unless the store has them; return how many are new.

    If the model's tokenizer cannot be loaded, nothing is recorded, and one line says so. Finite-state systems have no
    token texts. ``revision`` and ``location`` are those of the study file, as in ``score_stored``.
    """
    known = store.read("tokens", columns=["study", "model"])
    if pc.any(_of(known, study, model)).as_py():
        return 0
    documents = store.read("documents", columns=["study", "model", "source"])
    if FINITE_STATE in documents.filter(_of(documents, study, model))["source"].to_pylist():
        return 0
    texts = token_texts(model if location is None else location, revision=revision)
    if texts is None:
        progress.say(f"table tokens has no texts: the tokenizer of '{model}' cannot be loaded here")
        return 0
    names = {"study": [study] * len(texts), "model": [model] * len(texts)}
    columns = names | {"token": [*texts], "text": [*texts.values()]}
    return store.append_rows("tokens", pa.table(columns, schema=TOKENS.schema))


def _of(rows: pa.Table, study: str, model: str) -> pa.ChunkedArray:
    return pc.and_(pc.equal(rows["study"], study), pc.equal(rows["model"], model))
