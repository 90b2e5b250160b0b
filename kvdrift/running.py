"""Running a study file: does nothing where nothing is left, otherwise starts the flow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from schema.study import Study


@dataclass(frozen=True)
class StudyRun:
    """What a run came to: the report, the store, and whether anything was left to do."""

    report: Path
    location: str
    did_something: bool


def default_location(study: Study) -> str:
    """``stores/NAME`` in the working folder."""
    return str(Path("stores") / study.name)


def run_study(study: Study, store: str | Path | None = None) -> StudyRun:
    """Run a study to its report, or find it finished."""
    location = str(store) if store is not None else default_location(study)
    if "://" not in location:
        location = str(Path(location).absolute())

    from flows import stages

    stages.check_before_writing(study)
    if stages.is_finished(study, location):
        from schema.store import Store

        page = stages.report_folder(Store.open(location), study.name) / "index.html"
        return StudyRun(page, location, did_something=False)

    from flows.orchestration import orchestration

    stages.prepare(study, location)  # an unwritable store is said before the orchestration starts
    home = Path.home() / ".prefect" if "://" in location else Path(location) / ".prefect"
    with orchestration(home):
        from flows.study_flow import study_flow

        page = study_flow(study, location)
    return StudyRun(page, location, did_something=True)
