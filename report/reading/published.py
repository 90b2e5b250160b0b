"""The source paper's numbers for the study at hand, in our names, as fractions.

The view ``published`` has them as printed. They stand beside a study of the same model (by the end of its id:
``meta-llama/Llama-3.1-8B-Instruct``), the same horizon and the same windows, action and stratum by equal names. Where
only the horizon or a window differs nothing is set beside the study's numbers, and the page says why.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from report.reading.estimates import Place, Published
from report.reading.facts import Facts
from report.reading.source import StudyRows, ViewRow
from schema.study import POOLED
from schema.windows import Windows

_WINDOWS = Windows.of(128)  # the paper's, in both of its studies
_BLOCKS = {f"{first}-{last}": place for place, (first, last) in enumerate(_WINDOWS.blocks, 1)}

_SCALE = {"%": 0.01, "pp": 0.01, "steps": 1.0, "fraction": 1.0, "count": 1.0}
_FIGURE = "_figure"  # the same number as printed in a figure, perhaps with an interval that the text leaves out

# Those that have our names; the others by their names in the paper.
_NAMES = {name: name for name in (
    "exposure_term", "rate_term", "occurrence_term", "exposure_share", "eos_share", "rollout_tv_gap",
    "fixed_history_gap", "flat_extrapolation_gap", "full_minus_fixed_history", "full_minus_flat_extrapolation",
)} | {
    "divergence_cdf": "entry_cdf",
    "mean_entry_given_divergence": "mean_entry",
    "token_mismatch_gap": "gap",
    "branch_cohort_fraction": "cohort_fraction",
    "branch_tv": "branch_delta",
    "early_branch_tv": "early",
    "late_branch_tv": "late",
    "late_minus_early_branch_tv": "late_minus_early",
    "late_minus_early_pre_eos_branch_tv": "late_minus_early_pre_eos",
    "saturation_99": "saturation",
    "sixteen_consecutive_pre_eos_agreements": "long_agreement",
    "generation_clock_tv_gap": "generation_gap",
    "generation_clock_gap_change": "generation_gap_change",
    "history_gap_difference": "history_gap",
    "history_gap_difference_pre_eos": "pre_eos",
}  # fmt: skip
_OBSERVATIONS = {"fixed_history": "fixed_history", "positions_1_32": "positions"}
_CANDIDATES = {"cell_mean": "stratum_action_mean", "ridge": "ridge", "flat": "flat"}


@dataclass(frozen=True)
class PublishedVerdict:
    """What the paper prints of one calibration: its selected predictor, decision and errors."""

    candidate: str
    decision: str
    error: Published
    mae: float | None
    rmse: float | None


@dataclass(frozen=True)
class PublishedStudy:
    """What the paper prints for this model's actions; empty where nothing matches.

    Attributes:
        numbers: by quantity, stratum, action, baseline and x.
        verdicts: by action, baseline and observation.
        support: documents and paths of a branch cohort, by stratum and action.
        mismatch: a sentence for the page where the paper has this model and these actions, but other windows.

    """

    numbers: dict[Place, Published] = field(default_factory=dict)
    verdicts: dict[tuple[str, str, str], PublishedVerdict] = field(default_factory=dict)
    support: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    mismatch: str = ""


def read_published(source: StudyRows, facts: Facts) -> PublishedStudy:
    """The paper's numbers for this study's model and actions."""
    actions = set(facts.compared)
    rows = [
        row
        for row in source.views.rows("published").to_pylist()
        if is_model(facts.model, row["model"]) and row["action"] in actions and row["baseline"] in {None, *actions}
    ]
    if rows and facts.windows != _WINDOWS:
        what = "the default windows" if facts.windows.horizon == _WINDOWS.horizon else "another horizon"
        return PublishedStudy(
            mismatch=f"The source paper has this model and actions of these names, measured with {what} and a horizon "
            f"of {_WINDOWS.horizon} tokens. Its numbers are not shown, because this study measures other quantities."
        )
    return PublishedStudy(_numbers(rows), _verdicts(rows), _support(rows))


def is_model(model: str, published: str | None) -> bool:
    """Whether a model id ends in the paper's name of a model."""
    return published is not None and f"/{model}".lower().rstrip("/").endswith(f"/{published}".lower())


def _numbers(rows: list[ViewRow]) -> dict[Place, Published]:
    found: dict[Place, Published] = {}
    for row in rows:
        name = _NAMES.get(row["quantity"].removesuffix(_FIGURE))
        if name is None:
            continue
        x = None if row["x"] is None else _BLOCKS[row["x"]] if row["x"] in _BLOCKS else int(row["x"])
        number = _number(row)
        places = [(name, x)]
        if name == "entry_cdf" and x == _WINDOWS.horizon:
            places.append(("divergence_probability", None))
        for quantity, place in places:
            key = (quantity, row["stratum"] or POOLED, row["action"], row["baseline"], place)
            if key not in found or found[key].low is None:  # printed twice: the one with an interval
                found[key] = number
    return found


def _support(rows: list[ViewRow]) -> dict[tuple[str, str], tuple[float, float]]:
    counts = {(row["stratum"], row["action"], row["quantity"]): row["value"] for row in rows}
    return {
        (stratum, action): (documents, counts[stratum, action, "branch_cohort_paths"])
        for (stratum, action, quantity), documents in counts.items()
        if quantity == "branch_cohort_documents"
    }


def _verdicts(rows: list[ViewRow]) -> dict[tuple[str, str, str], PublishedVerdict]:
    errors = {(row["action"], row["baseline"], row["quantity"]): _number(row).value for row in rows}
    verdicts = {}
    for row in rows:
        kind, *rest = row["quantity"].split(":")
        if kind != "calibration_error":
            continue
        observation, candidate, decision = rest
        contrast = row["action"], row["baseline"]
        mae, rmse = (errors.get((*contrast, f"calibration_{error}:{observation}")) for error in ("mae", "rmse"))
        verdict = PublishedVerdict(_CANDIDATES[candidate], decision, _number(row), mae, rmse)
        verdicts[*contrast, _OBSERVATIONS[observation]] = verdict
    return verdicts


def _number(row: ViewRow) -> Published:
    scale = _SCALE[row["unit"]]
    low, high = (None if row[end] is None else row[end] * scale for end in ("low", "high"))
    return Published(row["value"] * scale, low, high)
