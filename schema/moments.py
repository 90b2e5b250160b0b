"""The additive moments of a replicate, each declared once: every estimate is a smooth function of their means.

Each moment is averaged over a document's replicates, then over documents (``docs/quantities.md``). Its declaration
states its meaning, its unit, and how it is computed from replicates. Everything else follows from it: the column of
table ``unit_moments``, the derivation in ``kvdrift.transforms.moments``, the columns of the views ``moments``,
``stratum_moments`` and others, and the arrays that ``kvdrift.stats`` resamples.

T, the early and late lags, the blocks, the run length and the threshold are the study's windows. W is the last position
of block 1; calibration observes positions 1..W of a trajectory (1..32 at H = 128). Over an
empty window, a mean is null, and a sum or an indicator is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdrift.schema.rows import Flags, Ints, Reals
from kvdrift.schema.windows import Windows

Values = npt.NDArray[Any]

NEVER: Final = np.int32(2**31 - 1)
"""Stands for a position that is null: later than every t."""

SHARE: Final = "share, 0..1"
TV: Final = "total variation, 0..1"
DIFFERENCE: Final = "difference, -1..1"
TOKENS: Final = "tokens"
NATS: Final = "nats x tokens"

BINS_BELOW, BINS_ABOVE, BINS_OF_OCTAVE = 40, 10, 4  # octaves below and above 1 nat, and bins of an octave
KL_EDGES: Final = 2.0 ** (np.arange(-BINS_BELOW * BINS_OF_OCTAVE, BINS_ABOVE * BINS_OF_OCTAVE + 1) / BINS_OF_OCTAVE)
"""The upper edges of the bins of KL from bin 1 on, 2^-40..2^10 nats, ascending.

Bin 0 has the value 0 alone, and the last bin all values above the edges: infinity, since the logarithm of a ratio of
two float64 probabilities is at most 746. The width of a bin is 19% of its values.
"""
KL_BINS: Final = len(KL_EDGES) + 2


@dataclass(frozen=True, eq=False)
class Replicates:
    """K complete replicates with the same windows: columns of their trajectories, [K], and of their steps, [K, H]."""

    windows: Windows
    mismatches: Values  # sum of I_t
    sum_delta: Reals
    sum_f: Reals
    exposed: Values  # (H - tau) 1{tau <= H}
    occupied: Values  # sum of I_t over t > tau
    tau: Ints  # first mismatch; NEVER if there is none
    eos_x: Ints  # first EOS of X; NEVER if there is none, as for Y
    eos_y: Ints
    longest_agreement: Values  # -1 without divergence
    mismatch_after_agreement: Flags
    delta: Reals
    f: Reals
    mismatch: Values
    kl: Reals  # along X; NaN where it is not known, as after X's end, and for ``kl_own``
    kl_own: Reals
    top1: Flags  # whether the most probable tokens along X are equal; meaningful where ``kl`` is not NaN

    @property
    def horizon(self) -> int:
        """H, the number of positions."""
        return self.windows.horizon

    @cached_property
    def t(self) -> Ints:
        """Positions 1..H, [H]."""
        return np.arange(1, self.horizon + 1, dtype=np.int32)

    @cached_property
    def diverged(self) -> Flags:
        """1{tau <= H}, [K]."""
        diverged: Flags = self.tau != NEVER
        return diverged

    @cached_property
    def cohort(self) -> Flags:
        """1{tau <= T}, [K]."""
        return self.tau <= self.windows.cohort_bound

    @cached_property
    def first_eos(self) -> Ints:
        """e, the earlier of the two sides' EOS positions, [K]; ``NEVER`` if neither side has one."""
        return np.minimum(self.eos_x, self.eos_y)

    @cached_property
    def last_eos(self) -> Ints:
        """e', the later of the two sides' EOS positions, [K]; ``NEVER`` if a side has none."""
        return np.maximum(self.eos_x, self.eos_y)

    @cached_property
    def written(self) -> Ints:
        """min(H, e'), [K]: both sides are padded after the later EOS, and agree there by construction."""
        return np.minimum(self.last_eos, self.horizon)

    @cached_property
    def after_entry(self) -> Flags:
        """1{t > tau}, [K, H]."""
        return self.t > self.tau[:, None]

    def eos_set(self, number: int) -> Flags:
        """Tell which positions are in the EOS set ``number``, [K, H]; 0: t < e, 1: t = e, 2: e < t <= e', 3: t > e'."""
        first, last = self.first_eos[:, None], self.last_eos[:, None]
        t = self.t
        return (t < first, t == first, (t > first) & (t <= last), t > last)[number]

    @cached_property
    def _at_lags(self) -> tuple[Flags, Values]:
        """Whether tau <= T, and then the index from 0 of position tau + j, else 0; two arrays [K, T], for j = 1..T."""
        bound = self.windows.cohort_bound
        inside = np.broadcast_to(self.cohort[:, None], (len(self.tau), bound))
        return inside, np.where(inside, self.tau[:, None] + np.arange(bound), 0)

    def at_lags(self, values: Values) -> Values:
        """Return the ``values``, [K, H], at positions tau + j for lags j = 1..T, as [K, T]; 0 outside the cohort."""
        inside, at = self._at_lags
        return np.where(inside, np.take_along_axis(values, at, axis=1), values.dtype.type(0))

    @cached_property
    def cohort_delta(self) -> Reals:
        """delta_{tau+j} 1{tau <= T} for lags j = 1..T, [K, T]."""
        return self.at_lags(self.delta)

    @cached_property
    def cohort_pre_eos(self) -> Flags:
        """1{tau <= T, tau + j < e} for lags j = 1..T, [K, T]."""
        inside, at = self._at_lags
        return inside & (at + 1 < self.first_eos[:, None])


