"""The quantities of one action, from the moments of its coupled pairs; comments have the formulas."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvdrift.stats.registry import (
    Array,
    Higher,
    Pooled,
    Quantity,
    Range,
    Scale,
    action_quantity,
    moment,
    ratio,
    ratio_quantity,
)

WORSE, BETTER = Higher.WORSE, Higher.BETTER
HALF_ROUNDING = 1e-9  # a CDF that is half but for rounding has reached half
_PARTS, _BRANCH, _CLOCK = "decomposition", "branch_windows", "generation_clock"  # views


def mismatch_rate(m: Pooled) -> Array:
    """C_H: Pi / E, 0 when E = 0, so that R = O + E C always holds."""
    rate = ratio(m["occupation"], m["exposure"])
    return np.where(m["exposure"] == 0, 0.0, rate)


def _survival(m: Pooled) -> Array:
    probability: Array = (1.0 - m["diverged"])[..., None] + m.since("first_mismatch")
    return probability


def median_entry(m: Pooled) -> Array:
    """The 50% point of the entry CDF F(t) = P(tau <= t), pooled over documents as all moments are, in tokens.

    Linear convention, that of medians of grouped data: the share of pairs with tau = t counts as spread evenly over
    t - 1/2..t + 1/2, so that pairs that all diverge at t have the median t. With t the first position at which F
    reaches 1/2, the median is t + 1/2 - (F(t) - 1/2) / P(tau = t), and at most H. Undefined, "not reached", if fewer
    than half of the pairs diverge.
    """
    cdf, share = m.until("first_mismatch"), m.profile("first_mismatch")
    reached = cdf >= 0.5 - HALF_ROUNDING
    first = reached.argmax(axis=-1)[..., None]
    above, own = (np.take_along_axis(values, first, axis=-1)[..., 0] for values in (cdf, share))
    with np.errstate(divide="ignore", invalid="ignore"):
        median = np.minimum(first[..., 0] + 1.5 - (above - 0.5) / own, m.windows.horizon)
    return np.where(reached.any(axis=-1), median, np.nan)


def _at_positions(name: str, label: str, meaning: str, column: str) -> Quantity:
    """A profile moment over positions, as it is."""
    return action_quantity(name, lambda m: m.profile(column), label, meaning, _CLOCK, column=column, axis="t",
                           profile=(column,))  # fmt: skip


def _at_lags(name: str, moment: str, label: str, meaning: str, column: str) -> Quantity:
    """A profile moment over lags, as a mean over the fixed cohort tau <= T."""
    return action_quantity(name, lambda m: ratio(m.profile(moment), m["cohort"][..., None]), label, meaning,
                           "branch_clock", column=column, axis="lag", profile=(moment,), per="cohort")  # fmt: skip


def _in_blocks(name: str, label: str, meaning: str, column: str) -> Quantity:
    """A mean over the blocks 1, 2, 3 of the generation clock."""

    def blocks(m: Pooled) -> Array:
        return np.stack([m[f"block_{block}_{column}"] for block in (1, 2, 3)], axis=-1)

    return action_quantity(name, blocks, label, meaning, "generation_blocks", column=column, axis="block")


# Means over early or late lags of E[delta_{tau+j} | tau <= T]; before EOS ratios of summed moments
_early, _late, _early_pre_eos, _late_pre_eos = (
    ratio_quantity("early", "early_delta", "cohort", "early δ", "mean over early lags", _BRANCH, WORSE),
    ratio_quantity("late", "late_delta", "cohort", "late δ", "mean over late lags", _BRANCH, WORSE),
    ratio_quantity("early_pre_eos", "early_pre_eos_delta", "early_pre_eos_steps", "early, pre-EOS",
                   "early lags before either EOS", _BRANCH, WORSE),
    ratio_quantity("late_pre_eos", "late_pre_eos_delta", "late_pre_eos_steps", "late, pre-EOS",
                   "late lags before either EOS", _BRANCH, WORSE),
)  # fmt: skip


def _late_minus_early(name: str, late: Quantity, early: Quantity, label: str, meaning: str, per: str) -> Quantity:
    return action_quantity(name, lambda m: late.function(m) - early.function(m), label, meaning, _BRANCH,
                           scale=Scale.POINTS, per=per)  # fmt: skip


_ALL = (
    # The decomposition of R, as the definitions have it
    # R, token estimator: M(sum_t I_t / H)
    action_quantity("mismatch", moment("mismatch"), "R (token)", "positions with different tokens", _PARTS, WORSE),
    # R, TV estimator: M(sum_t delta_t / H)
    action_quantity("rollout_tv", moment("rollout_tv"), "R (TV)", "mean total variation, own histories", _PARTS, WORSE),
    # F: M(sum_t f_t / H)
    action_quantity("fixed_history_tv", moment("fixed_history_tv"), "F", "mean total variation along X", _PARTS, WORSE),
    # O_H: M(1{tau <= H}) / H
    action_quantity("occurrence", lambda m: m["diverged"] / m.windows.horizon, "O", "first mismatches per position",
                    _PARTS, WORSE, values=Range.PER_POSITION),
    # E_H: M((H - tau) 1{tau <= H}) / H
    action_quantity("exposure", moment("exposure"), "E", "positions after the first mismatch", _PARTS, WORSE),
    # Pi_H: M(sum_{t > tau} I_t) / H
    action_quantity("occupation", moment("occupation"), "Π", "mismatches after the first", _PARTS, WORSE),
    action_quantity("mismatch_rate", mismatch_rate, "C", "mismatch rate while exposed", _PARTS, WORSE, per="exposure"),
    action_quantity("divergence_probability", moment("diverged"), "P(τ\u00a0≤\u00a0H)", "continuations that diverge",
                    _PARTS, WORSE),
    # M(1{tau > H}), which is 1 - P(tau <= H) exactly
    action_quantity("never_diverge", lambda m: 1.0 - m["diverged"], "P(τ\u00a0>\u00a0H)",
                    "continuations that never diverge", _PARTS, BETTER),
    # M(tau 1{tau <= H}) / M(1{tau <= H}), in tokens
    ratio_quantity("mean_entry", "entry", "diverged", "mean τ", "mean entry, given divergence", _PARTS, BETTER,
                   Scale.TOKENS),
    action_quantity("median_entry", median_entry, "median τ",
                    "median entry of all pairs; not reached if fewer than half diverge", "entry_median", BETTER,
                    Scale.TOKENS, profile=("first_mismatch",), smooth=False),
    # Positions up to the later EOS e' (definitions, "Written and padded positions"), after which no token differs
    # M(min(H, e')) / H
    action_quantity("written", moment("written"), "written", "positions before both texts have ended", _PARTS),
    # M(sum_{t <= e'} I_t) / M(min(H, e'))
    ratio_quantity("mismatch_written", "mismatch", "written", "R, written", "written positions with different tokens",
                   _PARTS, WORSE),
    # M((min(H, e') - tau) 1{tau <= H}) / M(min(H, e'))
    ratio_quantity("exposure_written", "written_exposure", "written", "E, written",
                   "written positions after the first mismatch", _PARTS, WORSE),
    # Saturation, branch cohort, local agreement (definitions, "Two clocks")
    # S: M(sum_t 1{delta_t > threshold}) / H
    action_quantity("saturation", moment("saturation"), "S", "positions with saturated δ", "saturation", WORSE),
    # M(1{tau <= T}): the fixed branch cohort as a fraction of all trajectories
    action_quantity("cohort_fraction", moment("cohort"), "P(τ\u00a0≤\u00a0T)", "continuations in the cohort", _BRANCH,
                    WORSE),
    _early,
    _late,
    _late_minus_early("late_minus_early", _late, _early, "late − early", "change along the branch", "cohort"),
    _early_pre_eos,
    _late_pre_eos,
    _late_minus_early("late_minus_early_pre_eos", _late_pre_eos, _early_pre_eos, "late − early, pre-EOS",
                      "change before either EOS", "late_pre_eos_steps"),
    # M(pre-EOS steps) / (|J| M(1{tau <= T}))
    action_quantity("early_pre_eos_fraction",
                    lambda m: ratio(m["early_pre_eos_steps"], m.windows.early_lags * m["cohort"]),
                    "early steps", "early lags that come before either EOS", _BRANCH, per="cohort"),
    action_quantity("late_pre_eos_fraction",
                    lambda m: ratio(m["late_pre_eos_steps"], m.windows.late_lags * m["cohort"]),
                    "late steps", "late lags that come before either EOS", _BRANCH, per="cohort"),
    # Fractions of the branch cohort, counted after tau and before EOS
    ratio_quantity("long_agreement", "long_agreement", "cohort", "long agreement",
                   "cohort with a long run of equal tokens", "local_agreement", BETTER),
    ratio_quantity("mismatch_after_agreement", "mismatch_after_agreement", "cohort", "mismatch after agreement",
                   "cohort that parts again", "local_agreement"),
    # G_r, r = 0..3 (definitions, "EOS partition"); they sum to R (TV) - F
    action_quantity("eos_gap", lambda m: np.stack([m[f"eos_gap_{r}"] for r in range(4)], axis=-1), "G",
                    "share of R (TV) − F in an EOS set", "eos_partition", scale=Scale.POINTS, column="gap",
                    axis="eos_set"),
    _in_blocks("generation_block_delta", "δ, block", "mean δ in a block of positions", "delta"),
    _in_blocks("generation_block_f", "f, block", "mean f in a block of positions", "f"),
    _in_blocks("generation_block_mismatch", "I, block", "mismatch in a block of positions", "mismatch"),
    # Profiles over t (definitions, "Survival and hazard", "Two clocks")
    action_quantity("entry_cdf", lambda m: m.until("first_mismatch"), "P(τ\u00a0≤\u00a0t)", "diverged by position t",
                    "entry", axis="t", profile=("first_mismatch",)),
    # The probability P(tau >= t)
    action_quantity("survival", _survival, "P(τ ≥ s)", "not yet diverged before s", "entry", axis="t",
                    profile=("first_mismatch",)),
    # lambda_t = p_t / S_t; undefined where S_t = 0
    action_quantity("hazard", lambda m: ratio(m.profile("first_mismatch"), _survival(m)), "λ",
                    "first mismatch at s, given none before", "entry", axis="t", profile=("first_mismatch",),
                    per=_survival),
    _at_positions("generation_delta", "E[δ_t]", "total variation at position t", "delta"),
    _at_positions("generation_f", "E[f_t]", "total variation along X at t", "f"),
    _at_positions("generation_mismatch", "E[I_t]", "mismatch at position t", "mismatch"),
    _at_lags("branch_delta", "cohort_delta", "E[δ at τ + j]", "total variation at lag j", "delta"),
    _at_lags("branch_mismatch", "cohort_mismatch", "E[I at τ + j]", "mismatch at lag j", "mismatch"),
    _at_lags("branch_pre_eos_fraction", "cohort_pre_eos", "P(τ + j < e | τ ≤ T)", "lag j comes before either EOS",
             "pre_eos_fraction"),
)  # fmt: skip

ACTION_QUANTITIES: Mapping[str, Quantity] = {one.name: one for one in _ALL}
