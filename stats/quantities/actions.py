"""The quantities of one action, from the moments of its coupled pairs."""

from __future__ import annotations

import numpy as np

from stats.registry import Array, Higher, Pooled, Range, Scale, action_quantity, ratio

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


@action_quantity("C", "mismatch rate while exposed", PERCENT, "decomposition", higher=WORSE, per="exposure")
def mismatch_rate(m: Pooled) -> Array:
    """C_H: Pi / E, 0 when E = 0, so that R = O + E C always holds."""
    rate = ratio(m["occupation"], m["exposure"])
    return np.where(m["exposure"] == 0, 0.0, rate)


@action_quantity("P(τ\u00a0≤\u00a0H)", "continuations that diverge", PERCENT, "decomposition", higher=WORSE)
def divergence_probability(m: Pooled) -> Array:
    """P(tau <= H)."""
    return m["diverged"]


@action_quantity("mean τ", "mean entry, given divergence", TOKENS, "decomposition", higher=BETTER, per="diverged")
def mean_entry(m: Pooled) -> Array:
    """M(tau 1{tau <= H}) / M(1{tau <= H}), in tokens."""
    return ratio(m["entry"], m["diverged"])


# Positions up to the later EOS (definitions, "Written and padded positions") ------------------------------------------


@action_quantity("written", "positions before both texts have ended", PERCENT, "decomposition")
def written(m: Pooled) -> Array:
    """M(min(H, e')) / H: after both ends all positions agree by construction."""
    return m["written"]


@action_quantity(
    "R, written", "written positions with different tokens", PERCENT, "decomposition", higher=WORSE, per="written"
)
def mismatch_written(m: Pooled) -> Array:
    """M(sum_{t <= e'} I_t) / M(min(H, e')); no token differs after e'."""
    return ratio(m["mismatch"], m["written"])


@action_quantity(
    "E, written", "written positions after the first mismatch", PERCENT, "decomposition", higher=WORSE, per="written"
)
def exposure_written(m: Pooled) -> Array:
    """M((min(H, e') - tau) 1{tau <= H}) / M(min(H, e'))."""
    return ratio(m["written_exposure"], m["written"])


# Saturation, branch cohort, local agreement (definitions, "Two clocks") ----------------------------------------------


@action_quantity("S", "positions with saturated δ", PERCENT, "saturation", higher=WORSE)
def saturation(m: Pooled) -> Array:
    """S: M(sum_t 1{delta_t > threshold}) / H."""
    return m["saturation"]


@action_quantity("P(τ\u00a0≤\u00a0T)", "continuations in the cohort", PERCENT, "branch_windows", higher=WORSE)
def cohort_fraction(m: Pooled) -> Array:
    """M(1{tau <= T}): the fixed branch cohort as a fraction of all trajectories."""
    return m["cohort"]


@action_quantity("early δ", "mean over early lags", PERCENT, "branch_windows", higher=WORSE, per="cohort")
def early(m: Pooled) -> Array:
    """Mean over early lags of E[delta_{tau+j} | tau <= T]."""
    return ratio(m["early_delta"], m["cohort"])


@action_quantity("late δ", "mean over late lags", PERCENT, "branch_windows", higher=WORSE, per="cohort")
def late(m: Pooled) -> Array:
    """Mean over late lags of E[delta_{tau+j} | tau <= T]."""
    return ratio(m["late_delta"], m["cohort"])


@action_quantity("late − early", "change along the branch", POINTS, "branch_windows", per="cohort")
def late_minus_early(m: Pooled) -> Array:
    """B: late - early."""
    return late(m) - early(m)


@action_quantity(
    "early, pre-EOS", "early lags before either EOS", PERCENT, "branch_windows", higher=WORSE, per="early_pre_eos_steps"
)
def early_pre_eos(m: Pooled) -> Array:
    """Pre-EOS branch mean over the early lags: a ratio of summed moments."""
    return ratio(m["early_pre_eos_delta"], m["early_pre_eos_steps"])


@action_quantity(
    "late, pre-EOS", "late lags before either EOS", PERCENT, "branch_windows", higher=WORSE, per="late_pre_eos_steps"
)
def late_pre_eos(m: Pooled) -> Array:
    """Pre-EOS branch mean over the late lags."""
    return ratio(m["late_pre_eos_delta"], m["late_pre_eos_steps"])


@action_quantity(
    "late − early, pre-EOS", "change before either EOS", POINTS, "branch_windows", per="late_pre_eos_steps"
)
def late_minus_early_pre_eos(m: Pooled) -> Array:
    """Pre-EOS late - early; each mean has the surviving steps of its own lags."""
    return late_pre_eos(m) - early_pre_eos(m)


@action_quantity("early steps", "early lags that come before either EOS", PERCENT, "branch_windows", per="cohort")
def early_pre_eos_fraction(m: Pooled) -> Array:
    """Step fraction: M(early pre-EOS steps) / (|J| M(1{tau <= T}))."""
    return ratio(m["early_pre_eos_steps"], m.windows.early_lags * m["cohort"])


@action_quantity("late steps", "late lags that come before either EOS", PERCENT, "branch_windows", per="cohort")
def late_pre_eos_fraction(m: Pooled) -> Array:
    """Step fraction: M(late pre-EOS steps) / (|J| M(1{tau <= T}))."""
    return ratio(m["late_pre_eos_steps"], m.windows.late_lags * m["cohort"])


@action_quantity(
    "long agreement", "cohort with a long run of equal tokens", PERCENT, "local_agreement", higher=BETTER, per="cohort"
)
def long_agreement(m: Pooled) -> Array:
    """Fraction of the branch cohort with a long run of agreements after tau, before EOS."""
    return ratio(m["long_agreement"], m["cohort"])


@action_quantity("mismatch after agreement", "cohort that parts again", PERCENT, "local_agreement", per="cohort")
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


@action_quantity(
    "λ", "first mismatch at s, given none before", PERCENT, "entry", axis="t", profile=("first_mismatch",), per=survival
)
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
    "E[δ at τ + j]",
    "total variation at lag j",
    PERCENT,
    "branch_clock",
    "delta",
    "lag",
    ("cohort_delta",),
    per="cohort",
)
def branch_delta(m: Pooled) -> Array:
    """E[delta_{tau+j} | tau <= T]."""
    return ratio(m.profile("cohort_delta"), m["cohort"][..., None])


@action_quantity(
    "E[I at τ + j]", "mismatch at lag j", PERCENT, "branch_clock", "mismatch", "lag", ("cohort_mismatch",), per="cohort"
)
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
    per="cohort",
)
def branch_pre_eos_fraction(m: Pooled) -> Array:
    """P(tau + j < e | tau <= T): the step fraction of the one-lag block {j}."""
    return ratio(m.profile("cohort_pre_eos"), m["cohort"][..., None])