@dataclass(frozen=True)
class Moment:
    """One additive moment of a replicate.

    Attributes:
        meaning: its formula, in the symbols of ``docs/quantities.md``.
        unit: one of ``kvdrift.schema.tables.MEASURES``.
        of: its value in each replicate: [K] for a scalar, [K, H], [K, T] or [K, KL_BINS] for a profile; NaN over an
            empty window.
        nullable: whether it is null over an empty window.
    """

    meaning: str
    unit: str
    of: Callable[[Replicates], Values]
    nullable: bool = False


@dataclass(frozen=True)
class AnswerMoment:
    """A moment that needs a document's answers, and so is computed by SQL, from scores; it is never null."""

    meaning: str
    unit: str = SHARE
    nullable: bool = False


COMPENSATORS: Final[Mapping[str, Moment]] = {
    "occupation_compensator": Moment(
        "sum_{t > tau} delta_t / H", TV, lambda p: _sum_where(p.after_entry, p.delta) / p.horizon
    ),
    "exposure_compensator": Moment(
        "sum_{t <= tau} (H - t) delta_t / H, over all t without divergence", "tokens",
        lambda p: _sum_where(~p.after_entry, (p.horizon - p.t) * p.delta) / p.horizon,
    ),
}  # fmt: skip
"""The compensators of occupation and exposure: the same sums with delta_t in place of I_t.

Each control variate is a difference of a moment and its compensator. No quantity reads compensators.
"""


def _of_eos_set(number: int, meaning: str) -> dict[str, Moment]:
    return {
        f"eos_gap_{number}": Moment(
            meaning, DIFFERENCE, lambda p: _sum_where(p.eos_set(number), p.delta - p.f) / p.horizon
        )
    }


def _over_lags(name: str, lags: Callable[[Windows], slice]) -> dict[str, Moment]:
    meaning = f"mean over {name} lags j of delta_{{tau+j}} 1{{tau <= T}}; null over an empty window"
    of = Moment(meaning, TV, lambda p: _mean(p.cohort_delta[:, lags(p.windows)]), nullable=True)
    return {f"{name}_delta": of}


def _before_eos(name: str, lags: Callable[[Windows], slice]) -> dict[str, Moment]:
    return {
        f"{name}_pre_eos_steps": Moment(
            f"number of {name} lags with tau <= T and tau + j < e", "tokens",
            lambda p: p.cohort_pre_eos[:, lags(p.windows)].sum(axis=1),
        ),
        f"{name}_pre_eos_delta": Moment(
            f"sum of delta_{{tau+j}} over {name} lags with tau <= T and tau + j < e", "total variation x tokens",
            lambda p: _sum_where(p.cohort_pre_eos[:, lags(p.windows)], p.cohort_delta[:, lags(p.windows)]),
        ),
    }  # fmt: skip


def _early(windows: Windows) -> slice:
    return slice(0, windows.early_last)


def _late(windows: Windows) -> slice:
    return slice(windows.late_first - 1, windows.cohort_bound)


