"""The quantities of answers (definitions, "Answers"), pooled over documents with answers alone.

Their functions take pooled moments that include the moments of answers.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvdrift.stats.registry import Higher, Quantity, Scale, action_quantity, difference_of, moment, ratio_quantity

WORSE, BETTER = Higher.WORSE, Higher.BETTER
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
                   "of right answers whose pair parts before the first token of the answer", _VIEW, WORSE),
    ratio_quantity("lost_inside", "lost_from_inside", "right_inside", "lost, τ inside",
                   "of right answers whose pair parts within the answer", _VIEW, WORSE),
    ratio_quantity("lost_after", "lost_from_after", "right_after", "lost, τ after",
                   "of right answers whose pair parts after the last token of the answer", _VIEW, WORSE),
)  # fmt: skip

ANSWER_QUANTITIES: Mapping[str, Quantity] = {
    quantity.name: quantity
    for quantity in (*_OF_ACTIONS, *map(difference_of, _OF_ACTIONS[1:6]))
}  # fmt: skip
