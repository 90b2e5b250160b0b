"""The page that compares the laws of one study file: its folder, whether it is current, and its writing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvdrift.flows.pages.reports import laws_report_folder, present_inputs, record_inputs, report_is_current
from kvdrift.flows.run.study_run import StudyRun


def laws_folder(runs: Sequence[StudyRun]) -> Path:
    """Return the folder of the page that compares the laws of one model, beside the pages of its studies."""
    study = runs[0].study
    return laws_report_folder(runs[0].store, study.name_in_file, study.model.id if study.several_models else None)


def laws_are_compared(runs: Sequence[StudyRun]) -> bool:
    """Tell whether that page exists and is current with the tables."""
    return report_is_current(runs[0].store, laws_folder(runs))


def compare_laws(runs: Sequence[StudyRun]) -> bool:
    """Write the page that compares the laws of one model, unless it is current; return whether it was written."""
    if laws_are_compared(runs):
        return False
    from kvdrift.flows.pages.side_by_side.pages import write_comparison  # noqa: PLC0415 - a page that is there needs nothing of it

    store, folder = runs[0].store, laws_folder(runs)
    inputs = present_inputs(store)
    names = [run.study.name for run in runs]
    write_comparison([store.location], folder, names, runs[0].progress, model=runs[0].study.model.id)
    record_inputs(folder, inputs, {})
    return True
