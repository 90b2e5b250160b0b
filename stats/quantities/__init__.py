"""Every reported quantity of the definitions page: its function, label, meaning, scale, and the view that has it.

A new quantity is added here and nowhere else; one of answers in ``stats.quantities.answers``, one of residual branching
in ``stats.branching_quantities``. Names are what ``results.quantity`` carries; they are the column names of the SQL
views where those are unique. What a function may do with its moments is in ``stats.registry``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from schema.errors import InputError, nearest
from stats.branching_quantities import BRANCHING_QUANTITIES
from stats.quantities.answers import ANSWER_QUANTITIES
from stats.registry import (
    Array,
    Higher,
    Pooled,
    Quantity,
    Range,
    Scale,
    action_quantity,
    contrast_quantity,
    difference_of,
    ratio,
    register_difference,
    registered,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

PERCENT, POINTS, TOKENS = Scale.PERCENT, Scale.POINTS, Scale.TOKENS
WORSE, BETTER = Higher.WORSE, Higher.BETTER

# Decomposition (definitions, "Decomposition") -----------------------------------------------------------------------


@action_quantity("R (token)", "positions with different tokens", PERCENT, "decomposition", higher=WORSE)
def mismatch(m: Pooled) -> Array:
    """R, token estimator: M(sum_t I_t / H)."""
    return m["mismatch"]


@action_quantity("R (TV)", "mean total variation, own histories", PERCENT, "decomposition", higher=WORSE)
def rollout_tv(m: Pooled) -> Array:
    """R, TV estimator: M(sum_t delta_t / H)."""
    return m["rollout_tv"]


@action_quantity("F", "mean total variation along X", PERCENT, "decomposition", higher=WORSE)
def fixed_history_tv(m: Pooled) -> Array:
    """F: M(sum_t f_t / H)."""
    return m["fixed_history_tv"]


@action_quantity(
    "O", "first mismatches per position", PERCENT, "decomposition", values=Range.PER_POSITION, higher=WORSE
)
def occurrence(m: Pooled) -> Array:
    """O_H: M(1{tau <= H}) / H."""
    return m["diverged"] / m.windows.horizon


@action_quantity("E", "positions after the first mismatch", PERCENT, "decomposition", higher=WORSE)
def exposure(m: Pooled) -> Array:
    """E_H: M((H - tau) 1{tau <= H}) / H."""
    return m["exposure"]


@action_quantity("Π", "mismatches after the first", PERCENT, "decomposition", higher=WORSE)
def occupation(m: Pooled) -> Array:
    """Pi_H: M(sum_{t > tau} I_t) / H."""
    return m["occupation"]


@action_quantity("C", "mismatch rate while exposed", PERCENT, "decomposition", higher=WORSE)
def mismatch_rate(m: Pooled) -> Array:
    """C_H: Pi / E, 0 when E = 0, so that R = O + E C always holds."""
    rate = ratio(m["occupation"], m["exposure"])
    return np.where(m["exposure"] == 0, 0.0, rate)


@action_quantity("P(τ\u00a0≤\u00a0H)", "continuations that diverge", PERCENT, "decomposition", higher=WORSE)
def divergence_probability(m: Pooled) -> Array:
    """P(tau <= H)."""
    return m["diverged"]


@action_quantity("mean τ", "mean entry, given divergence", TOKENS, "decomposition", higher=BETTER)
def mean_entry(m: Pooled) -> Array:
    """M(tau 1{tau <= H}) / M(1{tau <= H}), in tokens."""
    return ratio(m["entry"], m["diverged"])


# Saturation, branch cohort, local agreement (definitions, "Two clocks") ----------------------------------------------


@action_quantity("S", "positions with saturated δ", PERCENT, "saturation", higher=WORSE)
def saturation(m: Pooled) -> Array:
    """S: M(sum_t 1{delta_t > threshold}) / H."""
    return m["saturation"]


@action_quantity("P(τ\u00a0≤\u00a0T)", "continuations in the cohort", PERCENT, "branch_windows", higher=WORSE)
def cohort_fraction(m: Pooled) -> Array:
    """M(1{tau <= T}): the fixed branch cohort as a fraction of all trajectories."""
    return m["cohort"]


@action_quantity("early δ", "mean over early lags", PERCENT, "branch_windows", higher=WORSE)
def early(m: Pooled) -> Array:
    """Mean over early lags of E[delta_{tau+j} | tau <= T]."""
    return ratio(m["early_delta"], m["cohort"])


@action_quantity("late δ", "mean over late lags", PERCENT, "branch_windows", higher=WORSE)
def late(m: Pooled) -> Array:
    """Mean over late lags of E[delta_{tau+j} | tau <= T]."""
    return ratio(m["late_delta"], m["cohort"])


@action_quantity("late − early", "change along the branch", POINTS, "branch_windows")
def late_minus_early(m: Pooled) -> Array:
    """B: late - early."""
    return late(m) - early(m)


@action_quantity("early, pre-EOS", "early lags before either EOS", PERCENT, "branch_windows", higher=WORSE)
def early_pre_eos(m: Pooled) -> Array:
    """Pre-EOS branch mean over the early lags: a ratio of summed moments."""
    return ratio(m["early_pre_eos_delta"], m["early_pre_eos_steps"])


@action_quantity("late, pre-EOS", "late lags before either EOS", PERCENT, "branch_windows", higher=WORSE)
def late_pre_eos(m: Pooled) -> Array:
    """Pre-EOS branch mean over the late lags."""
    return ratio(m["late_pre_eos_delta"], m["late_pre_eos_steps"])


@action_quantity("late − early, pre-EOS", "change before either EOS", POINTS, "branch_windows")
def late_minus_early_pre_eos(m: Pooled) -> Array:
    """Pre-EOS late - early; each mean has the surviving steps of its own lags."""
    return late_pre_eos(m) - early_pre_eos(m)


@action_quantity("early steps", "early lags that come before either EOS", PERCENT, "branch_windows")
def early_pre_eos_fraction(m: Pooled) -> Array:
    """Step fraction: M(early pre-EOS steps) / (|J| M(1{tau <= T}))."""
    return ratio(m["early_pre_eos_steps"], m.windows.early_lags * m["cohort"])


@action_quantity("late steps", "late lags that come before either EOS", PERCENT, "branch_windows")
def late_pre_eos_fraction(m: Pooled) -> Array:
    """Step fraction: M(late pre-EOS steps) / (|J| M(1{tau <= T}))."""
    return ratio(m["late_pre_eos_steps"], m.windows.late_lags * m["cohort"])


@action_quantity("long agreement", "cohort with a long run of equal tokens", PERCENT, "local_agreement", higher=BETTER)
def long_agreement(m: Pooled) -> Array:
    """Fraction of the branch cohort with a long run of agreements after tau, before EOS."""
    return ratio(m["long_agreement"], m["cohort"])


@action_quantity("mismatch after agreement", "cohort that parts again", PERCENT, "local_agreement")
def mismatch_after_agreement(m: Pooled) -> Array:
    """Fraction of the branch cohort with a mismatch after an agreement, before EOS."""
    return ratio(m["mismatch_after_agreement"], m["cohort"])


# EOS partition and generation-clock blocks ---------------------------------------------------------------------------


@action_quantity("G", "share of R (TV) − F in an EOS set", POINTS, "eos_partition", "gap", "eos_set")
def eos_gap(m: Pooled) -> Array:
    """G_r, r = 0..3 (definitions, "EOS partition"); they sum to R (TV) - F."""
    return np.stack([m[f"eos_gap_{r}"] for r in range(4)], axis=-1)


def _blocks(m: Pooled, column: str) -> Array:
    return np.stack([m[f"block_{block}_{column}"] for block in (1, 2, 3)], axis=-1)


@action_quantity("δ, block", "mean δ in a block of positions", PERCENT, "generation_blocks", "delta", "block")
def generation_block_delta(m: Pooled) -> Array:
    """Mean of E[delta_t] over blocks 1, 2, 3 of the generation clock."""
    return _blocks(m, "delta")


@action_quantity("f, block", "mean f in a block of positions", PERCENT, "generation_blocks", "f", "block")
def generation_block_f(m: Pooled) -> Array:
    """Mean of E[f_t] over blocks 1, 2, 3."""
    return _blocks(m, "f")


@action_quantity("I, block", "mismatch in a block of positions", PERCENT, "generation_blocks", "mismatch", "block")
def generation_block_mismatch(m: Pooled) -> Array:
    """Mean of E[I_t] over blocks 1, 2, 3."""
    return _blocks(m, "mismatch")


# Profiles over t (definitions, "Survival and hazard", "Two clocks") --------------------------------------------------


@action_quantity(
    "P(τ\u00a0≤\u00a0t)", "diverged by position t", PERCENT, "entry", axis="t", profile=("first_mismatch",)
)
def entry_cdf(m: Pooled) -> Array:
    """P(tau <= t)."""
    return m.until("first_mismatch")


@action_quantity("P(τ ≥ s)", "not yet diverged before s", PERCENT, "entry", axis="t", profile=("first_mismatch",))
def survival(m: Pooled) -> Array:
    """S_t = P(tau >= t)."""
    probability: Array = (1.0 - m["diverged"])[..., None] + m.since("first_mismatch")
    return probability


@action_quantity("λ", "first mismatch at s, given none before", PERCENT, "entry", axis="t", profile=("first_mismatch",))
def hazard(m: Pooled) -> Array:
    """lambda_t = p_t / S_t; undefined where S_t = 0."""
    return ratio(m.profile("first_mismatch"), survival(m))


@action_quantity("E[δ_t]", "total variation at position t", PERCENT, "generation_clock", "delta", "t", ("delta",))
def generation_delta(m: Pooled) -> Array:
    """E[delta_t]."""
    return m.profile("delta")


@action_quantity("E[f_t]", "total variation along X at t", PERCENT, "generation_clock", "f", "t", ("f",))
def generation_f(m: Pooled) -> Array:
    """E[f_t]."""
    return m.profile("f")


@action_quantity("E[I_t]", "mismatch at position t", PERCENT, "generation_clock", "mismatch", "t", ("mismatch",))
def generation_mismatch(m: Pooled) -> Array:
    """E[I_t]."""
    return m.profile("mismatch")


# Profiles over the lag, in the fixed cohort tau <= T ----------------------------------------------------------------


@action_quantity(
    "E[δ at τ + j]", "total variation at lag j", PERCENT, "branch_clock", "delta", "lag", ("cohort_delta",)
)
def branch_delta(m: Pooled) -> Array:
    """E[delta_{tau+j} | tau <= T]."""
    return ratio(m.profile("cohort_delta"), m["cohort"][..., None])


@action_quantity("E[I at τ + j]", "mismatch at lag j", PERCENT, "branch_clock", "mismatch", "lag", ("cohort_mismatch",))
def branch_mismatch(m: Pooled) -> Array:
    """E[I_{tau+j} | tau <= T]."""
    return ratio(m.profile("cohort_mismatch"), m["cohort"][..., None])


@action_quantity(
    "P(τ + j < e | τ ≤ T)",
    "lag j comes before either EOS",
    PERCENT,
    "branch_clock",
    "pre_eos_fraction",
    "lag",
    ("cohort_pre_eos",),
)
def branch_pre_eos_fraction(m: Pooled) -> Array:
    """P(tau + j < e | tau <= T): the step fraction of the one-lag block {j}."""
    return ratio(m.profile("cohort_pre_eos"), m["cohort"][..., None])


# Contrasts of action b against baseline a (definitions, "Contrast", "EOS partition") ---------------------------------


@contrast_quantity("ΔR", "gap in R (token)", POINTS, "contrasts", of="mismatch")
def gap(a: Pooled, b: Pooled) -> Array:
    """Delta R = R(b) - R(a), token estimator."""
    return mismatch(b) - mismatch(a)


@contrast_quantity("ΔO", "occurrence term", POINTS, "contrasts", of="occurrence")
def occurrence_term(a: Pooled, b: Pooled) -> Array:
    """Delta O; the three terms sum to the gap."""
    return occurrence(b) - occurrence(a)


@contrast_quantity("ΔE · C̄", "exposure term", POINTS, "contrasts", higher=WORSE)
def exposure_term(a: Pooled, b: Pooled) -> Array:
    """Delta E times the mean C of the two."""
    term: Array = (exposure(b) - exposure(a)) * (mismatch_rate(a) + mismatch_rate(b)) / 2
    return term


@contrast_quantity("ΔC · Ē", "rate term", POINTS, "contrasts", higher=WORSE)
def rate_term(a: Pooled, b: Pooled) -> Array:
    """Delta C times the mean E of the two."""
    term: Array = (mismatch_rate(b) - mismatch_rate(a)) * (exposure(a) + exposure(b)) / 2
    return term


@contrast_quantity("occurrence share", "of the gap", PERCENT, "contrasts", values=Range.UNBOUNDED)
def occurrence_share(a: Pooled, b: Pooled) -> Array:
    """occurrence_term / gap."""
    return ratio(occurrence_term(a, b), gap(a, b))


@contrast_quantity("exposure share", "of the gap", PERCENT, "contrasts", values=Range.UNBOUNDED)
def exposure_share(a: Pooled, b: Pooled) -> Array:
    """exposure_term / gap."""
    return ratio(exposure_term(a, b), gap(a, b))


@contrast_quantity("rate share", "of the gap", PERCENT, "contrasts", values=Range.UNBOUNDED)
def rate_share(a: Pooled, b: Pooled) -> Array:
    """rate_term / gap."""
    return ratio(rate_term(a, b), gap(a, b))


@contrast_quantity("ΔR (TV)", "gap in R (TV)", POINTS, of="rollout_tv")
def rollout_tv_gap(a: Pooled, b: Pooled) -> Array:
    """Delta R, TV estimator."""
    return rollout_tv(b) - rollout_tv(a)


@contrast_quantity("ΔF", "gap in F", POINTS, of="fixed_history_tv")
def fixed_history_gap(a: Pooled, b: Pooled) -> Array:
    """Delta F."""
    return fixed_history_tv(b) - fixed_history_tv(a)


@contrast_quantity("flat gap", "gap in R (token) of block 1, extrapolated flat", POINTS, higher=WORSE)
def flat_extrapolation_gap(a: Pooled, b: Pooled) -> Array:
    """Delta of (H/W) M(sum_{t <= W} I_t / H): token mismatch of positions 1..W extrapolated flat."""
    # (H/W) prefix_mismatch is the mean of I_t over block 1, which is null where the window is empty.
    return b["block_1_mismatch"] - a["block_1_mismatch"]


@contrast_quantity("ΔR (TV) − ΔF", "what fixed history misses", POINTS, values=Range.SECOND_DIFFERENCE)
def full_minus_fixed_history(a: Pooled, b: Pooled) -> Array:
    """rollout_tv_gap - fixed_history_gap (paper, table trajectory-uncalibrated)."""
    return rollout_tv_gap(a, b) - fixed_history_gap(a, b)


@contrast_quantity("ΔR (TV) − flat gap", "what flat extrapolation misses", POINTS, values=Range.SECOND_DIFFERENCE)
def full_minus_flat_extrapolation(a: Pooled, b: Pooled) -> Array:
    """rollout_tv_gap - flat_extrapolation_gap (paper, table trajectory-uncalibrated)."""
    return rollout_tv_gap(a, b) - flat_extrapolation_gap(a, b)


@contrast_quantity("Δ(R − F)", "gap due to histories", POINTS, "eos_contrasts", values=Range.SECOND_DIFFERENCE)
def history_gap(a: Pooled, b: Pooled) -> Array:
    """Delta (R - F), TV estimators."""
    return rollout_tv_gap(a, b) - fixed_history_gap(a, b)


@contrast_quantity("ΔG₀", "of it before either EOS", POINTS, "eos_contrasts", values=Range.SECOND_DIFFERENCE)
def pre_eos(a: Pooled, b: Pooled) -> Array:
    """Delta G_0."""
    return b["eos_gap_0"] - a["eos_gap_0"]


@contrast_quantity("Δ(G₁+G₂+G₃)", "of it at or after an EOS", POINTS, "eos_contrasts", values=Range.SECOND_DIFFERENCE)
def eos_related(a: Pooled, b: Pooled) -> Array:
    """Sum of Delta G_r over r >= 1."""
    total: Array = (eos_gap(b) - eos_gap(a))[..., 1:].sum(axis=-1)
    return total


@contrast_quantity("EOS share", "of Δ(R − F)", PERCENT, "eos_contrasts", values=Range.UNBOUNDED)
def eos_share(a: Pooled, b: Pooled) -> Array:
    """EOS share of Delta (R - F); may be negative."""
    return ratio(eos_related(a, b), history_gap(a, b))


@contrast_quantity("g", "gap in δ in a block", POINTS, "generation_gaps", "gap", "block")
def generation_gap(a: Pooled, b: Pooled) -> Array:
    """g_J: difference of the block means of E[delta_t], J = 1, 2, 3."""
    return generation_block_delta(b) - generation_block_delta(a)


@contrast_quantity("Δg", "last block − first block", POINTS, "generation_gap_change", values=Range.SECOND_DIFFERENCE)
def generation_gap_change(a: Pooled, b: Pooled) -> Array:
    """Delta g = g_3 - g_1."""
    blocks = generation_gap(a, b)
    return blocks[..., 2] - blocks[..., 0]


# Differences that no term above gives: which action diverges more often or later, and which is worse on a branch.
for _name in (
    "divergence_probability", "mean_entry", "mismatch_rate", "saturation", "cohort_fraction", "early", "late",
    "late_minus_early", "late_minus_early_pre_eos", "long_agreement", "mismatch_after_agreement",
):  # fmt: skip
    register_difference(_name)

QUANTITIES: Mapping[str, Quantity] = registered()

PAIR_QUANTITIES: Mapping[str, Quantity] = {**QUANTITIES, **ANSWER_QUANTITIES}  # of coupled pairs

# By the quantity of an action that they are the difference of: the registered contrasts, and those that no analysis
# estimates unless it is asked for them by name.
DIFFERENCES: Mapping[str, Quantity] = {
    **{name: difference_of(one) for name, one in PAIR_QUANTITIES.items() if one.kind == "action"},
    **{one.difference_of: one for one in PAIR_QUANTITIES.values() if one.difference_of},
}

ALL_QUANTITIES: Mapping[str, Quantity] = {**PAIR_QUANTITIES, **BRANCHING_QUANTITIES}

_BY_NAME = {**{one.name: one for one in DIFFERENCES.values()}, **PAIR_QUANTITIES}


def quantity_named(name: str) -> Quantity:
    """Return the quantity of coupled pairs that has a name: a registered one, or a difference of two actions' ones.

    Raises:
        InputError: no quantity has that name; the message names the nearest one.

    """
    if name not in _BY_NAME:
        raise InputError(f"no quantity is named '{name}'; {nearest(name, PAIR_QUANTITIES)}")
    return _BY_NAME[name]
