"""Estimates that stand: those of an earlier events version that were made from the same moments in the same way.

Events of another study, model or split change the version of the log, and not the moments of this one. Its estimates
are then repeated for the new version, bit for bit, without a new bootstrap.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import resources
from importlib.metadata import version
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schema.store.store import Store


def inputs_sha256(*inputs: Any) -> str:
    """Compute the SHA-256 of what decides estimates: the inputs, the code of ``stats``, numpy's and scipy's versions.

    Args:
        inputs: dataclasses, mappings, sequences, arrays and plain values; arrays count with every bit.

    """
    digest = hashlib.sha256(_code_sha256().encode())
    for one in inputs:
        _add(digest, one)
    return digest.hexdigest()


def standing_rows(store: Store, sha256: str, events_version: int) -> pa.Table | None:
    """Return the ``results`` rows that were made from these inputs, for another events version.

    Returns:
        The rows of the newest version that has them, citing ``events_version``; None where there are none.

    """
    results = store.read("results")
    same = results.filter(pc.equal(results["inputs_sha256"], sha256))
    if not same.num_rows:
        return None
    newest = same.filter(pc.equal(same["events_version"], pc.max(same["events_version"])))
    cited = pa.repeat(pa.scalar(events_version, pa.int64()), newest.num_rows)
    at = results.schema.get_field_index("events_version")
    return newest.set_column(at, results.schema.field("events_version"), cited)


def _add(digest: Any, value: Any) -> None:
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        value = [part for name in sorted(value, key=repr) for part in (name, value[name])]
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype.str}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)} values".encode())
        for part in value:
            _add(digest, part)
    else:
        digest.update(f"{value!r};".encode())


@cache
def _code_sha256() -> str:
    texts = {file.name: file.read_bytes() for file in resources.files("stats").iterdir() if file.name.endswith(".py")}
    versions = " ".join(f"{name} {version(name)}" for name in ("numpy", "scipy"))
    digest = hashlib.sha256(versions.encode())
    for name in sorted(texts):
        digest.update(name.encode() + texts[name])
    return digest.hexdigest()
