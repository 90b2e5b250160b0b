"""The page that compares several stores: read, subtracted, written."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path, PurePath

from kvdrift.flows.pages.reports import writing
from kvdrift.flows.pages.side_by_side.entries import read_entries
from kvdrift.flows.pages.side_by_side.pairing import pairings
from kvdrift.log.delta.durability import sync
from kvdrift.report.side_by_side.content import Comparison
from kvdrift.report.side_by_side.page import build_comparison
from kvdrift.schema.location import absolute, folder_name
from kvdrift.schema.progress import SILENT, Progress


def write_comparison(
    locations: Sequence[str],
    folder: Path,
    studies: Collection[str] | None = None,
    progress: Progress = SILENT,
    *,
    model: str | None = None,
) -> Path:
    """Write the comparison of several stores, or of several studies of one; return the path of the page.

    By default all studies and models of each store are compared.
    """
    measured = read_entries(locations, studies, progress, model=model)
    comparison = Comparison(tuple(entry for entry, _ in measured), tuple(pairings(measured)))
    with writing(folder):
        page = build_comparison(comparison, folder)
        parts = [folder / "figures", folder / "tables"]
        for path in (page, *(file for part in parts for file in part.iterdir()), *parts, folder):
            sync(path)
    return page


def comparison_folder(locations: Sequence[str]) -> Path:
    """Return the default folder of a comparison: a folder of the stores' names in ``reports``."""
    names = [PurePath(absolute(location)).name for location in locations]
    return Path("reports") / folder_name("-and-".join(names))