def _over_blocks(name: str, symbol: str, unit: str) -> dict[str, Moment]:
    """Return the moments that are a profile's means over blocks 1, 2 and 3, by name."""

    def mean(block: int) -> Callable[[Replicates], Reals]:
        def over_block(p: Replicates) -> Reals:
            first, last = p.windows.blocks[block - 1]
            return _mean(getattr(p, name)[:, first - 1 : last])

        return over_block

    return {
        f"block_{block}_{name}": Moment(
            f"mean of {symbol} over block {block}; null over an empty block", unit, mean(block), nullable=True
        )
        for block in (1, 2, 3)
    }


def _divergence(name: str, symbol: str) -> dict[str, Moment]:
    """Return the moments of a divergence over the positions where it is known and finite: its sum, and their number."""

    def total(p: Replicates) -> Reals:
        values = getattr(p, name)
        return _sum_where(np.isfinite(values), values)

    return {
        f"{name}_sum": Moment(f"sum of {symbol} over positions where it is finite", NATS, total),
        f"{name}_finite": Moment(
            f"number of positions t <= min(H, e_X) where {symbol} is finite", TOKENS,
            lambda p: np.isfinite(getattr(p, name)).sum(axis=1),
        ),
    }  # fmt: skip


def _binned(p: Replicates) -> Values:
    """Count the positions of each replicate whose KL along X is in each bin, [K, KL_BINS]."""
    replicate, position = np.nonzero(~np.isnan(p.kl))
    values = p.kl[replicate, position]
    bins = np.where(values == 0, 0, 1 + np.searchsorted(KL_EDGES, values))
    counts = np.bincount(replicate * KL_BINS + bins, minlength=len(p.kl) * KL_BINS)
    return counts.reshape(len(p.kl), KL_BINS)


SCALAR_MOMENTS: Final[Mapping[str, Moment]] = {
    "mismatch": Moment("sum_t I_t / H", SHARE, lambda p: p.mismatches / p.horizon),
    "rollout_tv": Moment("sum_t delta_t / H", TV, lambda p: p.sum_delta / p.horizon),
    "fixed_history_tv": Moment("sum_t f_t / H", TV, lambda p: p.sum_f / p.horizon),
    "diverged": Moment("1{tau <= H}", SHARE, lambda p: p.diverged),
    "entry": Moment("tau 1{tau <= H}", "tokens", lambda p: np.where(p.diverged, p.tau, 0)),
    "exposure": Moment("(H - tau) 1{tau <= H} / H", SHARE, lambda p: p.exposed / p.horizon),
    "occupation": Moment("sum_{t > tau} I_t / H", SHARE, lambda p: p.occupied / p.horizon),
    "saturation": Moment(
        "sum_t 1{delta_t > threshold} / H", SHARE,
        lambda p: (p.delta > p.windows.saturation_threshold).sum(axis=1) / p.horizon,
    ),
    **_of_eos_set(0, "sum over t < e of (delta_t - f_t) / H"),
    **_of_eos_set(1, "(delta_t - f_t) / H at t = e"),
    **_of_eos_set(2, "sum over e < t <= e' of (delta_t - f_t) / H"),
    **_of_eos_set(3, "sum over t > e' of (delta_t - f_t) / H"),
    "cohort": Moment("1{tau <= T}", SHARE, lambda p: p.cohort),
    **_over_lags("early", _early),
    **_over_lags("late", _late),
    **_before_eos("early", _early),
    **_before_eos("late", _late),
    "long_agreement": Moment(
        "1{tau <= T, longest agreement >= run length}", SHARE,
        lambda p: p.cohort & (p.longest_agreement >= p.windows.agreement_run),
    ),
    "mismatch_after_agreement": Moment(
        "1{tau <= T, a mismatch follows an agreement before EOS}", SHARE,
        lambda p: p.cohort & p.mismatch_after_agreement,
    ),
    **_over_blocks("delta", "delta_t", TV),
    **_over_blocks("f", "f_t", TV),
    **_over_blocks("mismatch", "I_t", SHARE),
    "prefix_mismatch": Moment(
        "sum_{t <= W} I_t / H", SHARE,
        lambda p: p.mismatch[:, : p.windows.first_block_last].sum(axis=1) / p.horizon,
    ),
    "prefix_diverged": Moment("1{tau <= W}", SHARE, lambda p: p.tau <= p.windows.first_block_last),
    "prefix_eos_x": Moment("1{e_X <= W}", SHARE, lambda p: p.eos_x <= p.windows.first_block_last),
    "prefix_eos_y": Moment("1{e_Y <= W}", SHARE, lambda p: p.eos_y <= p.windows.first_block_last),
    **COMPENSATORS,
    "written": Moment("min(H, e') / H", SHARE, lambda p: p.written / p.horizon),
    "kl_positions": Moment(
        "number of positions t <= min(H, e_X) with a known KL", TOKENS, lambda p: (~np.isnan(p.kl)).sum(axis=1)
    ),
    **_divergence("kl", "KL(P_t || Q_t) along X"),
    **_divergence("kl_own", "KL(P_t || Q_t) along own histories"),
    "top1_agreements": Moment(
        "number of these positions where P_t and Q_t along X have the same most probable token", TOKENS,
        lambda p: (p.top1 & ~np.isnan(p.kl)).sum(axis=1),
    ),
    "written_exposure": Moment(
        "(min(H, e') - tau) 1{tau <= H} / H", SHARE,
        lambda p: np.where(p.diverged, p.written - p.tau, 0) / p.horizon,
    ),
}  # fmt: skip

