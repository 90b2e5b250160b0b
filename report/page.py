"""The page of one study: its parts and sections in order, and the files that are written for them.

A new section is a function of a page's content in ``kvdrift.report.sections``, with its place in ``PARTS`` and its HTML
in ``templates/sections/NAME.html.j2``. The function returns None if the page is to omit the section.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from kvdrift.report.explorer.page import write_explorer
from kvdrift.report.figures.canvas import drawing, save
from kvdrift.report.gates import gates_block
from kvdrift.report.printing.html import rendered
from kvdrift.report.printing.tables import write_records, write_tex
from kvdrift.report.reading.content import PageContent, TokenReader, read_content
from kvdrift.report.reading.estimates import ESTIMATE_COLUMNS, Provenance, StudyRows, ViewSource
from kvdrift.report.sections import (
    answers,
    branching,
    calibration,
    contrasts,
    divergence,
    examples,
    frontier,
    gap,
    plan,
    ranking,
    study,
    systems,
    verdict,
)
from kvdrift.report.sections.section import Drawing, Section

FILES = "files.json"
"""The file of a page's folder that lists the files written for the page."""

VERDICT = "verdict.json"
"""The file of a page's folder that has the verdict as data: its sentence, and each action's badge and reasons."""

_ESTIMATES = "estimates.csv"  # among the tables

RELOADING = 'id="reloading"'
"""The attribute that only the page of an unfinished study has: its box makes the page reload itself."""

DrawFigures = Callable[[Sequence[Drawing], Path], dict[str, str]]
"""Draws figures into a folder, and returns the SVG of each for the page, by the figure's name."""


@dataclass(frozen=True)
class Part:
    """A part of the page."""

    name: str  # its anchor
    title: str  # its heading; empty for the first part, which is the page's first screen
    # the functions that make its sections, each with the question that the section answers
    sections: tuple[tuple[Callable[[PageContent], Section | None], str], ...]
    folded: bool = False  # whether its sections are closed until they are opened or printed; each shows its question


PARTS: tuple[Part, ...] = (
    Part("first", "", ((verdict.section, ""), (examples.happens, ""), (frontier.sweeps_section, ""))),
    Part(
        "why",
        "Why",
        (
            (ranking.section, "Where does each action stand?"),
            (contrasts.section, "What does each action do?"),
            (answers.section, "Does it cost right answers?"),
            (divergence.decomposition, "How often do tokens differ, from when on, and for how long?"),
            (divergence.teacher_forced, "What would a tool say that reads the reference’s text alone?"),
            (divergence.entry_section, "When do the two continuations diverge?"),
            (gap.gap_section, "Is the difference one of time or of rate?"),
            (divergence.clocks_section, "Does divergence grow with position, or with time since it began?"),
            (examples.section, "What do divergent texts look like?"),
        ),
    ),
    Part(
        "specialists",
        "For specialists",
        (
            (study.definitions, "What does each symbol mean?"),
            (study.section, "What was run, on which documents, and with how many bytes?"),
            (plan.section, "What was fixed before the evaluation, and what was the result?"),
            (plan.looks_section, "Where did this sequential study stop?"),
            (gap.eos_section, "How much of the difference is only that one text is shorter?"),
            (divergence.saturation, "Where do the two next-token distributions have nothing in common?"),
            (branching.depth_section, "What does a short window after the first mismatch say of R?"),
            (branching.branching_section, "Where is another estimator of R cheaper?"),
            (systems.section, "Are estimates right where R is known?"),
            (calibration.section, "Can a cheaper observation replace R?"),
        ),
        folded=True,
    ),
    Part("end", "", ((study.provenance, ""),)),
)


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
    """Write ``index.html``, ``trajectories.html``, ``verdict.json``, ``figures/`` and ``tables/``.

    ``files.json`` lists all these files. The same input gives the same bytes.

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
        provenance=provenance,
        latex=latex,
        preliminary=preliminary,
    )
    parts = [(part, _made(part, content)) for part in PARTS]
    sections = [section for _, part_sections in parts for section, _ in part_sections]
    for name in ("figures", "tables"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    _write_tables(sections, content, folder / "tables")
    explorer = write_explorer(content, folder, token_text)
    figures = (draw or draw_figures)(
        [figure for section in sections for figure in section.drawings], folder / "figures"
    )
    facts = json.dumps(verdict.verdict_record(content), ensure_ascii=False, indent=1)
    (folder / VERDICT).write_text(f"{facts}\n", encoding="utf-8", newline="\n")
    page = folder / "index.html"
    link = "" if beside is None else relative_link(beside, folder)
    page.write_text(_html(content, parts, figures, link, gates_block(folder)), encoding="utf-8", newline="\n")
    tables = [table.name for section in sections for table in section.tables]
    written = [page.name, VERDICT, *([explorer.name] if explorer else []), f"tables/{_ESTIMATES}"]
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
    html = rendered("ended", study=study, report=relative_link(report, folder), store=store)
    page.write_text(html, encoding="utf-8", newline="\n")
    return page


def _made(part: Part, content: PageContent) -> list[tuple[Section, str]]:
    """Make the sections of a part, each with the question that it answers; leave out those that the page omits."""
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
        return {figure.name: save(figure.draw(), figure.name, folder, figure.words) for figure in drawings}


def _html(
    content: PageContent, parts: list[tuple[Part, list[tuple[Section, str]]]], figures: dict[str, str], beside: str,
    gates: str,
) -> str:  # fmt: skip
    def body(section: Section) -> str:
        return rendered(
            f"sections/{section.name}",
            content=content,
            facts=content.facts,
            windows=content.windows,
            tables={table.name: table for table in section.tables},
            figures=figures,
            shows=section.shows,
            **section.values,
        )

    return rendered(
        "page",
        content=content,
        beside=beside,
        gates=gates,
        looks=plan.progress(content),
        parts=[
            (part, [(section, question, body(section)) for section, question in part_sections])
            for part, part_sections in parts
            if part_sections
        ],
    )
