"""The quantities of answers (definitions, "Answers"), pooled over documents with answers alone.

Their functions take pooled moments that include the moments of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stats.registry import IMPLIED_RANGES, Array, Higher, Pooled, Quantity, Scale, difference_of, moment, ratio

_Function = Callable[[Pooled], Array]


def _score_gap(m: Pooled) -> Array:
    """M(score_Y - score_X)."""
    return m["compressed_score"] - m["reference_score"]


def _share(part: str, whole: str) -> _Function:
    return lambda m: ratio(m[part], m[whole])


def _quantity(
    name: str,
    function: _Function,
    label: str,
    meaning: str,
    scale: Scale = Scale.PERCENT,
    higher: Higher = Higher.WORSE,
    per: str = "",
) -> Quantity:
    between = IMPLIED_RANGES[scale]
    denominator = moment(per) if per else None
    return Quantity(
        name, "action", function, label, meaning, scale, between, "answers", name, higher=higher, per=denominator
    )


def _share_of(name: str, part: str, whole: str, label: str, meaning: str) -> Quantity:
    return _quantity(name, _share(part, whole), label, meaning, per=whole)


_OF_ACTIONS = (
    _quantity("accuracy_reference", moment("reference_score"), "accuracy of X", "mean score of the reference",
              higher=Higher.NEITHER),
    _quantity("accuracy", moment("compressed_score"), "accuracy of Y", "mean score of the texts Y",
              higher=Higher.BETTER),
    _quantity("score_gap", _score_gap, "score gap", "accuracy of Y less accuracy of X", Scale.POINTS,
              Higher.BETTER),
    _quantity("lost", moment("lost"), "lost", "pairs of which X is right and Y is not"),
    _quantity("gained", moment("gained"), "gained", "pairs of which Y is right and X is not",
              higher=Higher.BETTER),
    _share_of("lost_share", "lost", "reference_right", "lost share", "lost, of the pairs of which X is right"),
    _share_of("lost_before", "lost_from_before", "right_before",
              "lost, τ before", "of right answers whose pair parts before the first token of the answer"),
    _share_of("lost_inside", "lost_from_inside", "right_inside",
              "lost, τ inside", "of right answers whose pair parts within the answer"),
    _share_of("lost_after", "lost_from_after", "right_after",
              "lost, τ after", "of right answers whose pair parts after the last token of the answer"),
)  # fmt: skip

ANSWER_QUANTITIES: Mapping[str, Quantity] = {
    quantity.name: quantity
    for quantity in (*_OF_ACTIONS, *map(difference_of, _OF_ACTIONS[1:6]))
}  # fmt: skip
