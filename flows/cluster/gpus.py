"""Which workers of a cluster have a GPU: those that declare Dask's resource ``GPU`` when they are started.

Only they get work of a model that computes on a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from kvdrift.schema.study import ModelSection

ONE_GPU: Final = {"GPU": 1.0}
"""The resource of a worker that has a GPU of its own."""


def resources_of(models: Iterable[ModelSection]) -> dict[str, float]:
    """Return the resources that a worker must declare for some models."""
    return ONE_GPU if any(model.device != "cpu" or model.device_map is not None for model in models) else {}


def having(workers: Mapping[str, Any], resources: Mapping[str, float]) -> list[str]:
    """Return the addresses of the workers that declare some resources, of all workers as Dask describes them."""
    return [
        address
        for address, worker in workers.items()
        if all(worker["resources"].get(name, 0) >= value for name, value in resources.items())
    ]


def who_has_which(found: Sequence[tuple[str, str | None]], others: int) -> str:
    """Return a line about the GPUs of workers, found by the workers' names, and of how many others declare none."""
    machines = defaultdict[str, list[str]](list)
    for name, gpu in found:
        machines[gpu or "no GPU that torch finds"].append(name.rpartition(" on ")[2])
    said = [
        f"{gpu}: {len(of)} worker{'s' if len(of) > 1 else ''} on {', '.join(sorted(set(of)))}"
        for gpu, of in sorted(machines.items())
    ]
    if others:
        said.append(f"workers that declare no GPU, and get no documents: {others}")
    return "; ".join(said)
