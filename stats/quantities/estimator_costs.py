"""The quantities of residual branching (SWRB) beside coupled pairs, estimated by ``kvdrift.stats.efficiency``.

Variances, evaluations and seconds are those of one replicate given its document (definitions, "Residual-branch
conditional Monte Carlo").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvdrift.stats.registry import Array, BranchingQuantity, Scale, Support, ratio

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
