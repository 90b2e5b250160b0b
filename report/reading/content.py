"""The content of one page, from which every section is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvdrift.report.reading.estimates import ReportedEstimates, read_estimates
from kvdrift.report.reading.facts import DEVELOPMENT, EVALUATION, Facts, natural, read_facts
from kvdrift.report.reading.published import PublishedStudy, read_published
from kvdrift.report.reading.source import Provenance, StudyRows, ViewRow
from kvdrift.schema.errors import InputError, nearest
from kvdrift.schema.study import POOLED
from kvdrift.schema.windows import Windows

TokenReader = Callable[[int], str]


@dataclass(frozen=True)
class PageContent:
    """The facts and estimates of one study and model, as read from the views."""

    source: StudyRows  # the study's views, for values that only one section shows
    split: str  # the split that the page reports
    facts: Facts
    estimates: ReportedEstimates
    published: PublishedStudy  # the paper's results that are not numbers beside ``estimates``
    actions: list[str]  # the compared actions, the baseline first
    baseline_reason: str  # why the first action is the baseline, as the end of a sentence
    token_text: TokenReader
    provenance: Provenance
    latex: bool  # whether the tables are written as LaTeX too
    preliminary: str = ""  # the study's progress as a sentence if the study still runs; else empty

    def __getstate__(self) -> dict[str, Any]:
        """Return all that figures are drawn from, for another process; open views cannot go there."""
        return self.__dict__ | {"source": None, "token_text": str}

    @property
    def baseline(self) -> str:
        """The action that contrasts subtract."""
        return self.actions[0]

    @property
    def others(self) -> list[str]:
        """The other actions."""
        return self.actions[1:]

    @property
    def windows(self) -> Windows:
        """The study's horizon and windows."""
        return self.facts.windows

    @cached_property
    def residual_risks(self) -> list[ViewRow]:
        """Rows of ``swrb_risk`` that pool the strata of the page's split; not computed if nothing was branched."""
        return self.pooled("swrb_risk") if self.facts.branched else []

    @cached_property
    def ended(self) -> tuple[int, int]:
        """How many of the reference's texts X ended before H or at H, and how many there are, in the page's split.

        X is the same for all actions of a document and replicate, so those of the baseline are counted.
        """
        rows = self.source.columns_of("analyzed_trajectories", "eos_x", action=self.baseline, split=self.split)
        return rows.num_rows - rows["eos_x"].null_count, rows.num_rows

    @property
    def unmeasured_strata(self) -> list[str]:
        """Strata without an estimate of R: none of their documents of the page's split is measured."""
        return [
            stratum
            for stratum in self.facts.strata
            if all(self.estimates.get("mismatch", one, stratum=stratum).estimate is None for one in self.actions)
        ]

    def pooled(self, view: str, **equal: object) -> list[ViewRow]:
        """Return the rows of ``view`` that pool the strata of the page's split."""
        return self.source.of(view, split=self.split, stratum=POOLED, **equal)


def read_content(
    source: StudyRows,
    *,
    baseline: str | None,
    token_text: TokenReader | None,
    provenance: Provenance,
    latex: bool,
    preliminary: str = "",
) -> PageContent:
    """Read the content of a page; the arguments are those of ``kvdrift.report.page.build_report``."""
    facts = read_facts(source)
    if not facts.compared:
        raise InputError(f"study '{facts.study}' has no action besides full-retention controls: nothing to report")
    split = _split(source)
    estimates = read_estimates(source, split, facts.compared, planned=facts.plan is not None, branched=facts.branched)
    published = read_published(source, facts)
    chosen, reason = _baseline(facts, estimates, baseline)
    return PageContent(
        source=source,
        split=split,
        facts=facts,
        estimates=estimates.compared(published.numbers),
        published=published,
        actions=[chosen, *(action for action in facts.compared if action != chosen)],
        baseline_reason=reason,
        token_text=token_text or str,
        provenance=provenance,
        latex=latex,
        preliminary=preliminary,
    )


def _split(source: StudyRows) -> str:
    """Return the split to report: evaluation, or development if evaluation has no derived trajectories yet."""
    for split in (EVALUATION, DEVELOPMENT):
        if source.of("decomposition", split=split, stratum=POOLED):
            return split
    raise InputError(f"study '{source.study}' has no derived trajectories yet; 'kvdrift derive' makes them")


def _baseline(facts: Facts, estimates: ReportedEstimates, asked: str | None) -> tuple[str, str]:
    """Return the baseline, and the reason for it."""
    if asked is not None:
        if asked not in facts.compared:
            raise InputError(f"no action '{asked}' in study '{facts.study}'; {nearest(asked, facts.compared)}")
        return asked, "as requested"
    planned = facts.plan.content.get("baseline") if facts.plan else None
    if planned in facts.compared:
        return str(planned), "as the plan says"
    known = {action: estimates.get("mismatch", action).estimate for action in facts.compared}
    least = min(facts.compared, key=lambda action: (known[action] is None, known[action] or 0.0, natural(action)))
    return least, "the action with the smallest mismatch"