POSITION_MOMENTS: Final[Mapping[str, Moment]] = {
    "delta": Moment("delta_t", TV, lambda p: p.delta),
    "f": Moment("f_t", TV, lambda p: p.f),
    "mismatch": Moment("I_t", SHARE, lambda p: p.mismatch),
    "first_mismatch": Moment("1{tau = t}", SHARE, lambda p: p.t == p.tau[:, None]),
}

LAG_MOMENTS: Final[Mapping[str, Moment]] = {
    "cohort_delta": Moment("delta_{tau+j} 1{tau <= T}", TV, lambda p: p.cohort_delta),
    "cohort_mismatch": Moment("I_{tau+j} 1{tau <= T}", SHARE, lambda p: p.at_lags(p.mismatch)),
    "cohort_pre_eos": Moment("1{tau <= T, tau + j < e}", SHARE, lambda p: p.cohort_pre_eos),
}

BIN_MOMENTS: Final[Mapping[str, Moment]] = {
    "kl": Moment("number of positions t <= min(H, e_X) with KL along X in the bin", TOKENS, _binned),
}
"""Moments with a number for each bin of ``KL_EDGES``: [K, KL_BINS] for K replicates."""

UNIT_SUMS: Final[Mapping[str, Moment]] = {
    **{f"scalar_{name}": moment for name, moment in SCALAR_MOMENTS.items()},
    **{f"position_{name}": moment for name, moment in POSITION_MOMENTS.items()},
    **{f"lag_{name}": moment for name, moment in LAG_MOMENTS.items()},
    **{f"bin_{name}": moment for name, moment in BIN_MOMENTS.items()},
}
"""The moments by their columns in table ``unit_moments``, which has their sums over the replicates of a unit."""

ANSWER_MOMENTS: Final[Mapping[str, AnswerMoment]] = {
    "reference_score": AnswerMoment("score of X", "score, 0..1"),
    "compressed_score": AnswerMoment("score of Y", "score, 0..1"),
    "reference_right": AnswerMoment("1{X is right}"),
    "lost": AnswerMoment("1{X is right, Y is not}"),
    "gained": AnswerMoment("1{Y is right, X is not}"),
    "right_before": AnswerMoment("1{X is right, tau before its answer span}"),
    "right_inside": AnswerMoment("1{X is right, tau inside its answer span}"),
    "right_after": AnswerMoment("1{X is right, tau after its answer span}"),
    "lost_from_before": AnswerMoment("1{X is right, Y is not, tau before X's answer span}"),
    "lost_from_inside": AnswerMoment("1{X is right, Y is not, tau inside X's answer span}"),
    "lost_from_after": AnswerMoment("1{X is right, Y is not, tau after X's answer span}"),
}
"""Only for documents with answers, in the view ``document_answers`` (``docs/intervals.md``)."""


def _sum_where(flags: Flags, values: Reals) -> Reals:
    total: Reals = np.where(flags, values, 0.0).sum(axis=1)
    return total


def _mean(values: Values) -> Reals:
    """The mean over the last axis; NaN over an empty window."""
    length = values.shape[1]
    mean: Reals = values.sum(axis=1) / length if length else np.full(len(values), np.nan)
    return mean
