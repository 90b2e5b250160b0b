"""One study on one page: reads the views, draws, and writes the page, the figures and the tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from report import figures, tables
from report.blocks import Table, write_records
from report.canvas import action_styles, drawing, save
from report.estimates import ESTIMATE_COLUMNS, Estimates, read_estimates
from report.facts import DEVELOPMENT, EVALUATION, Facts, natural, read_facts
from report.headline import sentences
from report.listings import differences_table, other_table, primary_table
from report.plan_rows import plan_rows
from report.quantities import POOLED
from report.source import Provenance, StudyRows, ViewSource
from report.study_tables import actions_table, documents_table, study_rows
from report.trajectories_text import read_examples
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
) -> Path:
    """Write ``index.html``, ``figures/`` and ``tables/`` under ``folder``; return the page's path.

    Contrasts are to ``baseline``, else to the plan's, else to the action with the least mismatch. ``token_text`` turns
    a token id into what a person reads; without it the ids are shown. ``example_strata`` = 0 leaves examples out.
    The evaluation split is reported; a study without evaluation documents is reported on its development documents.
    The same input gives the same bytes.
    """
    source = StudyRows(views, study, model)
    facts = read_facts(source)
    if not facts.compared:
        raise InputError(f"study '{study}' has no action besides full-retention controls: nothing to report")
    split = _split(source)
    estimates = read_estimates(source, split, facts.compared, planned=facts.plan is not None)
    chosen, why = _baseline(facts, estimates, baseline)
    actions = [chosen, *(action for action in facts.compared if action != chosen)]
    support = source.of("branch_windows", split=split)

    for part in ("figures", "tables"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    drawn = _draw(estimates, facts, actions, chosen, folder / "figures")
    tabled = _tables(estimates, facts, actions, chosen, support)
    for table in tabled.values():
        if table is not None:
            table.write_csv(folder / "tables")
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
            study_rows=study_rows(facts, estimates, actions),
            figures=drawn,
            tables=tabled,
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


def _draw(estimates: Estimates, facts: Facts, actions: list[str], baseline: str, folder: Path) -> dict[str, str]:
    styles = action_styles(actions)
    others = actions[1:]
    plans: dict[str, tuple[str, Callable[[], Figure]]] = {
        "entry_cdf": (
            "Share of continuations that have diverged by each position, one curve per action",
            lambda: figures.entry_cdf(estimates, styles, facts.windows),
        ),
        "two_clocks": (
            "Total variation by generation position and by lag after divergence, with block gaps and late minus early",
            lambda: figures.two_clocks(estimates, styles, baseline, facts.windows),
        ),
    }
    if others:
        bars = [figures.GapBar(action, action, baseline) for action in others]
        plans["gap_terms"] = (
            f"Gap in token mismatch to {baseline}, split into exposure, rate and occurrence terms",
            lambda: figures.gap_terms(estimates, bars),
        )
    if others and len(facts.strata) > 1:
        by_stratum = [
            figures.GapBar(f"{stratum} · {action}" if len(others) > 1 else stratum, action, baseline, stratum)
            for action in others
            for stratum in facts.strata
        ]
        plans["gap_terms_by_stratum"] = (
            f"The same gap to {baseline} in each stratum",
            lambda: figures.gap_terms(estimates, by_stratum),
        )
    with drawing():
        return {name: save(draw(), name, folder, text) for name, (text, draw) in plans.items()}


def _tables(
    estimates: Estimates, facts: Facts, actions: list[str], baseline: str, support: list[dict[str, Any]]
) -> dict[str, Table | None]:
    strata, others, windows = facts.strata, actions[1:], facts.windows
    made: list[Table | None] = [
        documents_table(facts),
        actions_table(facts, actions),
        tables.decomposition_table(estimates, actions),
        tables.decomposition_table(estimates, actions, strata, name="decomposition_by_stratum"),
        tables.branch_table(estimates, actions, support),
        tables.branch_table(estimates, actions, support, strata, name="branch_by_stratum"),
        tables.block_table(estimates, actions, windows),
        tables.eos_table(estimates, actions),
        tables.saturation_table(estimates, actions),
        primary_table(estimates),
        other_table(estimates),
    ]
    if others:
        made += [
            tables.gap_table(estimates, others, baseline),
            differences_table(estimates, others, baseline),
            tables.gap_table(estimates, others, baseline, strata, name="gap_by_stratum"),
            tables.block_gap_table(estimates, others, baseline, windows),
            tables.eos_contrast_table(estimates, others, baseline),
        ]
    return {table.name: table for table in made if table is not None}


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
