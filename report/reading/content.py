"""The content of one page: facts, estimates, and the source paper's numbers beside them, as fractions.

The view ``published_comparison`` has the paper's number for each estimate. The verdicts of calibrations and the
counts of branch cohorts are no estimates: they are read here from the view ``published``, by the same rules. A study
matches if its model's id ends in the paper's name of a model (``meta-llama/Llama-3.1-8B-Instruct``), if its horizon and
windows are the paper's, and if its tokens are drawn from the full softmax at temperature 1; actions and strata match by
equal names. If only the horizon, a window or the sampling differs, no published number is shown, and the page says why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvdrift.report.reading.estimates import (
    Provenance,
    ReportedEstimates,
    StudyRows,
    ViewRow,
    read_estimates,
)
from kvdrift.report.reading.facts import DEVELOPMENT, EVALUATION, Facts, natural, read_facts
from kvdrift.schema.errors import InputError, nearest
from kvdrift.schema.sampling import FULL_SOFTMAX
from kvdrift.schema.study import POOLED
from kvdrift.schema.windows import Windows

_WINDOWS = Windows.of(128)  # the windows of both of the paper's studies
_POINT = 0.01  # the paper prints errors of calibrations in percentage points
_OBSERVATIONS = {"fixed_history": "fixed_history", "positions_1_32": "positions"}
_CANDIDATES = {"cell_mean": "stratum_action_mean", "ridge": "ridge", "flat": "flat"}


TokenReader = Callable[[int], str]


@dataclass(frozen=True)
class PublishedVerdict:
    """The paper's result of one calibration: its selected predictor, decision and errors."""

    candidate: str
    decision: str
    errors: dict[str, float]  # error, mae and rmse, as far as they are printed


@dataclass(frozen=True)
class PublishedStudy:
    """The paper's results for this model's actions that are no estimates; empty if nothing matches."""

    # by action, baseline and observation
    verdicts: dict[tuple[str, str, str], PublishedVerdict] = field(default_factory=dict)
    # documents and paths of a branch cohort, by stratum and action
    support: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    # a sentence for the page if the paper has this model and these actions, but other windows or another sampling
    mismatch: str = ""


def read_published(source: StudyRows, facts: Facts) -> PublishedStudy:
    """Read the paper's results for this study's model and actions."""
    actions = set(facts.compared)
    rows = [
        row
        for row in source.views.rows("published").to_pylist()
        if is_model(facts.model, row["model"]) and row["action"] in actions and row["baseline"] in {None, *actions}
    ]
    if rows and (other := _measured_with(facts)):
        return PublishedStudy(
            mismatch=f"The source paper has this model and actions of these names, measured with {other}. Its numbers "
            "are not shown, because this study measures other quantities."
        )
    return PublishedStudy(_verdicts(rows), _support(rows))


def _measured_with(facts: Facts) -> str:
    """Return the windows and horizon, or else the sampling, of the paper in words; empty if the study has the same."""
    if facts.windows != _WINDOWS:
        what = "the default windows" if facts.windows.horizon == _WINDOWS.horizon else "another horizon"
        return f"{what} and a horizon of {_WINDOWS.horizon} tokens"
    return FULL_SOFTMAX.words if facts.other_sampling else ""


def is_model(model: str, published: str | None) -> bool:
    """Tell whether a model id ends in the paper's name of a model."""
    return published is not None and f"/{model}".lower().rstrip("/").endswith(f"/{published}".lower())


def _support(rows: list[ViewRow]) -> dict[tuple[str, str], tuple[float, float]]:
    counts = {(row["stratum"], row["action"], row["quantity"]): row["value"] for row in rows}
    return {
        (stratum, action): (documents, counts[stratum, action, "branch_cohort_paths"])
        for (stratum, action, quantity), documents in counts.items()
        if quantity == "branch_cohort_documents"
    }


