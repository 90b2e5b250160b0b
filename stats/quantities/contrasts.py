"""The quantities of two actions: of action b against baseline a (definitions, "Contrast", "EOS partition")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvdrift.stats.quantities.actions import ACTION_QUANTITIES, WORSE
from kvdrift.stats.registry import Array, Pooled, Quantity, Range, Scale, contrast_quantity, difference_of, ratio

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
    """The difference of a quantity of actions, under a name of its own."""
    return replace(
        difference_of(ACTION_QUANTITIES[of]), name=name, label=label, meaning=meaning, view=view, column=name
    )


def _less(name: str, one: Quantity, other: Quantity, label: str, meaning: str, view: str | None = None) -> Quantity:
    """A contrast less another."""
    return contrast_quantity(name, lambda a, b: one.function(a, b) - other.function(a, b), label, meaning, view,
                             values=_SECOND)  # fmt: skip


def _share(part: Quantity, whole: Quantity, name: str, label: str, meaning: str, view: str) -> Quantity:
    """A contrast divided by another."""
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
    "eos_related", _eos_related, "Δ(G₁+G₂+G₃)", "of it at or after an EOS", _EOS, values=_SECOND
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
    one.name: one
    for one in (
        _gap, *_terms, *_shares, _tv, _fixed, _flat,
        # As in the paper's table trajectory-uncalibrated
        _less("full_minus_fixed_history", _tv, _fixed, "ΔR (TV) − ΔF", "what fixed history misses"),
        _less("full_minus_flat_extrapolation", _tv, _flat, "ΔR (TV) − flat gap", "what flat extrapolation misses"),
        _history,
        contrast_quantity("pre_eos", lambda a, b: b["eos_gap_0"] - a["eos_gap_0"], "ΔG₀", "of it before either EOS",
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
