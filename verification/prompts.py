"""Check stored prompts against the hashes of their documents, one file at a time, since prompts may be long."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from log.checked_files import CheckedFiles
from schema.tables import PROMPTS
from verification.files import read_files, row_name, whole_rows
from verification.findings import Fault, Verified, number_of

if TYPE_CHECKING:
    from log.store import Store

_DOCUMENT = ("study", "model", "doc")


def check_prompts(store: Store, version: int, memory: CheckedFiles, documents: pa.Table) -> Verified:
    """Check that all files are whole, no key occurs twice, and tokens have the SHA-256 of their document.

    Args:
        store: The store.
        version: The version of ``prompts``.
        memory: The memory of checked files.
        documents: All readable rows of ``documents``.

    """
    files = read_files(store, "prompts", version, memory)
    columns = (documents[name].to_pylist() for name in (*_DOCUMENT, "prompt_sha256"))
    expected = {tuple(of): sha256 for *of, sha256 in zip(*columns, strict=True) if sha256 is not None}
    keys, faults = Counter[tuple[Any, ...]](), [*files.faults]
    for path in store.paths("prompts", version):
        rows = None if path in files.damaged else whole_rows(store, "prompts", path)
        for row in () if rows is None else rows.select([*PROMPTS.key, "tokens"]).to_pylist():
            key = {name: row[name] for name in PROMPTS.key}
            keys[tuple(key.values())] += 1
            wanted = expected.get(tuple(row[name] for name in _DOCUMENT))
            if row["tokens"] is None or wanted is None:
                continue
            sha256 = hashlib.sha256(np.array(row["tokens"], dtype="<i4").tobytes()).hexdigest()
            if sha256 != wanted:
                what = f"tokens have SHA-256 {sha256}, must have {wanted} as prompt_sha256 of the document says"
                faults.append(Fault(row_name("prompts", key), what))
    for values, count in keys.items():
        if count > 1:
            name = row_name("prompts", dict(zip(PROMPTS.key, values, strict=True)))
            faults.append(Fault(name, f"{count} rows have this key, must be 1"))
    said = f"{number_of(files.read, 'file')}, {number_of(keys.total(), 'row')}"
    return Verified("prompts", said, "whole, unique and of their documents", tuple(faults))
