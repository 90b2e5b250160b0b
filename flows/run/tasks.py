"""Functions as tasks of the running Prefect flow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

from kvdrift.flows.estimate.parts import AnalysisPart, estimate_part
from kvdrift.stats.resampling.intervals import Estimates


def estimate_in_tasks(parts: Sequence[AnalysisPart]) -> Iterator[Estimates]:
    """Estimate the parts of an analysis as tasks of the running flow, all begun at once; yield them in order."""
    futures = as_task(estimate_part).map(parts)
    return (future.result() for future in futures)


def as_task(function: Callable[..., Any], **options: Any) -> Any:
    """Return a function as a task of the running flow.

    Prefect's cache is off, since it would skip the second derivation of a flow; the store knows what is done.
    """
    from prefect import task  # noqa: PLC0415 - once the orchestration has set Prefect's environment
    from prefect.cache_policies import NO_CACHE  # noqa: PLC0415

    name = function.__name__.removeprefix("_")
    return task(name=name, cache_policy=NO_CACHE, persist_result=False, **options)(function)


def as_stage(function: Callable[..., object], idle: str, **options: Any) -> Any:
    """Return a stage as a task, which ends in a state "Skipped" with the reason ``idle`` if the stage did nothing.

    The state is Prefect's Completed under another name: for everything that waits, the task has succeeded.
    """
    from prefect.states import Completed  # noqa: PLC0415

    @wraps(function)
    def stage(*given: Any) -> object:
        done = function(*given)
        return done or Completed(name="Skipped", message=idle)

    return as_task(stage, **options)
