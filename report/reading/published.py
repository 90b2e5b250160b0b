"""The source paper's numbers for the study at hand, in our names, as fractions.

The view ``published_comparison`` finds the number beside each estimate. The verdicts of calibrations and the counts of
branch cohorts are no estimates: they are read here from the view ``published``, by the same rules. A study matches if
its model's id ends in the paper's name of a model (``meta-llama/Llama-3.1-8B-Instruct``) and if its horizon and windows
are the paper's, and if its tokens are drawn from the full softmax at temperature 1; actions and strata match by equal
names. If only the horizon, a window or the law differs, no published number is shown, and the page says why.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvdrift.report.reading.estimates import Place, Published
from kvdrift.report.reading.facts import Facts
from kvdrift.report.reading.source import StudyRows, ViewRow
from kvdrift.schema.sampling import FULL_SOFTMAX
from kvdrift.schema.windows import Windows

_WINDOWS = Windows.of(128)  # the windows of both of the paper's studies
_POINT = 0.01  # the paper prints errors of calibrations in percentage points
_OBSERVATIONS = {"fixed_history": "fixed_history", "positions_1_32": "positions"}
_CANDIDATES = {"cell_mean": "stratum_action_mean", "ridge": "ridge", "flat": "flat"}


@dataclass(frozen=True)
class PublishedVerdict:
    """The paper's result of one calibration: its selected predictor, decision and errors."""

    candidate: str
    decision: str
    error: Published
    mae: float | None
    rmse: float | None


@dataclass(frozen=True)
class PublishedStudy:
    """The paper's results for this model's actions; empty if nothing matches."""

    numbers: dict[Place, Published] = field(default_factory=dict)  # by quantity, stratum, action, baseline and x
    # by action, baseline and observation
    verdicts: dict[tuple[str, str, str], PublishedVerdict] = field(default_factory=dict)
    # documents and paths of a branch cohort, by stratum and action
    support: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    # a sentence for the page if the paper has this model and these actions, but other windows or another law
    mismatch: str = ""


def read_published(source: StudyRows, facts: Facts) -> PublishedStudy:
    """Read the paper's numbers for this study's model and actions."""
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
    return PublishedStudy(_numbers(source), _verdicts(rows), _support(rows))


def _measured_with(facts: Facts) -> str:
    """Return in which way the paper measured other than the study, in words; empty if in no way."""
    if facts.windows != _WINDOWS:
        what = "the default windows" if facts.windows.horizon == _WINDOWS.horizon else "another horizon"
        return f"{what} and a horizon of {_WINDOWS.horizon} tokens"
    return FULL_SOFTMAX.words if facts.other_law else ""


def is_model(model: str, published: str | None) -> bool:
    """Tell whether a model id ends in the paper's name of a model."""
    return published is not None and f"/{model}".lower().rstrip("/").endswith(f"/{published}".lower())


def _numbers(source: StudyRows) -> dict[Place, Published]:
    numbers: dict[Place, Published] = {}
    for row in source.of("published_comparison"):
        place = row["quantity"], row["stratum"], row["action"], row["baseline"], row["x"]
        numbers[place] = Published(row["published"], row["published_low"], row["published_high"])
    return numbers


def _support(rows: list[ViewRow]) -> dict[tuple[str, str], tuple[float, float]]:
    counts = {(row["stratum"], row["action"], row["quantity"]): row["value"] for row in rows}
    return {
        (stratum, action): (documents, counts[stratum, action, "branch_cohort_paths"])
        for (stratum, action, quantity), documents in counts.items()
        if quantity == "branch_cohort_documents"
    }


def _verdicts(rows: list[ViewRow]) -> dict[tuple[str, str, str], PublishedVerdict]:
    printed = [row for row in rows if row["quantity"].startswith("calibration_")]
    errors = {(row["action"], row["baseline"], row["quantity"]): row["value"] * _POINT for row in printed}
    verdicts = {}
    for row in printed:
        kind, *rest = row["quantity"].split(":")
        if kind != "calibration_error":
            continue
        observation, candidate, decision = rest
        contrast = row["action"], row["baseline"]
        mae, rmse = (errors.get((*contrast, f"calibration_{error}:{observation}")) for error in ("mae", "rmse"))
        verdict = PublishedVerdict(_CANDIDATES[candidate], decision, _error(row), mae, rmse)
        verdicts[*contrast, _OBSERVATIONS[observation]] = verdict
    return verdicts


def _error(row: ViewRow) -> Published:
    low, high = (None if row[end] is None else row[end] * _POINT for end in ("low", "high"))
    return Published(row["value"] * _POINT, low, high)
