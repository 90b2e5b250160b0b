"""The quantities of two actions: of action b against baseline a (definitions, "Contrast", "EOS partition")."""

from __future__ import annotations

from stats.quantities.actions import (
    eos_gap,
    exposure,
    fixed_history_tv,
    generation_block_delta,
    mismatch,
    mismatch_rate,
    occurrence,
    rollout_tv,
)
from stats.registry import Array, Higher, Pooled, Range, Scale, contrast_quantity, ratio, register_difference

PERCENT, POINTS = Scale.PERCENT, Scale.POINTS
WORSE = Higher.WORSE


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


# Differences not covered by the terms above: which action diverges more often or later, and is worse on a branch.
for _name in (
    "divergence_probability", "mean_entry", "mismatch_rate", "saturation", "cohort_fraction", "early", "late",
    "late_minus_early", "late_minus_early_pre_eos", "long_agreement", "mismatch_after_agreement", "written",
    "mismatch_written", "exposure_written",
):  # fmt: skip
    register_difference(_name)
