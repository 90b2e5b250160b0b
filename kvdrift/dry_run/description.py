"""``kvdrift run --dry-run``: forecast the work, memory and time of a run, or raise the error that would refuse the run.

Nothing is downloaded, and no store is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

from kvdrift.dry_run.timing import Seconds, StudyTime, study_time
from kvdrift.flows.generate.local import LocalGenerator
from kvdrift.flows.generate.storing import storing
from kvdrift.flows.material import Material, SharedMaterial
from kvdrift.flows.run.checks import check_study, remarks
from kvdrift.flows.run.comparison import begun_revisions, check_agrees
from kvdrift.flows.run.study_run import Forecast, SplitForecast, StudyRun, check_gpu_here, forecast
from kvdrift.generator.actions import Action
from kvdrift.generator.engines.http.engine import ServerSide, position_cost
from kvdrift.generator.engines.model import EngineFootprint, EngineModel, engine_footprint
from kvdrift.generator.engines.registry import engine_model, tokenizer_location
from kvdrift.generator.transformer.files.local_folders import has_local_weights, local_configuration
from kvdrift.generator.transformer.files.locations import model_location
from kvdrift.generator.transformer.files.text_ends import end_texts, text_ends
from kvdrift.generator.transformer.footprint import Footprint, MemoryPlan, local_footprint, memory_here, plan_memory
from kvdrift.generator.transformer.other_weights.named import weights_location, with_own_weights
from kvdrift.log.units.revisions import newest_revisions
from kvdrift.schema.errors import KvdriftError
from kvdrift.schema.progress import SILENT
from kvdrift.schema.study import CONTROL_REPLICATES, FINITE_STATE, FLOOR_ACTION, HTTP, Study
from kvdrift.schema.study.described import described_action
from kvdrift.schema.tables import PLAIN, SWRB

# Approximate bytes in the store for a unit and an event, with their derived rows, folders and logs (quickstart).
_UNIT_BYTES = 25_000
_EVENT_BYTES = 18
_PROMPT_TOKEN_BYTES = 2  # for each prompt token and action: which layers keep the token
_BESIDE_SECONDS = 20.0  # of imports, a plan, estimates and a report of a few actions, measured on two cores
_NEARLY = 0.8  # share of the longest prompt from which on the rest does not count as extrapolated

_Footprints = dict[str | None, Footprint]  # by the place of an action's own weights; None is the reference


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
    """Yield lines on what a run of a file's studies would generate, derive and estimate, with memory and time.

    If the plan is not frozen yet, the evaluation is shown at the largest size that the plan may choose. If units are to
    be generated and the model is on this machine, the last lines come from generating and timing some documents, which
    takes up to two minutes.

    ``studies`` has a study for each model and temperature. ``redo`` names actions that the run is to redo. ``doing``
    receives a line before each step that takes long. ``served`` says that an endpoint or a cluster would generate; the
    forecast does not contact it. ``gpus`` is the number of this machine's GPUs that would generate, or 0.
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
        expected = forecast(run, redone)
        sampling = f", {study.sampling.other_words}" if study.sampling.other_words else ""
        yield f"study '{study.name}' on {study.model.id}, H = {study.study.horizon}{sampling}; store {location}"
        yield from end_lines(study)
        for what in absent:
            yield f"  not checked: {what}"
        yield _plan_line(expected)
        for split in expected.splits:
            yield from _split_lines(run, split, redone)
        yield from _later_lines(expected)
        if any(split.work for split in expected.splits) and study.model.kind == FINITE_STATE:
            yield "  no model is loaded and no prompt is kept: the distributions of the systems are looked up"
        elif any(split.work for split in expected.splits):
            yield from _need_lines(run.material, expected, doing, served=served, gpus=gpus)
            if study.name != study.name_in_file and len(studies) > 1:
                yield "    the run prefills prompts once for all temperatures; this forecast has a prefill for each"


def _plan_line(expected: Forecast) -> str:
    if expected.plan is None:
        return (
            "  plan: to be made from the development documents; the evaluation below is the largest that the plan may "
            "choose"
        )
    line = (
        f"  plan: {expected.plan.sha256[:12]}, frozen {expected.plan.frozen_at:%Y-%m-%d %H:%M} UTC: "
        f"K = {expected.plan.replicates}, N = {expected.plan.documents_per_stratum} documents of each stratum"
    )
    if expected.plan.looks is not None:
        line += f" at most, in {len(expected.plan.looks)} interim looks"
    if expected.requested_plan is None:
        return f"{line}; to be made again, so the evaluation below is the largest that the plan may choose"
    if expected.requested_plan is not expected.plan:
        grown = expected.requested_plan
        return f"{line}; it grows to K = {grown.replicates}, N = {grown.documents_per_stratum}"
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
        f"about {_binary(taken)} in the store"
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
    return action.name == FLOOR_ACTION if engine else action.control


