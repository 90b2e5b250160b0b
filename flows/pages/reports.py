"""The pages of stored studies: their folders, whether they are current, their writing and their deletion."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.flows.estimate.scores import estimated_at
from kvdrift.log.checked_files import WEEK
from kvdrift.log.delta.durability import sync
from kvdrift.log.delta.parquet_files import replace_file
from kvdrift.log.last_times import last_times
from kvdrift.log.store import Store
from kvdrift.log.studies import count_waiting, stored_studies
from kvdrift.schema.errors import InputError, OperationError, first_line, is_disk_fault
from kvdrift.schema.location import folder_name, is_local
from kvdrift.schema.own_process import OwnProcesses
from kvdrift.schema.progress import SILENT, Progress
from kvdrift.schema.study.reading import name_of_all

if TYPE_CHECKING:
    from kvdrift.report.page import DrawFigures
    from kvdrift.report.sections.section import Drawing

INPUTS = "inputs.json"
"""The file of a page's folder that records the page's inputs; without it the page counts as outdated."""
_WAITING = "waiting"  # the key of the number of waiting replicates, beside the tables' names
_REVISIONS = "action_revisions"  # the key of the revisions in that file, beside the tables' names
_TABLES = (
    "events", "trajectories", "branchings", "exact_values", "scores", "results", "calibration", "plans", "actions",
)  # fmt: skip


def write_report(
    store: Store,
    study: str,
    model: str,
    folder: Path,
    *,
    token_text: Callable[[int], str] | None = None,
    latex: bool = False,
    progress: Progress = SILENT,
    sides: OwnProcesses | None = None,
    beside: Path | None = None,
) -> Path:
    """Write the report of a stored study in a folder, and return the path of the page.

    Without ``token_text`` the examples show token ids. With ``latex`` the tables are also written as .tex files. The
    side processes ``sides`` draw the figures, if given. The report links to the page ``beside``, which compares this
    study with those of other temperatures and need not exist yet.
    """
    from kvdrift.report.page import build_report  # noqa: PLC0415 - only to draw a page
    from kvdrift.report.reading.estimates import Provenance  # noqa: PLC0415
    from kvdrift.sql.catalog import MOMENT_VIEWS, open_views  # noqa: PLC0415

    progress.begin("report", 1, "pages")
    draw, waiting = None if sides is None else draw_beside(sides), waiting_words(store, study, model)
    replicates = _waiting_replicates(store)
    with writing(folder), open_views(store, kept=MOMENT_VIEWS, checked_within=WEEK) as views:
        page = build_report(
            views, study, model, folder,
            token_text=token_text,
            latex=latex,
            draw=draw,
            beside=beside,
            provenance=Provenance(Path(store.location).name, views.versions, waiting=waiting),
        )  # fmt: skip
        inputs = {table: store.data_version(table, views.versions[table]) for table in _TABLES}
        inputs[_WAITING] = replicates
        revisions = _estimated_revisions(store.read("results", views.versions["results"]), study, model)
        parts = [folder / "figures", folder / "tables"]
        for path in (*folder.glob("*.html"), *(file for part in parts for file in part.iterdir()), *parts):
            sync(path)
        record_inputs(folder, inputs, revisions)
    progress.advance(1)
    return page


def draw_beside(sides: OwnProcesses) -> DrawFigures:
    """Return a function that draws figures in the side processes, which begin to import matplotlib now."""
    from kvdrift.flows.generate.local import work_beside  # noqa: PLC0415 - imports the generator
    from kvdrift.report.page import draw_figures  # noqa: PLC0415 - as above

    with suppress(BrokenProcessPool):
        for _ in range(2):
            sides.submit(_get_ready_to_draw)

    def draw(drawings: Sequence[Drawing], folder: Path) -> dict[str, str]:
        draw_part = partial(draw_figures, folder=folder)
        drawn = work_beside(sides, [[drawing] for drawing in drawings], draw_part, draw_part)
        return {name: figure for figures in drawn for name, figure in figures.items()}

    return draw


def _get_ready_to_draw() -> None:
    from kvdrift.report.figures.canvas import drawing  # noqa: PLC0415 - in the process that draws

    with drawing():  # imports the drawing library
        return


def present_inputs(store: Store) -> dict[str, int | None]:
    """Return the data version of each table that pages are made from, keyed by table.

    A further key has the number of replicates that wait for missing positions.
    """
    return {**{table: store.data_version(table) for table in _TABLES}, _WAITING: _waiting_replicates(store)}


def _waiting_replicates(store: Store) -> int:
    return sum(count.replicates for count in count_waiting(store).values())


def waiting_words(store: Store, study: str, model: str) -> str:
    """Return a line on a study's replicates that wait for missing positions; empty if none waits."""
    return str(count_waiting(store).get((study, model), ""))


def record_inputs(folder: Path, inputs: Mapping[str, int | None], revisions: Mapping[str, int]) -> None:
    """Record that the folder's page is complete; to be called when all files of the page are written.

    ``inputs`` are those of ``present_inputs`` that the page was made from, ``revisions`` the newest revision of each
    action with estimates on the page.
    """
    with writing(folder):
        replace_file(folder / INPUTS, json.dumps({**inputs, _REVISIONS: revisions}).encode())
        sync(folder)


