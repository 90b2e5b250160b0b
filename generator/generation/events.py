"""Make rows of ``events`` and columns of ``units`` from decoded steps."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from kvdrift.generator.coupling.residual_branching import ResidualBranches
from kvdrift.generator.coupling.rollout import CoupledSteps
from kvdrift.schema.errors import OperationError
from kvdrift.schema.study import ModelSection
from kvdrift.schema.tables import BRANCH, COUPLED, EVENTS, SCAN

Decoded = TypeVar("Decoded", CoupledSteps, ResidualBranches)

_STEP_COLUMNS = ("x_token", "y_token", "delta", "f", "x_eos", "y_eos")


@cache
def library_versions() -> Mapping[str, str]:
    """Return the versions of Python and of the libraries that affect numbers."""
    return {"python": platform.python_version()} | {name: version(name) for name in ("torch", "transformers", "numpy")}


def versions_on(device: str) -> dict[str, str]:
    """Return the versions of the libraries that compute on a device, and for CUDA the GPU's name and torch's CUDA.

    With a device map, the device is the first one, whose GPU alone is named.
    """
    versions = dict(library_versions())
    if torch.device(device).type == "cuda":
        versions |= {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    return versions


def gpu_here(model: ModelSection) -> str | None:
    """Return the name of the GPU that a study's model computes on here, with a device map the first; None of a CPU."""
    device = "cuda" if model.device_map is not None else model.device
    there = torch.device(device).type == "cuda" and torch.cuda.is_available()
    return versions_on(device)["gpu"] if there else None


def join_replicates(parts: Sequence[Decoded]) -> Decoded:
    """Join the results of consecutive replicates of one action: concatenate arrays and add counts."""
    return parts[0] if len(parts) == 1 else type(parts[0])(**_join([vars(part) for part in parts]))


def event_rows(record: Mapping[str, Any], decoded: CoupledSteps | ResidualBranches) -> pa.Table:
    """Make the rows of ``events`` of one unit, from its row of ``units`` and what was decoded for its replicates.

    Rows are by replicate and position; of residual branching, a replicate's scan before its branch.
    """
    if isinstance(decoded, CoupledSteps):
        steps = {name: getattr(decoded, name) for name in _STEP_COLUMNS}  # [replicates, H] each
        return _rows(record, COUPLED, np.ones(decoded.x_token.shape, dtype=np.bool_), steps, None)
    position = np.arange(1, decoded.token.shape[1] + 1)  # [H]
    branch = decoded.branch[:, None]  # [replicates, 1]
    scan: dict[str, NDArray[Any]] = {
        **dict.fromkeys(("x_token", "y_token"), decoded.token),
        **dict.fromkeys(("delta", "f"), decoded.deficit),
        **dict.fromkeys(("x_eos", "y_eos"), decoded.ended),
    }
    table = pa.concat_tables([
        _rows(record, SCAN, position <= decoded.scanned[:, None], scan, decoded.weight),
        _rows(record, BRANCH, (branch > 0) & (position >= branch), decoded.steps, None),
    ])  # fmt: skip
    return table.sort_by([("replicate", "ascending"), ("kind", "descending"), ("t", "ascending")])


def _rows(
    record: Mapping[str, Any],
    kind: str,
    chosen: NDArray[np.bool_],
    steps: Mapping[str, NDArray[Any]],
    weight: NDArray[np.float64] | None,
) -> pa.Table:
    """Return the rows of one kind at the ``chosen`` positions [replicates, H]."""
    replicate, column = chosen.nonzero()
    for name in ("delta", "f"):
        lost = ~np.isfinite(steps[name][chosen])
        if lost.any():
            raise OperationError(
                f"document '{record['doc']}', action '{record['action']}': {name} is no number at position "
                f"{column[lost.argmax()] + 1}: the model's logits are not finite; its weights are damaged, or "
                f"{record['dtype']} cannot hold what it computes"
            )
    rows = len(replicate)
    columns: dict[str, Any] = {name: pa.repeat(record[name], rows) for name in ("study", "model", "doc", "action")}
    columns["replicate"] = (replicate + record["first_replicate"]).astype(np.int32)
    columns["t"] = (column + 1).astype(np.int32)
    columns["kind"] = pa.repeat(kind, rows)
    for name in _STEP_COLUMNS:
        columns[name] = pa.array(steps[name][chosen]).cast(EVENTS.schema.field(name).type)
    columns["action_revision"] = pa.repeat(pa.scalar(record["action_revision"], pa.int32()), rows)
    columns["unit"] = pa.nulls(rows, pa.int64())  # which the store fills in
    columns["weight"] = pa.nulls(rows, pa.float64()) if weight is None else weight[chosen]
    return pa.table({name: columns[name] for name in EVENTS.columns}, schema=EVENTS.schema)


def _join(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for name, value in parts[0].items():
        values = [part[name] for part in parts]
        if isinstance(value, dict):
            joined[name] = _join(values)
        else:
            joined[name] = np.concatenate(values) if isinstance(value, np.ndarray) else sum(values)
    return joined
