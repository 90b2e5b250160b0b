"""Running a study file: does nothing where nothing is left, otherwise starts the flow."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from schema.location import absolute, is_local
from schema.study import Study

if TYPE_CHECKING:
    from generator.service.client import ServiceAddress


@dataclass(frozen=True)
class StudyRun:
    """What a run came to: the report of each model, the store, and whether anything was left to do."""

    reports: list[Path]
    location: str
    did_something: bool


def default_location(study: Study) -> str:
    """``stores/NAME`` in the working folder."""
    return str(Path("stores") / study.name)


def run_studies(
    studies: list[Study], store: str | Path | None = None, endpoints: Sequence[ServiceAddress] = ()
) -> StudyRun:
    """Run the studies of one file, one to a model, to their reports, or find them finished.

    The ``endpoints`` generate the events, or, without any, this process.
    """
    location = absolute(store if store is not None else default_location(studies[0]))

    from flows import stages

    for study in studies:
        stages.check_before_writing(study, served=bool(endpoints))
    if all(stages.is_finished(study, location) for study in studies):
        from schema.store.store import Store

        opened = Store.open(location)
        pages = [stages.report_folder_of(study, opened) / "index.html" for study in studies]
        return StudyRun(pages, location, did_something=False)

    from flows.generation import generating_by
    from flows.orchestration import orchestration

    if endpoints:
        from generator.service.dispatch import EndpointPool
        from schema.progress import progress

        pool = EndpointPool(endpoints, studies, progress().say)
        pool.check()
    for study in studies:
        stages.prepare(study, location)  # an unwritable store is said before the orchestration starts
    home = (Path(location) if is_local(location) else Path.home()) / ".prefect"
    with orchestration(home), generating_by(pool.generate) if endpoints else nullcontext():
        from flows.study_flow import study_flow

        return StudyRun(study_flow(studies, location), location, did_something=True)
