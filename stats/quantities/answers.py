"""The quantities of answers (definitions, "Answers"): of documents with answers, pooled over these alone.

Their functions take pooled moments as those of ``stats.quantities`` do, with the moments of answers among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stats.registry import IMPLIED_RANGES, Array, Higher, Pooled, Quantity, Scale, difference_of, ratio

_Function = Callable[[Pooled], Array]


def _score_gap(m: Pooled) -> Array:
    """M(score_Y - score_X)."""
    return m["compressed_score"] - m["reference_score"]


def _moment(name: str) -> _Function:
    return lambda m: m[name]


def _share(part: str, whole: str) -> _Function:
    return lambda m: ratio(m[part], m[whole])


def _quantity(
    name: str,
    function: _Function,
    label: str,
    meaning: str,
    scale: Scale = Scale.PERCENT,
    higher: Higher = Higher.WORSE,
) -> Quantity:
    between = IMPLIED_RANGES[scale]
    return Quantity(name, "action", function, label, meaning, scale, between, "answers", name, higher=higher)


_OF_ACTIONS = (
    _quantity("accuracy_reference", _moment("reference_score"), "accuracy of X", "mean score of the reference",
              higher=Higher.NEITHER),
    _quantity("accuracy", _moment("compressed_score"), "accuracy of Y", "mean score of the compressed model",
              higher=Higher.BETTER),
    _quantity("score_gap", _score_gap, "score gap", "accuracy of Y less accuracy of X", Scale.POINTS,
              Higher.BETTER),
    _quantity("lost", _moment("lost"), "lost", "pairs of which X is right and Y is not"),
    _quantity("gained", _moment("gained"), "gained", "pairs of which Y is right and X is not",
              higher=Higher.BETTER),
    _quantity("lost_share", _share("lost", "reference_right"), "lost share", "lost, of the pairs of which X is right"),
    _quantity("lost_before", _share("lost_from_before", "right_before"),
              "lost, τ before", "of right answers whose pair parts before the first token of the answer"),
    _quantity("lost_inside", _share("lost_from_inside", "right_inside"),
              "lost, τ inside", "of right answers whose pair parts within the answer"),
    _quantity("lost_after", _share("lost_from_after", "right_after"),
              "lost, τ after", "of right answers whose pair parts after the last token of the answer"),
)  # fmt: skip

ANSWER_QUANTITIES: Mapping[str, Quantity] = {
    quantity.name: quantity
    for quantity in (*_OF_ACTIONS, *map(difference_of, _OF_ACTIONS[1:6]))
}  # fmt: skip
