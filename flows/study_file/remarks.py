"""What a run says of its study file at once: what it leaves out, and what it asks for to no purpose."""

from __future__ import annotations

from collections.abc import Sequence

from generator.documents.registry import left_out
from schema.study import Study


def remarks(studies: Sequence[Study]) -> list[str]:
    """Return a line on each thing that the studies of one file do otherwise than one may have meant.

    Args:
        studies: The studies, one to a model and law, which can be done.

    Raises:
        InputError: A file of documents changed, and is faulty now.
    """
    return [*left_out(studies[0].documents), *dict.fromkeys(filter(None, map(_equal_replicates, studies)))]


def _equal_replicates(study: Study) -> str:
    """Say that replicates are equal, or nearly always are, where the study file asks for several."""
    asked, law = study.plan.replicates, study.law
    if law.greedy and asked != "auto" and asked > 1:
        return (
            f"plan.replicates = {asked}: a plan of study '{study.name}' takes 1, since at temperature 0 all replicates "
            "of a document are the same"
        )
    if law.top_k == 1 and asked != 1:
        return (
            f"study.top_k = 1: leaves the most probable token of study '{study.name}', and others where logits are "
            "equal; temperature = 0 takes the first of these, and one replicate"
        )
    return ""
