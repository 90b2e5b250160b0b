"""Every quantity that the page shows: its name in ``estimates``, its symbol, its unit, and the view that has its point.

Names and symbols are those of the definitions page. Stored values are fractions; a unit says how they are printed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

POOLED = "pooled"
PRESPECIFIED = "prespecified"
EXPLORATORY = "exploratory"
PRIMARY = "primary"


class Unit(Enum):
    """How a stored value is printed: its factor and what stands beside it."""

    PERCENT = (100.0, "%")
    POINTS = (100.0, "pp")
    TOKENS = (1.0, "tokens")
    RATIO = (1.0, "×")
    SQUARED_POINTS = (10_000.0, "pp²")
    PAIRS = (1.0, "pairs")
    MILLISECONDS = (1_000.0, "ms")

    @property
    def factor(self) -> float:
        """Printed value / stored value."""
        return self.value[0]

    @property
    def sign(self) -> str:
        """What stands in a column head: %, pp (percentage points), tokens and so on; pairs are of kernels."""
        return self.value[1]


@dataclass(frozen=True)
class Quantity:
    """One quantity as a reader meets it."""

    name: str
    symbol: str
    label: str
    unit: Unit


def _all(*quantities: tuple[str, str, str, Unit]) -> dict[str, Quantity]:
    return {row[0]: Quantity(*row) for row in quantities}


_PERCENT, _POINTS, _TOKENS = Unit.PERCENT, Unit.POINTS, Unit.TOKENS

QUANTITIES: dict[str, Quantity] = _all(
    ("mismatch", "R (token)", "positions with different tokens", _PERCENT),
    ("rollout_tv", "R (TV)", "mean total variation, own histories", _PERCENT),
    ("fixed_history_tv", "F", "mean total variation along X", _PERCENT),
    ("occurrence", "O", "first mismatches per position", _PERCENT),
    ("exposure", "E", "positions after the first mismatch", _PERCENT),
    ("occupation", "Π", "mismatches after the first", _PERCENT),
    ("mismatch_rate", "C", "mismatch rate while exposed", _PERCENT),
    ("divergence_probability", "P(τ\u00a0≤\u00a0H)", "continuations that diverge", _PERCENT),
    ("mean_entry", "mean τ", "mean entry, given divergence", _TOKENS),
    ("saturation", "S", "positions with saturated δ", _PERCENT),
    ("cohort_fraction", "P(τ\u00a0≤\u00a0T)", "continuations in the cohort", _PERCENT),
    ("early", "early δ", "mean over early lags", _PERCENT),
    ("late", "late δ", "mean over late lags", _PERCENT),
    ("late_minus_early", "late − early", "change along the branch", _POINTS),
    ("early_pre_eos", "early, pre-EOS", "early lags before either EOS", _PERCENT),
    ("late_pre_eos", "late, pre-EOS", "late lags before either EOS", _PERCENT),
    ("late_minus_early_pre_eos", "late − early, pre-EOS", "change before either EOS", _POINTS),
    ("early_pre_eos_fraction", "early steps", "early lags that come before either EOS", _PERCENT),
    ("late_pre_eos_fraction", "late steps", "late lags that come before either EOS", _PERCENT),
    ("long_agreement", "long agreement", "cohort with a long run of equal tokens", _PERCENT),
    ("mismatch_after_agreement", "mismatch after agreement", "cohort that parts again", _PERCENT),
    ("eos_gap", "G", "share of R (TV) − F in an EOS set", _POINTS),
    ("generation_block_delta", "δ, block", "mean δ in a block of positions", _PERCENT),
    ("generation_block_f", "f, block", "mean f in a block of positions", _PERCENT),
    ("generation_block_mismatch", "I, block", "mismatch in a block of positions", _PERCENT),
    ("entry_cdf", "P(τ\u00a0≤\u00a0t)", "diverged by position t", _PERCENT),
    ("survival", "P(τ ≥ s)", "not yet diverged before s", _PERCENT),
    ("hazard", "λ", "first mismatch at s, given none before", _PERCENT),
    ("generation_delta", "E[δ_t]", "total variation at position t", _PERCENT),
    ("generation_f", "E[f_t]", "total variation along X at t", _PERCENT),
    ("generation_mismatch", "E[I_t]", "mismatch at position t", _PERCENT),
    ("branch_delta", "E[δ at τ + j]", "total variation at lag j", _PERCENT),
    ("branch_mismatch", "E[I at τ + j]", "mismatch at lag j", _PERCENT),
    ("branch_pre_eos_fraction", "P(τ + j < e | τ ≤ T)", "lag j comes before either EOS", _PERCENT),
    ("gap", "ΔR", "gap in R (token)", _POINTS),
    ("occurrence_term", "ΔO", "occurrence term", _POINTS),
    ("exposure_term", "ΔE · C̄", "exposure term", _POINTS),
    ("rate_term", "ΔC · Ē", "rate term", _POINTS),
    ("occurrence_share", "occurrence share", "of the gap", _PERCENT),
    ("exposure_share", "exposure share", "of the gap", _PERCENT),
    ("rate_share", "rate share", "of the gap", _PERCENT),
    ("rollout_tv_gap", "ΔR (TV)", "gap in R (TV)", _POINTS),
    ("fixed_history_gap", "ΔF", "gap in F", _POINTS),
    ("flat_extrapolation_gap", "flat gap", "gap in R (token) of block 1, extrapolated flat", _POINTS),
    ("full_minus_fixed_history", "ΔR (TV) − ΔF", "what fixed history misses", _POINTS),
    ("full_minus_flat_extrapolation", "ΔR (TV) − flat gap", "what flat extrapolation misses", _POINTS),
    ("history_gap", "Δ(R − F)", "gap due to histories", _POINTS),
    ("pre_eos", "ΔG₀", "of it before either EOS", _POINTS),
    ("eos_related", "Δ(G₁+G₂+G₃)", "of it at or after an EOS", _POINTS),
    ("eos_share", "EOS share", "of Δ(R − F)", _PERCENT),
    ("generation_gap", "g", "gap in δ in a block", _POINTS),
    ("generation_gap_change", "Δg", "last block − first block", _POINTS),
    ("swrb_mismatch", "R (SWRB)", "R by residual branching", _PERCENT),
    ("plain_mismatch", "R (coupled)", "R from coupled pairs of the same documents", _PERCENT),
    ("swrb_occurrence", "O (SWRB)", "O by residual branching", _PERCENT),
    ("swrb_occupation", "Π (SWRB)", "Π by residual branching", _PERCENT),
    ("swrb_divergence_probability", "mean M", "mass of the branches: pairs that diverge", _PERCENT),
    ("plain_variance", "variance, coupled", "of R in one coupled pair", Unit.SQUARED_POINTS),
    ("swrb_variance", "variance, SWRB", "of R in one SWRB replicate", Unit.SQUARED_POINTS),
    ("plain_evaluations", "evaluations, coupled", "kernel pairs evaluated per coupled pair", Unit.PAIRS),
    ("swrb_evaluations", "evaluations, SWRB", "kernel pairs evaluated per SWRB replicate", Unit.PAIRS),
    ("plain_seconds", "time, coupled", "decoding time per coupled pair", Unit.MILLISECONDS),
    ("swrb_seconds", "time, SWRB", "decoding time per SWRB replicate", Unit.MILLISECONDS),
    ("variance_ratio", "variance ratio", "variance of a coupled pair / of an SWRB replicate", Unit.RATIO),
    ("evaluation_ratio", "evaluations ratio", "kernel pairs of an SWRB replicate / of a coupled pair", Unit.RATIO),
    ("second_ratio", "time ratio", "decoding time of an SWRB replicate / of a coupled pair", Unit.RATIO),
    ("efficiency", "efficiency", "variance ratio / evaluations ratio", Unit.RATIO),
    ("efficiency_in_seconds", "efficiency in time", "variance ratio / time ratio", Unit.RATIO),
)

DIFFERENCE = "_difference"


def known_quantity(name: str) -> Quantity | None:
    """The quantity of that name; the paired difference of a known one is known too."""
    if name in QUANTITIES or not name.endswith(DIFFERENCE):
        return QUANTITIES.get(name)
    base = QUANTITIES.get(name.removesuffix(DIFFERENCE))
    if base is None:
        return None
    unit = _TOKENS if base.unit is _TOKENS else _POINTS
    return Quantity(name, f"Δ {base.symbol}", f"difference: {base.label}", unit)


@dataclass(frozen=True)
class PointView:
    """A view with point estimates: its columns with their names in ``estimates``, and where x comes from.

    ``one_of_many`` is a column that is null in rows of many: the others are of one document.
    """

    view: str
    columns: dict[str, str]
    x: str | None = None
    contrast: bool = False
    one_of_many: str | None = None


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


POINT_VIEWS: tuple[PointView, ...] = (
    PointView(
        "decomposition",
        _same(
            "mismatch",
            "rollout_tv",
            "fixed_history_tv",
            "occurrence",
            "exposure",
            "occupation",
            "mismatch_rate",
            "divergence_probability",
            "mean_entry",
        ),
    ),
    PointView(
        "contrasts",
        _same(
            "gap",
            "occurrence_term",
            "exposure_term",
            "rate_term",
            "occurrence_share",
            "exposure_share",
            "rate_share",
        ),
        contrast=True,
    ),
    PointView("entry", _same("entry_cdf", "survival", "hazard"), x="t"),
    PointView(
        "generation_clock",
        {"delta": "generation_delta", "f": "generation_f", "mismatch": "generation_mismatch"},
        x="t",
    ),
    PointView(
        "generation_blocks",
        {"delta": "generation_block_delta", "f": "generation_block_f", "mismatch": "generation_block_mismatch"},
        x="block",
    ),
    PointView("generation_gaps", {"gap": "generation_gap"}, x="block", contrast=True),
    PointView("generation_gap_change", _same("generation_gap_change"), contrast=True),
    PointView(
        "branch_clock",
        {"delta": "branch_delta", "mismatch": "branch_mismatch", "pre_eos_fraction": "branch_pre_eos_fraction"},
        x="lag",
    ),
    PointView(
        "branch_windows",
        _same(
            "cohort_fraction",
            "early",
            "late",
            "late_minus_early",
            "early_pre_eos",
            "late_pre_eos",
            "late_minus_early_pre_eos",
            "early_pre_eos_fraction",
            "late_pre_eos_fraction",
        ),
    ),
    PointView("local_agreement", _same("long_agreement", "mismatch_after_agreement")),
    PointView("saturation", _same("saturation")),
    PointView("eos_partition", {"gap": "eos_gap"}, x="eos_set"),
    PointView("eos_contrasts", _same("history_gap", "pre_eos", "eos_related", "eos_share"), contrast=True),
    PointView(
        "swrb_risk",
        {
            "mismatch": "swrb_mismatch",
            "plain_mismatch": "plain_mismatch",
            "occurrence": "swrb_occurrence",
            "occupation": "swrb_occupation",
            "divergence_probability": "swrb_divergence_probability",
        },
    ),
    PointView(
        "swrb_efficiency",
        _same("variance_ratio", "evaluation_ratio", "second_ratio", "efficiency", "efficiency_in_seconds"),
        one_of_many="doc",
    ),
)