def _later_lines(expected: Forecast) -> Iterator[str]:
    generated = sum(split.pending.total() for split in expected.splits)
    if expected.finished:
        yield "  nothing to do"
        return
    derived = [f"{expected.underived} units that are stored"] if expected.underived else []
    derived += ["those that are generated"] if generated else []
    lacking = [f"derive {' and '.join(derived)}"] if derived else []
    lacking += ["score answers"] if expected.unscored else []
    current = expected.estimated and not (generated or expected.unscored) and expected.requested_plan is expected.plan
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
    named = ", ".join(end_texts(ends, tokenizer_location(study.model), study.model.revision))
    yield f"  texts end at {named}" if named else "  no token ends a text: every text goes on to H"


def _need_lines(
    material: Material, expected: Forecast, doing: Callable[[str], None], *, served: bool, gpus: int
) -> Iterator[str]:
    """Yield lines on the caches, memory and time of a study, on this machine or, if ``served``, on another.

    ``doing`` receives a line before each step that takes long.
    """
    model = material.study.model
    if model.engine is not None:
        yield from _engine_lines(material, expected, doing)
        return
    location = model_location(model)
    footprints = _footprints(material.study)
    yield from _action_lines(material, footprints)
    if material.nominal:
        strata = [stratum for stratum in material.documents["evaluation"] if stratum in material.nominal]
        yield (
            f"  lengths are nominal in {', '.join(strata)}: the study file's length is the most tokens of a prompt; "
            "retention follows the true length, known once the prompt is tokenized"
        )
        positions = (local_configuration(location, model.revision) or {}).get("max_position_embeddings", sys.maxsize)
        room, nominal = positions - material.study.study.horizon, material.documents["evaluation"]
        if tight := [stratum for stratum in strata if nominal[stratum][0].prompt_tokens > room]:
            yield (
                f"  the model has {positions:,} positions: a prompt of more than {room:,} tokens will be refused, "
                f"if there is one in {', '.join(tight)}"
            )
    memory = None if footprints is None else _plan_memory(material, expected, footprints)
    if footprints is None or memory is None:
        several = "s of the model and of the actions' weights, which are not all"
        whose = several if material.study.own_weights else " of the model, which is not"
        yield f"  bytes and memory need the configuration{whose} on this machine"
    else:
        yield _memory_line(material.study, footprints, memory)
    if gpus:
        yield f"  generation on {gpus} GPU{'s' if gpus > 1 else ''} of this machine, one worker each"
    yield from time_lines(material, expected, memory, doing, served=served, gpus=gpus)


def _engine_lines(material: Material, expected: Forecast, doing: Callable[[str], None]) -> Iterator[str]:
    """Yield lines on the actions, memory and time of a study that an engine decodes."""
    for action in material.actions:
        yield f"  action {action.name}: {described_action(action.row(material.study.name, prespecified=True))}"
    made = engine_model(material.study)
    most = max(split.replicates[1] for split in expected.splits)
    need = engine_footprint(made, _lengths(material), material.study.study.horizon, most)
    if material.study.model.engine == HTTP:
        yield from _server_lines(material, made, need)
    else:
        yield f"  memory of generation: {need.words}"
    if need.fits:
        yield from _measured_lines(material, expected, doing, gpus=0)


def _server_lines(material: Material, made: EngineModel, need: EngineFootprint) -> Iterator[str]:
    """Yield a line for each server on the cost of a position after the longest prompt, then one on a pair's streams."""
    longest = max(material.of_split("development"), key=lambda document: document.prompt_tokens)
    for name, side in {"reference": made.reference, **made.sides}.items():
        if isinstance(side, ServerSide) and name != FLOOR_ACTION:
            yield f"  {name} at {position_cost(side, longest.tokens)}"
    yield (
        "  a pair has two streams on its action's server, and shares the reference's with other actions; up to "
        f"{need.replicates_at_once} replicates at once"
    )


