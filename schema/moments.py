"""The additive moments of a replicate; every estimate is a smooth function of their means (definitions, "Pooling").

Each moment is averaged over a document's replicates, then over documents. The SQL view ``moments`` has one column for
each scalar moment; ``position_moments`` and ``lag_moments`` have one for each profile moment. ``stats`` resamples
columns of the same names. T, the early and late lags, the blocks, the run length and the threshold are the study's
windows. W is the last position of block 1; calibration observes positions 1..W of a trajectory (definitions,
"Calibration"; 1..32 at H = 128). Over an empty window, a mean is null, and a sum or an indicator is 0.
"""

from __future__ import annotations

COMPENSATORS: dict[str, str] = {
    "occupation_compensator": "sum_{t > tau} delta_t / H",
    "exposure_compensator": "sum_{t <= tau} (H - t) delta_t / H, over all t without divergence",
}
"""The compensators of occupation and exposure: the same sums with delta_t in place of I_t.

Every control variate of the definitions is a difference of a moment and its compensator. No quantity reads them.
"""

WRITTEN: dict[str, str] = {
    "written": "min(H, e') / H",
    "written_exposure": "(min(H, e') - tau) 1{tau <= H} / H",
}
"""Moments over positions up to the later EOS; after it both sides are padded, and agree by construction."""

SCALAR_MOMENTS: dict[str, str] = {
    "mismatch": "sum_t I_t / H",
    "rollout_tv": "sum_t delta_t / H",
    "fixed_history_tv": "sum_t f_t / H",
    "diverged": "1{tau <= H}",
    "entry": "tau 1{tau <= H}",
    "exposure": "(H - tau) 1{tau <= H} / H",
    "occupation": "sum_{t > tau} I_t / H",
    "saturation": "sum_t 1{delta_t > threshold} / H",
    "eos_gap_0": "sum over t < e of (delta_t - f_t) / H",
    "eos_gap_1": "(delta_t - f_t) / H at t = e",
    "eos_gap_2": "sum over e < t <= e' of (delta_t - f_t) / H",
    "eos_gap_3": "sum over t > e' of (delta_t - f_t) / H",
    "cohort": "1{tau <= T}",
    "early_delta": "mean over early lags j of delta_{tau+j} 1{tau <= T}; null over an empty window",
    "late_delta": "mean over late lags j of delta_{tau+j} 1{tau <= T}; null over an empty window",
    "early_pre_eos_steps": "number of early lags with tau <= T and tau + j < e",
    "early_pre_eos_delta": "sum of delta_{tau+j} over early lags with tau <= T and tau + j < e",
    "late_pre_eos_steps": "number of late lags with tau <= T and tau + j < e",
    "late_pre_eos_delta": "sum of delta_{tau+j} over late lags with tau <= T and tau + j < e",
    "long_agreement": "1{tau <= T, longest agreement >= run length}",
    "mismatch_after_agreement": "1{tau <= T, a mismatch follows an agreement before EOS}",
    "block_1_delta": "mean of delta_t over block 1; null over an empty block",
    "block_2_delta": "mean of delta_t over block 2",
    "block_3_delta": "mean of delta_t over block 3",
    "block_1_f": "mean of f_t over block 1",
    "block_2_f": "mean of f_t over block 2",
    "block_3_f": "mean of f_t over block 3",
    "block_1_mismatch": "mean of I_t over block 1",
    "block_2_mismatch": "mean of I_t over block 2",
    "block_3_mismatch": "mean of I_t over block 3",
    "prefix_mismatch": "sum_{t <= W} I_t / H",
    "prefix_diverged": "1{tau <= W}",
    "prefix_eos_x": "1{e_X <= W}",
    "prefix_eos_y": "1{e_Y <= W}",
    **COMPENSATORS,
    **WRITTEN,
}

POSITION_MOMENTS: dict[str, str] = {"delta": "delta_t", "f": "f_t", "mismatch": "I_t", "first_mismatch": "1{tau = t}"}

LAG_MOMENTS: dict[str, str] = {
    "cohort_delta": "delta_{tau+j} 1{tau <= T}",
    "cohort_mismatch": "I_{tau+j} 1{tau <= T}",
    "cohort_pre_eos": "1{tau <= T, tau + j < e}",
}

# Only for documents with answers, in the view ``document_answers`` (definitions, "Answers").
ANSWER_MOMENTS: dict[str, str] = {
    "reference_score": "score of X",
    "compressed_score": "score of Y",
    "reference_right": "1{X is right}",
    "lost": "1{X is right, Y is not}",
    "gained": "1{Y is right, X is not}",
    "right_before": "1{X is right, tau before its answer span}",
    "right_inside": "1{X is right, tau inside its answer span}",
    "right_after": "1{X is right, tau after its answer span}",
    "lost_from_before": "1{X is right, Y is not, tau before X's answer span}",
    "lost_from_inside": "1{X is right, Y is not, tau inside X's answer span}",
    "lost_from_after": "1{X is right, Y is not, tau after X's answer span}",
}

_OTHER_UNITS: dict[str, tuple[str, ...]] = {
    "tokens": ("entry", "exposure_compensator", "early_pre_eos_steps", "late_pre_eos_steps"),
    "total variation, 0..1": (
        "rollout_tv", "fixed_history_tv", "delta", "f", "cohort_delta", "early_delta", "late_delta",
        "block_1_delta", "block_2_delta", "block_3_delta", "block_1_f", "block_2_f", "block_3_f",
        "occupation_compensator",
    ),
    "total variation x tokens": ("early_pre_eos_delta", "late_pre_eos_delta"),
    "difference, -1..1": ("eos_gap_0", "eos_gap_1", "eos_gap_2", "eos_gap_3"),
    "score, 0..1": ("reference_score", "compressed_score"),
}  # fmt: skip

MOMENT_UNITS: dict[str, str] = {
    **dict.fromkeys((*SCALAR_MOMENTS, *POSITION_MOMENTS, *LAG_MOMENTS, *ANSWER_MOMENTS), "share, 0..1"),
    **{name: unit for unit, names in _OTHER_UNITS.items() for name in names},
}
"""The unit of each moment, one of ``kvdrift.schema.tables.MEASURES``; most are shares of positions or replicates."""
