"""Estimates that stay valid: those of an earlier events version, made from the same moments in the same way.

Events of another study, model, split or action change the log's version, but not these moments. The estimates are then
copied to the new version, bit for bit, without a new bootstrap. If answers are corrected, estimates that do not depend
on answers are likewise copied to the new revision of the documents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import resources
from importlib.metadata import version
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.log.store import Store
from kvdrift.schema.python_source import syntax_sha256


def inputs_sha256(*inputs: Any) -> str:
    """Compute the SHA-256 of all inputs of estimates: data, code of ``stats``, versions of numpy and scipy.

    The code counts without comments, docstrings and formatting.
    Inputs are dataclasses, mappings, sequences, arrays and plain values; arrays count with every bit.
    """
    digest = hashlib.sha256(_code_sha256().encode())
    for one in inputs:
        _add(digest, one)
    return digest.hexdigest()


def standing_rows(store: Store, table: str, wanted: Iterable[str], cited: Mapping[str, int]) -> pa.Table:
    """Return the newest rows of ``results`` or ``calibration`` for each wanted SHA-256 of inputs, at any version.

    The rows cite the events version and the documents' revision in ``cited``, by column. Inputs without rows have none.
    """
    stored = store.read(table)
    rows = stored.filter(pc.is_in(stored["inputs_sha256"], value_set=pa.array(list(wanted), pa.string())))
    for name, present in cited.items():
        newest = rows.group_by("inputs_sha256").aggregate([(name, "max")])
        found = pc.index_in(rows["inputs_sha256"], value_set=newest["inputs_sha256"])
        rows = rows.filter(pc.equal(rows[name], newest[f"{name}_max"].take(found)))
        at, field = stored.schema.get_field_index(name), stored.schema.field(name)
        rows = rows.set_column(at, field, pa.repeat(pa.scalar(present, field.type), rows.num_rows))
    return rows


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
    stats = resources.files("kvdrift.stats")
    folders = [stats, *(one for one in stats.iterdir() if one.is_dir())]
    files = [(f"{folder.name}/{file.name}", file) for folder in folders for file in folder.iterdir()]
    texts = {name: file.read_bytes() for name, file in files if name.endswith(".py")}
    versions = " ".join(f"{name} {version(name)}" for name in ("numpy", "scipy"))
    digest = hashlib.sha256(versions.encode())
    for name in sorted(texts):
        digest.update(f"{name} {syntax_sha256(texts[name])}\n".encode())
    return digest.hexdigest()
