"""The Prefect flow of a study: development -> plan -> evaluation -> derivation -> estimates -> report.

Tasks are coarse and wrap plain functions; each asks the store what is left to do, so a flow that was killed anywhere
goes on where it stopped. Import this module inside ``flows.orchestration.orchestration``.
"""

from __future__ import annotations

from pathlib import Path

from prefect import flow, task

from flows import stages
from schema.study import Study

_prepare = task(stages.prepare)
_develop = task(stages.develop)
_plan = task(stages.plan)
_evaluate = task(stages.evaluate)
_derive = task(stages.derive)
_check = task(stages.check)
_analyze = task(stages.analyze)
_report = task(stages.report)


@flow(name="kvdrift study", validate_parameters=False)
def study_flow(study: Study, location: str) -> Path:
    """Run a study to its report; returns the report's path."""
    _prepare(study, location)
    _develop(study, location)
    _derive(location)
    _plan(study, location)
    _evaluate(study, location)
    _derive(location)
    _check(study, location)
    _analyze(study, location)
    page: Path = _report(study, location)
    return page