def _verdicts(rows: list[ViewRow]) -> dict[tuple[str, str, str], PublishedVerdict]:
    errors: dict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    decided = {}
    for row in rows:
        if row["quantity"].startswith("calibration_"):
            kind, observation, *verdict = row["quantity"].removeprefix("calibration_").split(":")
            place = row["action"], row["baseline"], _OBSERVATIONS[observation]
            errors[place][kind] = row["value"] * _POINT
            if kind == "error":
                decided[place] = verdict
    return {
        place: PublishedVerdict(_CANDIDATES[candidate], decision, errors[place])
        for place, (candidate, decision) in decided.items()
    }


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
        """Return the state to pickle, from which another process draws figures; open views cannot be pickled."""
        return self.__dict__ | {"source": None, "token_text": str}

    @property
    def baseline(self) -> str:
        """The action that contrasts subtract."""
        return self.actions[0]

    @property
    def others(self) -> list[str]:
        """The compared actions besides the baseline."""
        return self.actions[1:]

    @property
    def windows(self) -> Windows:
        """The study's horizon and windows."""
        return self.facts.windows

    @cached_property
    def residual_risks(self) -> list[ViewRow]:
        """Rows of ``swrb_risk`` that pool the strata of the page's split; empty if no unit is of residual branching."""
        return self.pooled("swrb_risk") if self.facts.branched else []

    @cached_property
    def ended(self) -> tuple[int, int]:
        """How many of the reference's texts X end within the horizon H, and how many X there are, in the page's split.

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
            if all(self.estimates.get("mismatch", action, stratum=stratum).estimate is None for action in self.actions)
        ]

    def pooled(self, view: str, **equal: object) -> list[ViewRow]:
        """Return the rows of ``view`` that pool the strata of the page's split and have the values ``equal``."""
        return self.source.of(view, split=self.split, stratum=POOLED, **equal)


def read_content(
    source: StudyRows,
    *,
    baseline: str | None = None,
    token_text: TokenReader | None = None,
    provenance: Provenance | None = None,
    latex: bool = False,
    preliminary: str = "",
) -> PageContent:
    """Read the content of a page; the arguments are those of ``kvdrift.report.page.build_report``."""
    facts = read_facts(source)
    if not facts.compared:
        raise InputError(f"study '{facts.study}' has only full-retention controls as actions: nothing to report")
    split = _split(source)
    estimates = read_estimates(source, split, facts.compared, planned=facts.plan is not None, branched=facts.branched)
    published = read_published(source, facts)
    if not published.mismatch:
        estimates.add_published(source.of("published_comparison"))
    chosen, reason = _baseline(facts, estimates, baseline)
    return PageContent(
        source=source,
        split=split,
        facts=facts,
        estimates=estimates,
        published=published,
        actions=[chosen, *(action for action in facts.compared if action != chosen)],
        baseline_reason=reason,
        token_text=token_text or str,
        provenance=provenance or Provenance(),
        latex=latex,
        preliminary=preliminary,
    )


def _split(source: StudyRows) -> str:
    """Return the split to report: evaluation, or development if evaluation has no derived trajectories yet."""
    for split in (EVALUATION, DEVELOPMENT):
        if source.of("decomposition", split=split, stratum=POOLED):
            return split
    raise InputError(f"study '{source.study}' has no derived trajectories yet; 'kvdrift derive' makes them")


def _baseline(facts: Facts, estimates: ReportedEstimates, requested: str | None) -> tuple[str, str]:
    """Return the baseline, by default the plan's or else the action of smallest R, and the reason for the choice."""
    if requested is not None:
        if requested not in facts.compared:
            raise InputError(f"no action '{requested}' in study '{facts.study}'; {nearest(requested, facts.compared)}")
        return requested, "as requested"
    planned = facts.plan.content.get("baseline") if facts.plan else None
    if planned in facts.compared:
        return str(planned), "as the plan says"
    known = {action: estimates.get("mismatch", action).estimate for action in facts.compared}
    least = min(facts.compared, key=lambda action: (known[action] is None, known[action] or 0.0, natural(action)))
    return least, "the action with the smallest mismatch"