def time_lines(
    material: Material, expected: Forecast, memory: MemoryPlan | None, doing: Callable[[str], None], *, served: bool,
    gpus: int,
) -> Iterator[str]:  # fmt: skip
    """Yield the time of generation, measured here; or why it is not measured."""
    model = material.study.model
    if served:
        yield "  time: not measured; another machine generates"
        return
    if memory is not None and not memory.fits:
        yield "  time: not measured; there is too little memory"
        return
    others = [weights_location(material.study, action) for action in with_own_weights(material.study)]
    if not (has_local_weights(model_location(model), model.revision) and all(map(has_local_weights, others))):
        yield "  time: needs the model's weights, which are not on this machine"
        return
    yield from _measured_lines(material, expected, doing, gpus=gpus)


def _measured_lines(
    material: Material, expected: Forecast, doing: Callable[[str], None], *, gpus: int
) -> Iterator[str]:
    model = material.study.model
    try:
        took = study_time(material, expected.splits, doing)
    except KvdriftError as error:
        yield f"  time: not measured; {error}"
        return
    share = 1 / max(gpus, 1)
    spans = [f"{split} {_duration(seconds.times(share, share))}" for split, seconds in took.splits.items()]
    device = f"{gpus} GPUs like this one" if gpus > 1 else took.device
    by = "by the servers" if model.engine == HTTP else f"on {device} ({model.engine or model.dtype})"
    yield f"  time of generation {by}, an estimate: {', '.join(spans)}"
    beside = took.once + _BESIDE_SECONDS
    whole = sum((seconds.times(share, share) for seconds in took.splits.values()), Seconds(beside, beside))
    yield f"    with loading, planning, estimating and the report: {_duration(whole)}"
    yield f"    {_measured(took, material)}"


def _measured(took: StudyTime, material: Material) -> str:
    """Return a line on the measurement: its seconds, its rate, and what is extrapolated."""
    longest, horizon = max(_lengths(material)), material.study.study.horizon
    rate = f"{took.prompt_rate:,.0f}" if took.prompt_rate >= 10 else f"{took.prompt_rate:.2g}"
    rate += " prompt tokens a second"
    if not took.samples:
        return (
            f"from {took.measuring:.0f} s of reading a prompt here, at {rate}; decoding was not tried, and is guessed"
        )
    read, decoded = (max(getattr(sample, name) for sample in took.samples) for name in ("tokens", "positions"))
    line = f"from {took.measuring:.0f} s of generating here, at {rate}"
    cut = [f"{read:,} of {longest:,} prompt tokens"] if read < _NEARLY * longest else []
    cut += [f"{decoded} of {horizon} positions"] if decoded < horizon else []
    return f"{line}; measured were {' and '.join(cut)} at most, and the rest is extrapolated" if cut else line


def _duration(seconds: Seconds) -> str:
    unit, name = next(
        (size, name) for size, name in ((86_400, "d"), (3_600, "h"), (60, "min"), (0, "s")) if seconds.high >= 2 * size
    )
    low, high = (f"{float(f'{value / (unit or 1):.2g}'):,g}" for value in (seconds.low, seconds.high))  # no 1.1e+02
    return f"about {high} {name}" if low == high else f"{low} to {high} {name}"


def _lengths(material: Material) -> list[int]:
    return [document.prompt_tokens for split in material.documents for document in material.of_split(split)]


def _footprints(study: Study) -> _Footprints | None:
    """Return the footprint of each side of a study: the reference's under None, others by the places of their weights.

    None if some model's configuration is not on this machine.
    """
    model = study.model
    footprints: dict[str | None, Footprint | None] = {
        None: local_footprint(model_location(model), model.dtype, model.revision, model.device)
    }
    for location in {weights_location(study, action): None for action in with_own_weights(study)}:
        footprints[location] = local_footprint(location, model.dtype, device=model.device)
    known = {location: footprint for location, footprint in footprints.items() if footprint is not None}
    return known if len(known) == len(footprints) else None


def _side(study: Study, action: Action) -> str | None:
    """Return the place of an action's own weights, the key of its footprint; None if it has the reference's."""
    return None if action.weights is None else weights_location(study, action)


def _loaded(study: Study, footprints: _Footprints) -> list[Footprint]:
    """Return the footprints of the models that ``load_transformer`` loads: weights at one place are loaded once."""
    reference = None if study.model.revision else model_location(study.model)
    return [footprint for location, footprint in footprints.items() if location is None or location != reference]