def reported_revisions(folder: Path) -> dict[str, int]:
    """Return the newest revision of each action with estimates on the folder's page; {} without a page.

    Pages of earlier versions of kvdrift do not record revisions.
    """
    revisions: dict[str, int] = _recorded(folder).get(_REVISIONS, {})
    return revisions


def _estimated_revisions(results: pa.Table, study: str, model: str) -> dict[str, int]:
    """Return the newest revision of each action of a study and model in rows of ``results``."""
    of_study = results.filter(pc.and_(pc.equal(results["study"], study), pc.equal(results["model"], model)))
    newest = of_study.group_by("action").aggregate([("action_revision", "max")])
    return dict(zip(newest["action"].to_pylist(), newest["action_revision_max"].to_pylist(), strict=True))


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an error of the file system, in a block that writes to the folder, into an error of one line."""
    try:
        yield
    except OSError as error:
        kind = OperationError if is_disk_fault(error) else InputError
        named = "" if error.filename is None else f"{error.filename}: "
        reason = error.strerror or first_line(error)
        raise kind(f"{folder}: the report cannot be written here ({named}{reason})") from None


def report_folder(store: Store, study: str, model: str | None = None) -> Path:
    """Return the default folder of a study's report: in the store if that is a folder, else in ``reports``.

    ``model`` is the report's model, for a study of several models.
    """
    base = Path(store.location) / "report" if is_local(store.location) else Path("reports")
    return base / folder_name(study) if model is None else base / folder_name(study) / folder_name(model)


def model_in_path(study: str, model: str, pages: Collection[tuple[str, str]]) -> str | None:
    """Return ``model`` if ``pages``, pairs (study, model), include several models of ``study``; else None."""
    return model if sum(name == study for name, _ in pages) > 1 else None


def page_folder(
    store: Store, study: str, model: str, pages: Collection[tuple[str, str]], output: Path | None = None
) -> Path:
    """Return the folder of the page of a study and model; ``pages`` are all studies and models with a page.

    Without ``output`` it is the report's default folder. With ``output`` it is that folder if there is a single page,
    else a folder in it, named after the study, and within that one after the model if the study has several models.
    """
    page_model = model_in_path(study, model, pages)
    if output is None:
        return report_folder(store, study, page_model)
    folder = output / folder_name(study)
    return output if len(pages) == 1 else folder if page_model is None else folder / folder_name(page_model)


def samplings_report_folder(store: Store, name: str, model: str | None = None) -> Path:
    """Return the folder of the page that compares temperatures of one model; ``name`` is the study file's name."""
    return report_folder(store, f"{name}-temperatures", model)


def page_beside(store: Store, study: str, model: str | None = None) -> Path | None:
    """Return the page that compares a study with the other temperatures of its file; None without such a page."""
    name = name_of_all(study)
    page = None if name is None else samplings_report_folder(store, name, model) / "index.html"
    return page if page is not None and page.is_file() else None


def report_is_current(store: Store, folder: Path) -> bool:
    """Return whether the folder's report was made from the store's present tables."""
    recorded = _recorded(folder)
    made_from = {name: recorded.get(name, "unknown") for name in (*_TABLES, _WAITING)}
    return (folder / "index.html").is_file() and made_from == present_inputs(store)


def _recorded(folder: Path) -> dict[str, Any]:
    """Return the record of ``record_inputs``; {} if there is none or the file cannot be read."""
    try:
        recorded = json.loads((folder / INPUTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return recorded if isinstance(recorded, dict) else {}


@dataclass(frozen=True)
class Pruned:
    """The deletion of one page."""

    folder: Path
    files: int
    bytes: int


def prune_pages(store: Store, seconds: float, study: str | None = None) -> Iterator[Pruned]:
    """Delete pages of all studies, or of ``study``, if page, last run and estimates are all at least ``seconds`` old.

    A time ahead of the clock counts as now. Other files in a page's folder, such as the answers of gates, stay. Yield
    the deletion of each page.
    """
    from kvdrift.report.page import FILES, page_files  # noqa: PLC0415 - as in ``write_report``

    if not is_local(store.location):
        raise InputError(f"{store.location}: pages of a store behind a URL are in the folder reports, and never pruned")
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
                yield _delete(folder, [*names, FILES])


def _delete(folder: Path, names: Sequence[str]) -> Pruned:
    count = size = 0
    # First the file without which the page counts as outdated, last the list of its files: a kill leaves a page that
    # is written again, or pruned again.
    for path in (folder / INPUTS, *(folder / name for name in names)):
        with suppress(FileNotFoundError):
            size += path.lstat().st_size
            path.unlink()
            count += 1
    for empty in sorted({(folder / name).parent for name in names} | {folder}, reverse=True):
        with suppress(OSError):  # it has other files
            empty.rmdir()
    return Pruned(folder, count, size)
