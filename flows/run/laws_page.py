"""The page that has the laws of one study file side by side: where it goes, whether it is current, and writing it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flows.pages.reports import laws_report_folder, present_inputs, record_inputs, report_is_current
from flows.run.study_run import StudyRun


def laws_folder(runs: Sequence[StudyRun]) -> Path:
    """Return where the page goes that has the laws of one model side by side: beside those of its studies."""
    study = runs[0].study
    return laws_report_folder(runs[0].store, study.name_in_file, study.model.id if study.several_models else None)


def laws_are_compared(runs: Sequence[StudyRun]) -> bool:
    """Whether there is such a page of the present tables."""
    return report_is_current(runs[0].store, laws_folder(runs))


def compare_laws(runs: Sequence[StudyRun]) -> bool:
    """Write the page that has the laws of one model side by side, unless it is there; return whether it was written."""
    if laws_are_compared(runs):
        return False
    from flows.pages.side_by_side.pages import write_comparison  # noqa: PLC0415 - a page that is there needs nothing of it

    store, folder = runs[0].store, laws_folder(runs)
    inputs = present_inputs(store)
    names = [run.study.name for run in runs]
    write_comparison([store.location], folder, names, runs[0].progress, model=runs[0].study.model.id)
    record_inputs(folder, inputs, {})
    return True
