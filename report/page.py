"""The page of one study: read the views, draw, and write the page, the figures and the tables."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

import jinja2

from kvdrift.report.explorer.page import write_explorer
from kvdrift.report.gates import gates_block
from kvdrift.report.parts.sequential_looks import between_looks
from kvdrift.report.printing.canvas import drawing, save
from kvdrift.report.printing.latex import write_tex
from kvdrift.report.printing.palette import properties
from kvdrift.report.printing.section import Drawing, Section
from kvdrift.report.printing.tables import write_records
from kvdrift.report.reading.content import PageContent, TokenReader, read_content
from kvdrift.report.reading.estimates import ESTIMATE_COLUMNS
from kvdrift.report.reading.source import Provenance, StudyRows, ViewSource
from kvdrift.report.sections import PARTS, Part

_TEMPLATES = Path(__file__).parent / "templates"

FILES = "files.json"
"""The file of a page's folder that lists the files written for the page."""

_ESTIMATES = "estimates.csv"  # among the tables

RELOADING = '<meta http-equiv="refresh"'
"""The tag that only the page of an unfinished study has: it makes the page reload itself."""

DrawFigures = Callable[[Sequence[Drawing], Path], dict[str, str]]
"""Draws figures into a folder, and returns every figure by name, as it stands in the page."""

_MACROS = '{% from "macros.html.j2" import table, by_stratum, figure, absent, facts_list with context %}\n'


def build_report(
    views: ViewSource,
    study: str,
    model: str,
    folder: Path,
    *,
    baseline: str | None = None,
    token_text: TokenReader | None = None,
    provenance: Provenance | None = None,
    latex: bool = False,
    draw: DrawFigures | None = None,
    preliminary: str = "",
    beside: Path | None = None,
) -> Path:
    """Write ``index.html``, ``trajectories.html``, ``figures/``, ``tables/`` and their list under ``folder``.

    The same input gives the same bytes.

    The evaluation split is reported; a study without evaluation documents is reported on its development documents.

    Args:
        views: the views of a store.
        study: the study's name.
        model: the model's id, as the study has it.
        folder: created if it does not exist.
        baseline: the action that contrasts subtract; by default the plan's baseline, else the action with the least
            mismatch.
        token_text: returns a token id as text; without it ids are shown.
        provenance: the store and the library versions, as the page shows them.
        latex: whether every table is a ``.tex`` file too (package booktabs), not only a CSV file.
        draw: draws the figures; by default ``draw_figures``.
        preliminary: the progress of a study that still runs, as a sentence: the page shows it, recommends nothing, and
            reloads itself.
        beside: the page that compares this study with those of other temperatures.

    Returns:
        The page's path.
    """
    content = read_content(
        StudyRows(views, study, model),
        baseline=baseline,
        token_text=token_text,
        provenance=provenance or Provenance(),
        latex=latex,
        preliminary=preliminary,
    )
    parts = [(part, _made(part, content)) for part in PARTS]
    sections = [section for _, own in parts for section, _ in own]
    for name in ("figures", "tables"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    _write_tables(sections, content, folder / "tables")
    explorer = write_explorer(content, folder, token_text)
    figures = (draw or draw_figures)([one for section in sections for one in section.drawings], folder / "figures")
    page = folder / "index.html"
    link = "" if beside is None else relative_link(beside, folder)
    page.write_text(_html(content, parts, figures, link, gates_block(folder)), encoding="utf-8", newline="\n")
    tables = [table.name for section in sections for table in section.tables]
    written = [page.name, *([explorer.name] if explorer else []), f"tables/{_ESTIMATES}"]
    written += [f"tables/{name}.{kind}" for name in tables for kind in (("csv", "tex") if latex else ("csv",))]
    written += [f"figures/{name}.{kind}" for name in figures for kind in ("svg", "pdf")]
    names = sorted({*page_files(folder), *written})  # an earlier page may have had others
    (folder / FILES).write_text(json.dumps(names, indent=0) + "\n", encoding="utf-8", newline="\n")
    return page


def page_files(folder: Path) -> list[str]:
    """Return the files that were written for a folder's page, relative to the folder; none if there is no list."""
    try:
        names = json.loads((folder / FILES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    known = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return [name for name in names if re.fullmatch(r"((tables|figures)/)?[\w-][\w.-]*", name)] if known else []


def relative_link(page: Path, folder: Path) -> str:
    """Return the address of a page relative to ``folder``, which works from a disk as from a server."""
    return quote(os.path.relpath(page, folder))


def write_ended(study: str, report: Path, store: str, folder: Path) -> Path:
    """Replace the preliminary page of a finished study by a page that links to the report; return its path.

    The report need not exist yet; ``store`` is the store's name as commands take it.
    """
    page = folder / "index.html"
    colours = [properties(dark=dark) for dark in (False, True)]
    html = page_environment().get_template("ended.html.j2").render(
        study=study, report=relative_link(report, folder), store=store, colours=colours
    )  # fmt: skip
    page.write_text(html, encoding="utf-8", newline="\n")
    return page


def _made(part: Part, content: PageContent) -> list[tuple[Section, str]]:
    """Return the sections of a part that the page has, each with its question."""
    return [(section, question) for make, question in part.sections if (section := make(content)) is not None]


def _write_tables(sections: list[Section], content: PageContent, folder: Path) -> None:
    for table in (table for section in sections for table in section.tables):
        table.write_csv(folder)
        if content.latex:
            write_tex(table, folder)
    write_records(folder / _ESTIMATES, [row.as_row() for row in content.estimates.all()], ESTIMATE_COLUMNS)


def draw_figures(drawings: Sequence[Drawing], folder: Path) -> dict[str, str]:
    """Draw figures in turn and write their files; return the SVG of each for the page, by the figure's name."""
    if not drawings:
        return {}
    with drawing():
        return {one.name: save(one.draw(), one.name, folder, one.words) for one in drawings}


@functools.cache
def page_environment() -> jinja2.Environment:
    """Return the environment of the pages' templates: values are escaped unless they are marked as HTML."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


@functools.cache
def _section_template(text: str) -> jinja2.Template:
    """Compile a section's template, once in a process."""
    return page_environment().from_string(_MACROS + text.lstrip())


def _html(
    content: PageContent, parts: list[tuple[Part, list[tuple[Section, str]]]], figures: dict[str, str], beside: str,
    gates: str,
) -> str:  # fmt: skip
    def body(section: Section) -> str:
        return _section_template(section.template).render(
            content=content,
            facts=content.facts,
            windows=content.windows,
            tables={table.name: table for table in section.tables},
            figures=figures,
            **section.values,
        )

    whole = page_environment().get_template("page.html.j2")
    return whole.render(
        content=content,
        beside=beside,
        gates=gates,
        between_looks=between_looks(content),
        parts=[(part, [(section, question, body(section)) for section, question in own]) for part, own in parts if own],
        colours=[properties(dark=dark) for dark in (False, True)],
    )
