"""Remarks on a study file at the start of a run: on parts that it leaves out, and on settings without effect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from kvdrift.flows.material import Material
from kvdrift.flows.plan.making import primary_endpoints
from kvdrift.flows.run.study_run import StudyRun
from kvdrift.generator.actions import Action
from kvdrift.generator.documents.answers import task_scoring
from kvdrift.generator.documents.registry import left_out
from kvdrift.generator.transformer.files.local_folders import model_location
from kvdrift.generator.transformer.files.text_ends import absent_ends, text_ends
from kvdrift.schema.document import Document
from kvdrift.schema.study import FINITE_STATE, FIXED, HTTP, KERNEL_FLOOR_ACTION, Study

_DRAWS_BEYOND = 50
_NAMED = 3  # control tokens in a line


def remarks(runs: Sequence[StudyRun]) -> list[str]:
    """Return a line on each setting of a file's studies, checked before, that may have another effect than meant."""
    lines = left_out(runs[0].study.documents)
    for run in runs:
        lines += _absent_eos_tokens(run.study)
        lines += _absent_kernel_floor(run.study)
        lines += _equal_replicates(run.study)
        lines += _unreached_bounds(run.study)
        lines += _unscored_tasks(run.study)
        lines += _control_tokens(run.material)
        lines += _whole_caches(run.material)
        lines += _equal_prompts(run.material)
        lines += _single_clusters(run.material)
    return list(dict.fromkeys(lines))


def _absent_eos_tokens(study: Study) -> Iterator[str]:
    """Name EOS tokens that a model's vocabulary lacks."""
    if study.model.kind == FINITE_STATE or study.model.engine is not None or study.study.eos is not None:
        return
    if absent := absent_ends(model_location(study.model), study.model.revision):
        which = f"EOS token{'s' if absent[1:] else ''} {', '.join(map(str, absent))}"
        effect = "nothing ends there" if text_ends(study).tokens else "no continuation ends"
        yield (
            f"model.id = '{study.model.id}': {which} of its configuration {'are' if absent[1:] else 'is'} not in its "
            f"vocabulary (vocab_size), and {effect}"
        )


def _absent_kernel_floor(study: Study) -> Iterator[str]:
    """Say that an engine's study measures no kernel floor, and how it would."""
    if study.model.has_floor and all(action.name != KERNEL_FLOOR_ACTION for action in study.actions):
        how = (
            "a url of the same model, started with another attention kernel"
            if study.model.engine == HTTP
            else "settings"
        )
        yield (
            f"study '{study.name}': no action '{KERNEL_FLOOR_ACTION}', so that what rounding alone does stays unknown; "
            f'add [[actions]] name = "{KERNEL_FLOOR_ACTION}" with {how}'
        )


def _control_tokens(material: Material) -> Iterator[str]:
    """Name control tokens of the tokenizer that stand in users' texts."""
    for templated in (False, True):
        found = [one for one in material.every_document if one.control_tokens and one.templated == templated]
        if not found:
            continue
        names = list(dict.fromkeys(name for document in found for name in document.control_tokens))
        named = ", ".join(names[:_NAMED]) + f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)
        count, first = sum(len(document.control_tokens) for document in found), found[0]
        which = f"{_counted(len(found), 'document')} have {_counted(count, 'control token')} of the tokenizer ({named})"
        place = f"in '{first.doc}'" if len(found) == 1 else f"{len(first.control_tokens)} in '{first.doc}'"
        read = "which messages keep as text" if templated else "which act as such in a prompt without a chat template"
        yield f"the texts of {which}, {place}, {read}"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def _whole_caches(material: Material) -> Iterator[str]:
    """Name actions that keep the whole cache of some prompts, so that they do nothing there."""
    documents = material.every_document
    for action in material.actions:
        if action.retention.rule is not None and action.codec is None:
            whole = [one for one in documents if _is_whole(action, one.prompt_tokens, material.study.study.horizon)]
            strata = ", ".join(dict.fromkeys(document.stratum for document in whole))
            if whole:
                yield (
                    f"action '{action.name}': keep = {action.retention} is the whole cache of {len(whole)} of "
                    f"{len(documents)} documents ({strata}), so nothing can differ there"
                )


def _is_whole(action: Action, entries: int, horizon: int) -> bool:
    if action.policy is not None:
        return action.budget(entries, horizon) is None
    return action.retention.kept(entries) == entries


def _equal_replicates(study: Study) -> Iterator[str]:
    """Say that replicates are equal if the study file asks for several."""
    asked, law = study.plan.replicates, study.law
    if law.greedy and asked != "auto" and asked > 1:
        yield (
            f"plan.replicates = {asked}: a plan of study '{study.name}' takes 1, since at temperature 0 all replicates "
            "of a document are the same"
        )
    elif law.top_k == 1 and asked != 1:
        yield (
            f"study.top_k = 1: leaves one token of study '{study.name}', so that all replicates of a document are the "
            "same; temperature = 0 is the same law, and a plan takes 1 replicate"
        )


def _unreached_bounds(study: Study) -> Iterator[str]:
    """Name bounds of the plan that cannot be reached."""
    planned, available = study.plan, min(section.evaluation for section in study.documents)
    if planned.documents == "auto" and planned.documents_at_least > available:
        yield (
            f"plan.documents_at_least = {planned.documents_at_least}: a stratum has only {available} evaluation "
            f"documents, so that N is {available}"
        )
    tail = planned.alpha / (planned.family_size or len(primary_endpoints(study))) / 2
    if planned.stopping == FIXED and planned.draws * tail < 1:
        yield (
            f"plan.draws = {planned.draws}: fewer than one draw lies beyond an end of a primary interval, which may be "
            f"too narrow; {round(_DRAWS_BEYOND / tail):,} draws have {_DRAWS_BEYOND} there"
        )


def _unscored_tasks(study: Study) -> Iterator[str]:
    """Name tasks whose benchmark scores them by a rule that is not here."""
    for section in study.documents:
        unscored = [task for task in section.tasks if task_scoring(section.source, task) is None]
        if unscored:
            yield (
                f"documents '{section.stratum_name}': answers of {', '.join(unscored)} are not scored, since the rule "
                f"of {section.source} for them is not here"
            )


def _equal_prompts(material: Material) -> Iterator[str]:
    """Name documents of equal prompts, which intervals take as independent."""
    same = defaultdict[tuple[int, ...], list[Document]](list)
    for document in material.every_document:
        if document.tokens and document.stratum not in material.nominal:
            same[document.tokens].append(document)
    repeated = [own for own in same.values() if len({document.cluster for document in own}) > 1]
    if repeated:
        first, second = next((one, other) for one, *rest in repeated for other in rest if one.cluster != other.cluster)
        yield (
            f"{sum(map(len, repeated))} documents share {len(repeated)} {'prompt' if len(repeated) == 1 else 'prompts'}"
            f", such as '{first.doc}' and '{second.doc}', and intervals take them for independent; give those of one "
            "prompt one cluster, or leave out all but one"
        )


def _single_clusters(material: Material) -> Iterator[str]:
    """Name strata whose evaluation documents form a single cluster."""
    planned = material.study.plan.documents
    for stratum, documents in material.documents["evaluation"].items():
        taken = documents if planned == "auto" else documents[:planned]
        if len({document.cluster for document in taken}) == 1:
            what = "one evaluation document" if len(taken) == 1 else f"{len(taken)} evaluation documents of one cluster"
            yield f"stratum '{stratum}': a plan takes {what}, which gives no interval"
