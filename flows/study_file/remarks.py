"""What a run says of its study file at once: what it leaves out, and what it asks for to no purpose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flows.material import Material
from flows.study_run import StudyRun
from generator.actions import Action
from generator.documents.registry import left_out
from schema.study import Study


def remarks(runs: Sequence[StudyRun]) -> list[str]:
    """Return a line on each thing that the studies of one file do otherwise than one may have meant.

    Args:
        runs: A run of each study, one to a model and law, which can be done.

    Raises:
        InputError: A file of documents changed, and is faulty now.
    """
    lines = left_out(runs[0].study.documents)
    for run in runs:
        lines += _equal_replicates(run.study)
        lines += _whole_caches(run.material)
    return list(dict.fromkeys(lines))


def _whole_caches(material: Material) -> Iterator[str]:
    """Name actions whose number of entries is that of the whole cache, so that they do nothing to some prompts."""
    documents = [document for split in material.documents for document in material.of_split(split)]
    for action in material.actions:
        if action.retention.rule is not None and action.codec is None:
            whole = [one for one in documents if _is_whole(action, one.prompt_tokens, material.study.study.horizon)]
            strata = ", ".join(dict.fromkeys(document.stratum for document in whole))
            if whole:
                yield (
                    f"action '{action.name}': keep = {action.retention} is the whole cache of {len(whole)} of "
                    f"{len(documents)} documents ({strata}), where nothing can differ"
                )


def _is_whole(action: Action, entries: int, horizon: int) -> bool:
    if action.policy is not None:
        return action.budget(entries, horizon) is None
    return action.retention.kept(entries) == entries


def _equal_replicates(study: Study) -> Iterator[str]:
    """Say that replicates are equal, or nearly always are, where the study file asks for several."""
    asked, law = study.plan.replicates, study.law
    if law.greedy and asked != "auto" and asked > 1:
        yield (
            f"plan.replicates = {asked}: a plan of study '{study.name}' takes 1, since at temperature 0 all replicates "
            "of a document are the same"
        )
    elif law.top_k == 1 and asked != 1:
        yield (
            f"study.top_k = 1: leaves the most probable token of study '{study.name}', and others where logits are "
            "equal; temperature = 0 takes the first of these, and one replicate"
        )
