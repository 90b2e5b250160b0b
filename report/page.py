"""One study on one page: reads the views, draws, and writes the page, the figures and the tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jinja2

from report.parts.branching import pay_sentences, read_branching
from report.parts.branching_systems import read_systems
from report.parts.calibration import read_calibration
from report.parts.depth import read_depths
from report.parts.headline import exposure_sentence, sentences
from report.parts.plan_rows import plan_rows
from report.parts.study_tables import study_rows
from report.parts.trajectories_text import read_examples
from report.printing.blocks import write_records
from report.printing.canvas import drawing, save
from report.printing.latex import write_tex
from report.reading.estimates import ESTIMATE_COLUMNS, Estimates, read_estimates
from report.reading.facts import DEVELOPMENT, EVALUATION, Facts, natural, read_facts
from report.reading.published import read_published
from report.reading.quantities import POOLED
from report.reading.source import Provenance, StudyRows, ViewSource
from report.sections import Material, drawings, sections, tables
from schema.errors import InputError, nearest

_TEMPLATES = Path(__file__).parent / "templates"


def build_report(
    views: ViewSource,
    study: str,
    model: str,
    folder: Path,
    *,
    baseline: str | None = None,
    token_text: Callable[[int], str] | None = None,
    example_strata: int = 3,
    provenance: Provenance | None = None,
    latex: bool = False,
) -> Path:
    """Write ``index.html``, ``figures/`` and ``tables/`` under ``folder``; return the page's path.

    Every table is a CSV file too, and with ``latex`` also a ``.tex`` file for the package booktabs.

    Contrasts are to ``baseline``, else to the plan's, else to the action with the least mismatch. ``token_text`` turns
    a token id into what a person reads; without it the ids are shown. ``example_strata`` = 0 leaves examples out, as do
    finite-state systems.
    The evaluation split is reported; a study without evaluation documents is reported on its development documents.
    The same input gives the same bytes.
    """
    source = StudyRows(views, study, model)
    facts = read_facts(source)
    if not facts.compared:
        raise InputError(f"study '{study}' has no action besides full-retention controls: nothing to report")
    split = _split(source)
    if facts.finite:  # two tokens have no text to read
        example_strata = 0
    estimates = read_estimates(source, split, facts.compared, planned=facts.plan is not None)
    published = read_published(source, facts)
    estimates = estimates.compared(published.numbers)
    chosen, why = _baseline(facts, estimates, baseline)
    actions = [chosen, *(action for action in facts.compared if action != chosen)]
    material = Material(
        facts=facts,
        estimates=estimates,
        actions=actions,
        support=source.of("branch_windows", split=split),
        depths=read_depths(source, split, actions, chosen),
        calibration=read_calibration(source, actions, chosen),
        published=published,
        branching=read_branching(source, split, actions),
        systems=read_systems(source, split, facts),
    )

    for part in ("figures", "tables"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    with drawing():
        drawn = {
            name: save(draw(), name, folder / "figures", text) for name, (text, draw) in drawings(material).items()
        }
    tabled = tables(material)
    for table in tabled.values():
        table.write_csv(folder / "tables")
        if latex:
            write_tex(table, folder / "tables")
    write_records(folder / "tables" / "estimates.csv", [row.as_row() for row in estimates.all()], ESTIMATE_COLUMNS)

    page = folder / "index.html"
    page.write_text(
        _environment().get_template("report.html.j2").render(
            facts=facts,
            split=split,
            estimates=estimates,
            actions=actions,
            baseline=chosen,
            baseline_why=why,
            others=actions[1:],
            sentences=sentences(estimates, facts, actions, chosen),
            pays=pay_sentences(estimates, material.branching.actions),
            study_rows=study_rows(facts, estimates, actions),
            figures=drawn,
            tables=tabled,
            shown=sections(material),
            exposure=exposure_sentence(estimates, actions[1:], chosen, facts.strata),
            published=published,
            published_systems=bool(material.systems.published),
            latex=latex,
            added=[row["action"] for row in facts.actions if not (row["prespecified"] or row["control"])],
            plan=plan_rows(facts.plan.content) if facts.plan else [],
            examples=read_examples(source, facts, actions, token_text or str, example_strata, split),
            provenance=provenance or Provenance(),
        ),
        encoding="utf-8",
        newline="\n",
    )  # fmt: skip
    return page


def _split(source: StudyRows) -> str:
    """The split to report: evaluation, or development before evaluation has derived trajectories."""
    for split in (EVALUATION, DEVELOPMENT):
        if source.of("decomposition", split=split, stratum=POOLED):
            return split
    raise InputError(f"study '{source.study}' has no derived trajectories yet: kvdrift derive makes them")


def _baseline(facts: Facts, estimates: Estimates, asked: str | None) -> tuple[str, str]:
    """The baseline, and why it is the one."""
    if asked is not None:
        if asked not in facts.compared:
            raise InputError(f"no action '{asked}' in study '{facts.study}'; {nearest(asked, facts.compared)}")
        return asked, "as asked for"
    if facts.plan and facts.plan.baseline in facts.compared:
        return str(facts.plan.baseline), "as the plan says"
    known = {action: estimates.get("mismatch", action).estimate for action in facts.compared}
    least = min(facts.compared, key=lambda action: (known[action] is None, known[action] or 0.0, natural(action)))
    return least, "the action with the least mismatch"


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
