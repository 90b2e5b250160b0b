"""The Prefect flow of a study: development -> plan -> evaluation -> derivation -> estimates -> report.

Tasks are coarse and wrap plain functions; each asks the store what is left to do, so a flow that was killed anywhere
goes on where it stopped. Import this module inside ``flows.orchestration.orchestration``.

The parts of an analysis are tasks of their own, ``ABREAST`` at once and in threads: numpy releases the interpreter's
lock where it multiplies and sorts, and processes would each need the moments and the libraries again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import ThreadPoolTaskRunner

from flows import stages
from flows.analysis.estimation import Part, estimate_part
from schema.study import Study
from stats.intervals import Estimates

ABREAST = max(2, min(os.cpu_count() or 2, 4))  # not more, for memory: a part's draws take up to 400 MB

_prepare = task(stages.prepare)
_develop = task(stages.develop)
_plan = task(stages.plan)
_evaluate = task(stages.evaluate)
_derive = task(stages.derive)
_check = task(stages.check)
_estimate = task(cache_policy=NO_CACHE)(estimate_part)
_report = task(stages.report)


def estimate_in_tasks(parts: Sequence[Part]) -> list[Estimates]:
    """Estimate the parts of an analysis as tasks of the running flow, in their order."""
    return list(_estimate.map(parts).result())


@task(name="analyze", cache_policy=NO_CACHE)
def _analyze(study: Study, location: str) -> int:
    return stages.analyze(study, location, estimate_in_tasks)


_RUNNER: Any = ThreadPoolTaskRunner(max_workers=ABREAST)  # Any: its type is not the one that flows declare


@flow(name="kvdrift study", validate_parameters=False, task_runner=_RUNNER)
def study_flow(studies: list[Study], location: str) -> list[Path]:
    """Run the studies of one file, one to a model, to their reports; returns the reports' paths.

    Estimates and reports record the version of all events, so none is made before every model's events are there.
    """
    for study in studies:
        _prepare(study, location)
        _develop(study, location)
        _derive(location)
        _plan(study, location)
        _evaluate(study, location)
        _derive(location)
        _check(study, location)
    for study in studies:
        _analyze(study, location)
    pages: list[Path] = [_report(study, location) for study in studies]
    return pages
