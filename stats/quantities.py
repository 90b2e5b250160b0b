"""Every reported quantity (``docs/quantities.md``), by its name in ``results.quantity``; comments have the formulas.

A quantity is a function with its label, meaning, scale, and SQL view: first the quantities of one action, then those of
two actions, of answers, and of residual branching (SWRB) beside coupled pairs. Names are
the column names of the SQL views if those are unique. ``kvdrift.stats.registry`` says which operations a function may
use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from kvdrift.schema.errors import InputError, nearest
from kvdrift.schema.moments import BINS_OF_OCTAVE, KL_EDGES
from kvdrift.stats.registry import (
    Array,
    BranchingQuantity,
    Higher,
    Pooled,
    Quantity,
    Range,
    Scale,
    Support,
    action_quantity,
    contrast_quantity,
    difference_of,
    moment,
    ratio,
    ratio_quantity,
)

WORSE, BETTER = Higher.WORSE, Higher.BETTER
CDF_ROUNDING = 1e-9  # a CDF that is a half, or 99%, up to rounding has reached it
TAIL = 0.99  # the quantile of KL
_PARTS, _BRANCH, _CLOCK, _TEACHER = "decomposition", "branch_windows", "generation_clock", "teacher_forced"  # views


def mismatch_rate(m: Pooled) -> Array:
    """Return the mismatch rate C_H = occupation / exposure, and 0 where the exposure is 0.

    So the mismatch is always the occurrence plus exposure times C_H (R = O + E C_H).
    """
    rate = ratio(m["occupation"], m["exposure"])
    return np.where(m["exposure"] == 0, 0.0, rate)


def _survival(m: Pooled) -> Array:
    probability: Array = (1.0 - m["diverged"])[..., None] + m.since("first_mismatch")
    return probability


def median_entry(m: Pooled) -> Array:
    """Return the 50% point of the entry CDF F(t) = P(tau <= t), pooled over documents as all moments are, in tokens.

    The convention is linear, that of medians of grouped data: the share of pairs with tau = t counts as spread evenly
    over t - 1/2..t + 1/2, so that pairs that all diverge at t have the median t. With t the first position at which F
    reaches 1/2, the median is t + 1/2 - (F(t) - 1/2) / P(tau = t), and at most H. It is NaN, "not reached", if fewer
    than half of the pairs diverge.
    """
    cdf, share = m.until("first_mismatch"), m.profile("first_mismatch")
    reached = cdf >= 0.5 - CDF_ROUNDING
    first = reached.argmax(axis=-1)[..., None]
    above, at_first = (np.take_along_axis(values, first, axis=-1)[..., 0] for values in (cdf, share))
    with np.errstate(divide="ignore", invalid="ignore"):
        median = np.minimum(first[..., 0] + 1.5 - (above - 0.5) / at_first, m.windows.horizon)
    return np.where(reached.any(axis=-1), median, np.nan)


def tail_divergence(m: Pooled) -> Array:
    """Return the 99% quantile of KL along X over all positions where it is known, pooled as all moments are, in nats.

    Positions are counted in bins (``KL_EDGES``). Within the bin in which the distribution function reaches 99%, the
    positions count as spread evenly over the logarithm of KL, in bin 1 over KL itself. So the quantile is off by at
    most the 19% of a bin, and by some 1% where the values are many and distinct. Infinite values count as the largest:
    the quantile is NaN if more than 1% are infinite, and without positions.
    """
    count = m.profile("kl")
    total = count.sum(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = count / total[..., None]
        cdf = np.cumsum(share, axis=-1)
        reached = (cdf >= TAIL - CDF_ROUNDING).argmax(axis=-1)
        above, inside = (np.take_along_axis(v, reached[..., None], axis=-1)[..., 0] for v in (cdf, share))
        part = np.clip(1 - (above - TAIL) / inside, 0, 1)
        high = np.array([0.0, *KL_EDGES, np.nan])[reached]
        quantile = np.where(reached == 1, part * high, high * 2 ** ((part - 1) / BINS_OF_OCTAVE))
    return np.where(total > 0, quantile, np.nan)


def _at_positions(name: str, label: str, meaning: str, column: str) -> Quantity:
    """Return the quantity that is the profile moment ``column`` at each position."""
    return action_quantity(name, lambda m: m.profile(column), label, meaning, _CLOCK, column=column, axis="t",
                           profile=(column,))  # fmt: skip


def _at_lags(name: str, moment: str, label: str, meaning: str, column: str) -> Quantity:
    """Return the quantity that is a profile moment at each lag, divided by the share of pairs with tau <= T."""
    return action_quantity(name, lambda m: ratio(m.profile(moment), m["cohort"][..., None]), label, meaning,
                           "branch_clock", column=column, axis="lag", profile=(moment,), per="cohort")  # fmt: skip


def _in_blocks(name: str, label: str, meaning: str, column: str) -> Quantity:
    """Return the quantity that is a mean over each of the blocks 1, 2, 3 of the generation clock."""

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


def _infinite(name: str, finite: str, label: str, meaning: str) -> Quantity:
    """Return the quantity that is the share of positions, among those with a known KL, whose KL is infinite."""
    return action_quantity(name, lambda m: ratio(m["kl_positions"] - m[finite], m["kl_positions"]), label, meaning,
                           _TEACHER, WORSE, per="kl_positions")  # fmt: skip


_ALL = (
    # R and its parts
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
    # Positions up to the later EOS e', after which no token differs
    # M(min(H, e')) / H
    action_quantity("written", moment("written"), "written", "positions before both texts have ended", _PARTS),
    # M(sum_{t <= e'} I_t) / M(min(H, e'))
    ratio_quantity("mismatch_written", "mismatch", "written", "R, written", "written positions with different tokens",
                   _PARTS, WORSE),
    # M((min(H, e') - tau) 1{tau <= H}) / M(min(H, e'))
    ratio_quantity("exposure_written", "written_exposure", "written", "E, written",
                   "written positions after the first mismatch", _PARTS, WORSE),
    # Saturation, branch cohort, local agreement
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
                   "cohort that diverges again", "local_agreement"),
    # G_r, r = 0..3, of the EOS sets; they sum to R (TV) - F
    action_quantity("eos_gap", lambda m: np.stack([m[f"eos_gap_{r}"] for r in range(4)], axis=-1), "G",
                    "share of R (TV) − F in an EOS set", "eos_partition", scale=Scale.POINTS, column="gap",
                    axis="eos_set"),
    _in_blocks("generation_block_delta", "δ, block", "mean δ in a block of positions", "delta"),
    _in_blocks("generation_block_f", "f, block", "mean f in a block of positions", "f"),
    _in_blocks("generation_block_mismatch", "I, block", "mismatch in a block of positions", "mismatch"),
    # Distances beside total variation, over positions up to X's end, where KL is finite
    ratio_quantity("kl", "kl_own_sum", "kl_own_finite", "KL", "mean KL divergence, own histories", _TEACHER, WORSE,
                   Scale.NATS),
    ratio_quantity("kl_fixed_history", "kl_sum", "kl_finite", "KL along X", "mean KL divergence along X", _TEACHER,
                   WORSE, Scale.NATS),
    action_quantity("kl_fixed_history_p99", tail_divergence, "KL along X, 99%", "99% quantile of KL along X", _TEACHER,
                    WORSE, Scale.NATS, profile=("kl",), smooth=False),
    ratio_quantity("top1_agreement", "top1_agreements", "kl_positions", "same top 1",
                   "positions along X with the same most probable token", _TEACHER, BETTER),
    _infinite("kl_infinite", "kl_finite", "KL = ∞ along X", "positions with infinite KL along X"),
    _infinite("kl_own_infinite", "kl_own_finite", "KL = ∞", "positions with infinite KL, own histories"),
    # Profiles over t
    action_quantity("entry_cdf", lambda m: m.until("first_mismatch"), "P(τ\u00a0≤\u00a0t)", "diverged by position t",
                    "entry", axis="t", profile=("first_mismatch",)),
    # The probability P(tau >= t)
    action_quantity("survival", _survival, "P(τ ≥ s)", "not yet diverged before s", "entry", axis="t",
                    profile=("first_mismatch",)),
    # lambda_t = p_t / S_t; undefined if S_t = 0
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

ACTION_QUANTITIES: Mapping[str, Quantity] = {quantity.name: quantity for quantity in _ALL}


_TERMS, _EOS = "contrasts", "eos_contrasts"  # views
_SECOND = Range.SECOND_DIFFERENCE
_exposure, _rate = (ACTION_QUANTITIES[name].function for name in ("exposure", "mismatch_rate"))


def _exposure_term(a: Pooled, b: Pooled) -> Array:
    term: Array = (_exposure(b) - _exposure(a)) * (_rate(a) + _rate(b)) / 2
    return term


def _rate_term(a: Pooled, b: Pooled) -> Array:
    term: Array = (_rate(b) - _rate(a)) * (_exposure(a) + _exposure(b)) / 2
    return term


def _eos_related(a: Pooled, b: Pooled) -> Array:
    gaps = ACTION_QUANTITIES["eos_gap"].function
    total: Array = (gaps(b) - gaps(a))[..., 1:].sum(axis=-1)
    return total


def _difference(name: str, of: str, label: str, meaning: str, view: str | None = None) -> Quantity:
    """Return the difference of the quantity ``of`` between two actions, under the name ``name``."""
    return replace(
        difference_of(ACTION_QUANTITIES[of]), name=name, label=label, meaning=meaning, view=view, column=name
    )


def _less(
    name: str, minuend: Quantity, subtrahend: Quantity, label: str, meaning: str, view: str | None = None
) -> Quantity:
    """Return the quantity that is the contrast ``minuend`` less the contrast ``subtrahend``."""
    return contrast_quantity(
        name, lambda a, b: minuend.function(a, b) - subtrahend.function(a, b), label, meaning, view, values=_SECOND
    )


def _share(part: Quantity, whole: Quantity, name: str, label: str, meaning: str, view: str) -> Quantity:
    """Return the quantity that is the contrast ``part`` divided by the contrast ``whole``."""
    return contrast_quantity(name, lambda a, b: ratio(part.function(a, b), whole.function(a, b)), label, meaning, view,
                             scale=Scale.PERCENT, values=Range.UNBOUNDED)  # fmt: skip


# The three terms add up to the gap in R, token estimator.
_gap = _difference("gap", "mismatch", "ΔR", "gap in R (token)", _TERMS)
_terms = (
    _difference("occurrence_term", "occurrence", "ΔO", "occurrence term", _TERMS),
    # Delta E times the mean C of the two, and Delta C times the mean E
    contrast_quantity("exposure_term", _exposure_term, "ΔE · C̄", "exposure term", _TERMS, WORSE),
    contrast_quantity("rate_term", _rate_term, "ΔC · Ē", "rate term", _TERMS, WORSE),
)
_shares = [
    _share(term, _gap, f"{name}_share", f"{name} share", "of the gap", _TERMS)
    for name, term in zip(("occurrence", "exposure", "rate"), _terms, strict=True)
]
_tv = _difference("rollout_tv_gap", "rollout_tv", "ΔR (TV)", "gap in R (TV)")
_fixed = _difference("fixed_history_gap", "fixed_history_tv", "ΔF", "gap in F")
# Token mismatch of positions 1..W extrapolated flat, (H/W) M(sum_{t <= W} I_t / H), is the mean of I_t over block 1,
# which is null if the window is empty.
_flat = contrast_quantity(
    "flat_extrapolation_gap", lambda a, b: b["block_1_mismatch"] - a["block_1_mismatch"], "flat gap",
    "gap in R (token) of block 1, extrapolated flat", None, WORSE,
)  # fmt: skip
_history = _less("history_gap", _tv, _fixed, "Δ(R − F)", "gap due to histories", _EOS)
_related = contrast_quantity(
    "eos_related", _eos_related, "Δ(G₁+G₂+G₃)", "part at or after an EOS", _EOS, values=_SECOND
)
_blocks = replace(
    _difference("generation_gap", "generation_block_delta", "g", "gap in δ in a block", "generation_gaps"),
    column="gap", difference_of=None,
)  # fmt: skip


def _change(a: Pooled, b: Pooled) -> Array:
    blocks = _blocks.function(a, b)
    last_less_first: Array = blocks[..., 2] - blocks[..., 0]
    return last_less_first


CONTRAST_QUANTITIES: Mapping[str, Quantity] = {
    quantity.name: quantity
    for quantity in (
        _gap, *_terms, *_shares, _tv, _fixed, _flat,
        # As in the paper's table trajectory-uncalibrated
        _less("full_minus_fixed_history", _tv, _fixed, "ΔR (TV) − ΔF", "gap that fixed history misses"),
        _less("full_minus_flat_extrapolation", _tv, _flat, "ΔR (TV) − flat gap", "gap that flat extrapolation misses"),
        _history,
        contrast_quantity("pre_eos", lambda a, b: b["eos_gap_0"] - a["eos_gap_0"], "ΔG₀", "part before either EOS",
                          _EOS, values=_SECOND),
        _related,
        _share(_related, _history, "eos_share", "EOS share", "of Δ(R − F)", _EOS),
        _blocks,
        contrast_quantity("generation_gap_change", _change, "Δg", "last block − first block", "generation_gap_change",
                          values=_SECOND),
        # Differences that the terms do not cover: which action diverges more often or later, or is worse on a branch
        *(difference_of(ACTION_QUANTITIES[name]) for name in (
            "divergence_probability", "mean_entry", "mismatch_rate", "saturation", "cohort_fraction", "early", "late",
            "late_minus_early", "late_minus_early_pre_eos", "long_agreement", "mismatch_after_agreement", "written",
            "mismatch_written", "exposure_written",
        )),
    )
}  # fmt: skip


_VIEW = "answers"

_OF_ACTIONS = (
    action_quantity("accuracy_reference", moment("reference_score"), "accuracy of X", "mean score of the reference",
                    _VIEW),
    action_quantity("accuracy", moment("compressed_score"), "accuracy of Y", "mean score of the texts Y", _VIEW,
                    BETTER),
    action_quantity("score_gap", lambda m: m["compressed_score"] - m["reference_score"], "score gap",
                    "accuracy of Y less accuracy of X", _VIEW, BETTER, Scale.POINTS),
    action_quantity("lost", moment("lost"), "lost", "pairs of which X is right and Y is not", _VIEW, WORSE),
    action_quantity("gained", moment("gained"), "gained", "pairs of which Y is right and X is not", _VIEW, BETTER),
    ratio_quantity("lost_share", "lost", "reference_right", "lost share", "lost, of the pairs of which X is right",
                   _VIEW, WORSE),
    ratio_quantity("lost_before", "lost_from_before", "right_before", "lost, τ before",
                   "of right answers whose pair diverges before the first token of the answer", _VIEW, WORSE),
    ratio_quantity("lost_inside", "lost_from_inside", "right_inside", "lost, τ inside",
                   "of right answers whose pair diverges within the answer", _VIEW, WORSE),
    ratio_quantity("lost_after", "lost_from_after", "right_after", "lost, τ after",
                   "of right answers whose pair diverges after the last token of the answer", _VIEW, WORSE),
)  # fmt: skip

ANSWER_QUANTITIES: Mapping[str, Quantity] = {
    quantity.name: quantity
    for quantity in (*_OF_ACTIONS, *map(difference_of, _OF_ACTIONS[1:6]))
}  # fmt: skip


PERCENT = Scale.PERCENT
_Moments = Mapping[str, Array]  # ``plain_`` or ``swrb_`` and a name of ``kvdrift.stats.efficiency.MEASURED`` -> [...]


def _ratio(above: str, below: str) -> Callable[[_Moments], Array]:
    return lambda m: ratio(m[above], m[below])


_variance_ratio = _ratio("plain_risk_variance", "swrb_risk_variance")
_evaluation_ratio = _ratio("swrb_evaluations", "plain_evaluations")
_second_ratio = _ratio("swrb_seconds", "plain_seconds")


def _moment(
    name: str, support: Support, moment: str, label: str, meaning: str, scale: Scale, column: str = ""
) -> BranchingQuantity:
    view = "swrb_risk" if column else None
    return BranchingQuantity(
        name, "action", lambda m: m[moment], label, meaning, scale, scale.implied_range, view, column or name,
        support=support,
    )  # fmt: skip


def _gain(name: str, function: Callable[[_Moments], Array], label: str, meaning: str) -> BranchingQuantity:
    scale = Scale.RATIO
    return BranchingQuantity(
        name, "action", function, label, meaning, scale, scale.implied_range, "swrb_efficiency", name
    )


BRANCHING_QUANTITIES: Mapping[str, BranchingQuantity] = {
    quantity.name: quantity
    for quantity in (
        _moment("swrb_mismatch", "branched", "swrb_risk", "R (SWRB)", "R by residual branching", PERCENT, "mismatch"),
        _moment("swrb_occurrence", "branched", "swrb_occurrence",
                "O (SWRB)", "O by residual branching", PERCENT, "occurrence"),
        _moment("swrb_occupation", "branched", "swrb_occupation",
                "Π (SWRB)", "Π by residual branching", PERCENT, "occupation"),
        _moment("swrb_divergence_probability", "branched", "swrb_divergence_probability",
                "mean M", "mass of the branches: pairs that diverge", PERCENT, "divergence_probability"),
        _moment("plain_mismatch", "branched", "plain_risk",
                "R (coupled)", "R from coupled pairs of the same documents", PERCENT, "plain_mismatch"),
        _moment("plain_variance", "both", "plain_risk_variance",
                "variance, coupled", "of R in one coupled pair", Scale.SQUARED_POINTS),
        _moment("swrb_variance", "both", "swrb_risk_variance",
                "variance, SWRB", "of R in one SWRB replicate", Scale.SQUARED_POINTS),
        _moment("plain_evaluations", "both", "plain_evaluations",
                "evaluations, coupled", "kernel pairs evaluated per coupled pair", Scale.PAIRS),
        _moment("swrb_evaluations", "both", "swrb_evaluations",
                "evaluations, SWRB", "kernel pairs evaluated per SWRB replicate", Scale.PAIRS),
        _moment("plain_seconds", "both", "plain_seconds",
                "time, coupled", "decoding time per coupled pair", Scale.MILLISECONDS),
        _moment("swrb_seconds", "both", "swrb_seconds",
                "time, SWRB", "decoding time per SWRB replicate", Scale.MILLISECONDS),
        _gain("variance_ratio", _variance_ratio, "variance ratio", "variance of a coupled pair / of an SWRB replicate"),
        _gain("evaluation_ratio", _evaluation_ratio, "evaluations ratio",
              "kernel pairs of an SWRB replicate / of a coupled pair"),
        _gain("second_ratio", _second_ratio, "time ratio", "decoding time of an SWRB replicate / of a coupled pair"),
        _gain("efficiency", lambda m: ratio(_variance_ratio(m), _evaluation_ratio(m)), "efficiency",
              "variance ratio / evaluations ratio"),
        _gain("efficiency_in_seconds", lambda m: ratio(_variance_ratio(m), _second_ratio(m)), "efficiency in time",
              "variance ratio / time ratio"),
    )
}  # fmt: skip


QUANTITIES: Mapping[str, Quantity] = {**ACTION_QUANTITIES, **CONTRAST_QUANTITIES}

PAIR_QUANTITIES: Mapping[str, Quantity] = {**QUANTITIES, **ANSWER_QUANTITIES}  # of coupled pairs

# The differences between two actions, by the name of the action's quantity: the registered contrasts, and contrasts
# that are estimated only if they are requested by name.
DIFFERENCES: Mapping[str, Quantity] = {
    **{name: difference_of(quantity) for name, quantity in PAIR_QUANTITIES.items() if quantity.kind == "action"},
    **{quantity.difference_of: quantity for quantity in PAIR_QUANTITIES.values() if quantity.difference_of},
}

SIMULTANEOUS_GAP = "gap_simultaneous"
"""The gap of every pair of actions with intervals that hold for all pairs together: ``kvdrift.stats.simultaneous``."""

SIMULTANEOUS_OF: Mapping[str, str] = {name: f"{name}_simultaneous" for name in ("mismatch", "accuracy")}
"""Quantities of the members of sweeps with intervals that hold for all members together, by the quantity."""

ALL_QUANTITIES: Mapping[str, Quantity] = {
    **PAIR_QUANTITIES,
    **BRANCHING_QUANTITIES,
    SIMULTANEOUS_GAP: replace(
        QUANTITIES["gap"], name=SIMULTANEOUS_GAP, meaning="gap in R (token), of all pairs together", view=None,
        column=SIMULTANEOUS_GAP,
    ),
    **{
        together: replace(
            PAIR_QUANTITIES[name], name=together, meaning=f"{PAIR_QUANTITIES[name].meaning}, of all members of sweeps "
            "together", view=None, column=together,
        )
        for name, together in SIMULTANEOUS_OF.items()
    },
}  # fmt: skip

_BY_NAME = {**{quantity.name: quantity for quantity in DIFFERENCES.values()}, **PAIR_QUANTITIES}


def quantity_named(name: str) -> Quantity:
    """Return the quantity of coupled pairs with a name: a registered quantity, or ``<name>_difference`` of one."""
    if name not in _BY_NAME:
        raise InputError(f"no quantity is named '{name}'; {nearest(name, PAIR_QUANTITIES)}")
    return _BY_NAME[name]
