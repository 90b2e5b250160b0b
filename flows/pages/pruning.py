"""Delete the pages of old studies: exactly the files that were written for a page that can be written again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvdrift.flows.estimate.current import estimated_at
from kvdrift.flows.pages.reports import INPUTS, page_folder, writing
from kvdrift.log.last_times import last_times
from kvdrift.log.store import Store
from kvdrift.log.studies import stored_studies
from kvdrift.report.page import FILES, page_files
from kvdrift.schema.errors import InputError
from kvdrift.schema.location import is_local


@dataclass(frozen=True)
class Pruned:
    """What was deleted of one page."""

    folder: Path
    files: int
    bytes: int


def prune_pages(store: Store, seconds: float, study: str | None = None) -> Iterator[Pruned]:
    """Delete pages in the store's folders that were not written, and whose studies were not run or estimated, lately.

    Args:
        store: The store; only pages of its own studies are looked at.
        seconds: How long ago a page must have been written, and its study run and estimated. A time ahead of the clock
            counts as now.
        study: Only the pages of this study.

    Yields:
        What was deleted, for each page. Other files in a page's folder, such as the answers of gates, stay.
    """
    if not is_local(store.location):
        raise InputError(f"{store.location}: its pages are in the folder reports, and not pruned")
    studies, times = stored_studies(store), last_times(store.location)
    for name, model in studies:
        folder = page_folder(store, name, model, studies)
        names = page_files(folder)
        if study not in {None, name} or not names:
            continue
        seen = (times.runs.get((name, model)), estimated_at(store, name, model, times))
        newest = max([(folder / FILES).stat().st_mtime, *(at.timestamp() for at in seen if at is not None)])
        if time.time() - newest >= seconds:
            with writing(folder):
                yield _delete(folder, names)


def _delete(folder: Path, names: list[str]) -> Pruned:
    count = size = 0
    # First the file without which the page counts as outdated, last the list of its files: a kill leaves a page that
    # is written again, or pruned again.
    for path in (folder / INPUTS, *(folder / name for name in names), folder / FILES):
        with suppress(FileNotFoundError):
            size += path.lstat().st_size
            path.unlink()
            count += 1
    for empty in sorted({(folder / name).parent for name in names} | {folder}, reverse=True):
        with suppress(OSError):  # it has other files
            empty.rmdir()
    return Pruned(folder, count, size)