def _action_lines(material: Material, footprints: _Footprints | None) -> Iterator[str]:
    lengths = _lengths(material)
    for action in material.actions:
        # The room for the selector's window and sinks was checked with the material.
        horizon = material.study.study.horizon
        ends = min(lengths), max(lengths)
        kept = [action.most_entries(entries, horizon) for entries in ends]
        what, cache = "prompt entries", "prompt cache"
        if action.policy is not None:
            what, cache = "entries at most in every step", "cache, generated entries included"
        described = described_action(action.row(material.study.study.name, prespecified=True))
        line = f"  action {action.name}: {described}: {_span(*(f'{m:,}' for m in kept))} {what}"
        if footprints is not None:
            footprint = footprints[_side(material.study, action)]
            held = (_cache_bytes(action, footprint, m, entries, horizon) for m, entries in zip(kept, ends, strict=True))
            line += f", {_span(*map(_binary, held))} of {cache}"
            fixed = [footprint.shape.fixed_bytes(entries) for entries in ends]
            if fixed[-1]:
                line += f", of which no action can evict {_span(*map(_binary, fixed))} (windows and states)"
        yield line


def _cache_bytes(action: Action, footprint: Footprint, most: int, entries: int, horizon: int) -> int:
    """Return the bytes of an action's cache of a prompt; ``most`` is the number of entries that a layer has."""
    layers = footprint.shape.evictable_layers
    whole = action.chosen.left_out(layers)
    held = [most] * layers if action.policy is not None else action.layer_entries(most, entries, layers)
    indexed = range(layers) if action.removes(entries, horizon) else ()
    return footprint.cache_bytes(held, action.holdings(layers), indexed=set(indexed) - whole)


def _plan_memory(material: Material, expected: Forecast, footprints: _Footprints) -> MemoryPlan:
    """Plan memory for the longest prompt and the most replicates; if the device is not here, as if it had no limit."""
    study, longest = material.study, max(_lengths(material))
    here = memory_here(study.model.device, study.model.device_map)
    least, most = CONTROL_REPLICATES, max(split.replicates[1] for split in expected.splits)
    sides = [
        (
            footprint.shape,
            [0 if action.control else _room(action, longest, footprint) for action in actions],
            [min(least, most) if action.control else most for action in actions],
        )
        for side, footprint in footprints.items()  # the reference's is the first; a control shares its entries
        for actions in [[action for action in material.actions if _side(study, action) == side]]
    ]
    return plan_memory(
        sides,
        longest,
        study.study.horizon,
        sys.maxsize if here is None else here - _weight_bytes(study, footprints),
        PLAIN if study.plan.estimator == PLAIN else SWRB,
        apart=any(action.prefill_chunk is not None for action in material.actions),
        scored=max((action.scored_entries(longest, study.study.horizon) for action in material.actions), default=0),
        packed=(study.model.device, study.model.dtype) == ("cpu", "float32"),
    )


def _room(action: Action, entries: int, footprint: Footprint) -> int:
    """Return for how many of ``entries`` entries an action's cache has room in a KV head, at most.

    They are the kept ones, on average over layers; or, if heads share them, those of the longest head, to which the
    others are padded.
    """
    kept, shape = action.retention.kept(entries), footprint.shape
    held = [
        min(entries, of_layer + (shape.kv_heads - 1) * (of_layer - action.chooser.least_of_head(of_layer)))
        for of_layer in action.layer_entries(kept, entries, shape.evictable_layers)
    ]
    return -(-sum(held) // max(len(held), 1))


def _weight_bytes(study: Study, footprints: _Footprints) -> int:
    """Return the bytes of the weights of all models, which share the memory."""
    return sum(footprint.weight_bytes for footprint in _loaded(study, footprints))


def _memory_line(study: Study, footprints: _Footprints, memory: MemoryPlan) -> str:
    device, weights = "all GPUs" if study.model.device_map else study.model.device, _weight_bytes(study, footprints)
    if memory.available_bytes == sys.maxsize:
        left = f"there is no {device} here"
    else:
        available = _binary(memory.available_bytes + weights)
        left = f"{available} available on {device}" + ("" if memory.fits else ", which is too little")
    loaded = len(_loaded(study, footprints))
    models = f" of {loaded} models" if loaded > 1 else ""
    return (
        f"  memory of generation: {_binary(weights)} of weights{models} and {_binary(memory.peak_bytes)} for the "
        f"longest prompt, {memory.replicates_at_once} of {memory.replicates} replicates at once; {left}"
    )


def _span(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


def _binary(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
