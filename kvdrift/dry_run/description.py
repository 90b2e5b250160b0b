"""``kvdrift run --dry-run``: the work or the refusal of a run. Nothing is fetched or written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvdrift.dry_run.needs import binary, need_lines
from kvdrift.flows.generate.local import LocalGenerator
from kvdrift.flows.generate.storing import storing
from kvdrift.flows.material import SharedMaterial
from kvdrift.flows.run.checks import check_study
from kvdrift.flows.run.comparison import check_agrees
from kvdrift.flows.run.forecast import Forecast, SplitForecast, check_gpu_here, forecast
from kvdrift.flows.run.remarks import remarks
from kvdrift.flows.run.revisions import begun_revisions
from kvdrift.flows.run.study_run import StudyRun
from kvdrift.generator.actions import Action
from kvdrift.generator.generation.engine_models import engine_model
from kvdrift.generator.transformer.files.local_folders import local_configuration, model_location
from kvdrift.generator.transformer.files.text_ends import end_texts, text_ends
from kvdrift.log.units.revisions import newest_revisions
from kvdrift.schema.progress import SILENT
from kvdrift.schema.study import FINITE_STATE, FLOOR_ACTION, Study
from kvdrift.schema.tables import SWRB

# Approximate bytes in the store for a unit and an event, with their derived rows, folders and logs (quickstart).
_UNIT_BYTES = 25_000
_EVENT_BYTES = 18
_PROMPT_TOKEN_BYTES = 2  # for each prompt token and action: which layers keep the token


def describe_studies(
    studies: Sequence[Study],
    location: str,
    redo: Sequence[str] = (),
    doing: Callable[[str], None] = SILENT.say,
    *,
    served: bool = False,
    gpus: int = 0,
    replan: bool = False,
) -> Iterator[str]:
    """Say line by line what a run of the studies of one file would generate, derive and estimate, and what it needs.

    If the plan is not frozen yet, the evaluation is shown at the largest size that the plan may choose. The last lines
    are measured, which takes up to two minutes if units are to be generated and the model is on this machine.

    Args:
        studies: the studies, one to a model and law.
        location: where the store is or will be: an absolute path or a URL.
        redo: names of actions that the run is to redo.
        doing: receives a line before each step that takes long.
        served: whether an endpoint or a cluster generates; neither is asked.
        gpus: how many GPUs of this machine generate, with a worker each; 0 if none of them was asked for.
        replan: whether the run is to plan anew.
    """
    doing("checking the model and reading the documents")
    local, gathered = storing(LocalGenerator()), SharedMaterial()
    runs = [StudyRun(study, location, local, offline=True, replan=replan, gathered=gathered) for study in studies]
    unchecked = [check_study(run, served=served or gpus > 0) for run in runs]
    for run in runs:
        check_agrees(run, redo)
    for run in runs if not served else []:
        check_gpu_here(run, redo)
    begun = begun_revisions(runs, redo) if redo else []
    yield from remarks(runs)
    for run, absent in zip(runs, unchecked, strict=True):
        study, redone = run.study, {row["action"] for row in begun if row["study"] == run.study.name}
        found = forecast(run, redone)
        law = f", {study.law.other_words}" if study.law.other_words else ""
        yield f"study '{study.name}' on {study.model.id}, H = {study.study.horizon}{law}; store {location}"
        yield from end_lines(study)
        for what in absent:
            yield f"  not checked: {what}"
        yield _plan_line(found)
        for split in found.splits:
            yield from _split_lines(run, split, redone)
        yield from _later_lines(found)
        if any(split.work for split in found.splits) and study.model.kind == FINITE_STATE:
            yield "  no model is loaded and no prompt is kept: the laws of the systems are looked up"
        elif any(split.work for split in found.splits):
            yield from need_lines(run.material, found, doing, served=served, gpus=gpus)
            if study.name != study.name_in_file and len(studies) > 1:
                yield "    the run prefills prompts once for all temperatures; this forecast has a prefill for each"


def _plan_line(found: Forecast) -> str:
    if found.plan is None:
        return (
            "  plan: to be made from the development documents; the evaluation below is the largest that the plan may "
            "choose"
        )
    line = (
        f"  plan: {found.plan.sha256[:12]}, frozen {found.plan.frozen_at:%Y-%m-%d %H:%M} UTC: "
        f"K = {found.plan.replicates}, N = {found.plan.documents_per_stratum} documents of each stratum"
    )
    if found.plan.looks is not None:
        line += f" at most, in {len(found.plan.looks)} looks"
    if found.asked is None:
        return f"{line}; to be made again, so the evaluation below is the largest that the plan may choose"
    if found.asked is not found.plan:
        return f"{line}; it grows to K = {found.asked.replicates}, N = {found.asked.documents_per_stratum}"
    return line


def _split_lines(run: StudyRun, split: SplitForecast, redone: set[str]) -> Iterator[str]:
    documents = sum(most for _, most in split.documents.values())
    if not split.work:
        yield f"  {split.split}: {documents} documents, all {split.stored} units are stored"
        return
    units = [unit for _, units in split.work for unit in units]
    engine = run.study.model.engine is not None
    control = FLOOR_ACTION if engine else "full-retention control"
    measured, controls, branched = (
        sum(unit.count for unit in units if (unit.estimator == SWRB, _is_control(unit.action, engine=engine)) == kind)
        for kind in ((False, False), (False, True), (True, False))
    )
    events = (measured + controls + 2 * branched) * run.study.study.horizon  # at most H for a scan, H for a branch
    prompts = sum(
        document.prompt_tokens * (1 + len({unit.action.name for unit in units})) for document, units in split.work
    )
    taken = len(units) * _UNIT_BYTES + events * _EVENT_BYTES
    taken += prompts * _PROMPT_TOKEN_BYTES * run.study.study.store_prompts
    extra = f", {branched:,} replicates of residual branching" if branched else ""
    there = f" besides {split.stored} that are stored" if split.stored else ""
    yield (
        f"  {split.split}:{' at most' if split.bounded else ''} {documents} documents, {len(units)} units{there}, "
        f"{measured:,} trajectories{extra} and {controls:,} of the {control}, {events:,} events, "
        f"about {binary(taken)} in the store"
    )
    by_reason: dict[str, list[str]] = {}
    store = run.stored
    generated = [] if store is None else store.units(run.study.name, run.study.model.id)["action"].unique().to_pylist()
    revisions = {} if store is None else newest_revisions(store.read("actions"))
    for action, count in split.pending.items():
        superseded = revisions.get((run.study.name, action), 0)
        reason = (
            "redone" if action in redone else "missing" if action in generated else "redone" if superseded else "new"
        )
        by_reason.setdefault(reason, []).append(f"{action} ({count})")
    for reason, actions in by_reason.items():
        yield f"    {reason}: {', '.join(actions)}"


def _is_control(action: Action, *, engine: bool) -> bool:
    """Tell whether an action is the full-retention control, or an engine's floor."""
    return action.name == FLOOR_ACTION if engine else action.control


def _later_lines(found: Forecast) -> Iterator[str]:
    """Yield a line for each step after generation."""
    generated = sum(split.pending.total() for split in found.splits)
    if found.finished:
        yield "  nothing to do"
        return
    derived = [f"{found.underived} units that are stored"] if found.underived else []
    derived += ["those that are generated"] if generated else []
    lacking = [f"derive {' and '.join(derived)}"] if derived else []
    lacking += ["score answers"] if found.unscored else []
    current = found.estimated and not (generated or found.unscored) and found.asked is found.plan
    lacking += [] if current else ["estimate"]
    yield f"  then: {', '.join([*lacking, 'write the report'])}"


def end_lines(study: Study) -> Iterator[str]:
    """Yield a line with the tokens that end a text, and where each comes from; none for finite-state systems."""
    if study.model.kind == FINITE_STATE:
        return
    if study.model.engine is not None:
        ends = engine_model(study).ends
    elif local_configuration(model_location(study.model), study.model.revision) is None:
        yield "  texts end at tokens that the model's files name, which are not on this machine"
        return
    else:
        ends = text_ends(study)
    named = ", ".join(end_texts(study, ends))
    yield f"  texts end at {named}" if named else "  no token ends a text: every text goes on to H"
