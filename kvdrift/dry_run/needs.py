"""The needs of a run as lines to read beforehand: memory, the bytes of each action, and the time, measured here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from kvdrift.dry_run.timing import Seconds, StudyTime, study_time
from kvdrift.flows.material import Material
from kvdrift.flows.run.forecast import Forecast
from kvdrift.generator.engines.http.cost import position_cost
from kvdrift.generator.engines.http.engine import ServerSide
from kvdrift.generator.engines.model import EngineModel
from kvdrift.generator.generation.engine_footprint import EngineFootprint, engine_footprint
from kvdrift.generator.generation.engine_models import engine_model
from kvdrift.generator.transformer.files.local_folders import has_local_weights, local_configuration, model_location
from kvdrift.generator.transformer.footprint import Footprint, MemoryPlan, local_footprint, memory_here, plan_memory
from kvdrift.generator.transformer.other_weights.named import weights_location, with_own_weights
from kvdrift.schema.errors import KvdriftError
from kvdrift.schema.study import CONTROL_REPLICATES, FLOOR_ACTION, HTTP, Study
from kvdrift.schema.study.described import described_action
from kvdrift.schema.tables import PLAIN, SWRB

_BESIDE_SECONDS = 20.0  # of imports, a plan, estimates and a report of a few actions, measured on two cores
_NEARLY = 0.8  # share of the longest prompt that is as good as the whole

_Footprints = dict[str | None, Footprint]  # by the name of an action's own weights; None is the reference


def need_lines(
    material: Material, found: Forecast, doing: Callable[[str], None], *, served: bool, gpus: int
) -> Iterator[str]:
    """Yield the needs of a study, for this machine or, if ``served``, for another.

    ``doing`` receives a line before each step that takes long.
    """
    model = material.study.model
    if model.engine is not None:
        yield from _engine_lines(material, found, doing)
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
    memory = None if footprints is None else _plan_memory(material, found, footprints)
    if footprints is None or memory is None:
        several = "s of the model and of the actions' weights, which are not all"
        whose = several if material.study.own_weights else " of the model, which is not"
        yield f"  bytes and memory need the configuration{whose} on this machine"
    else:
        yield _memory_line(material.study, footprints, memory)
    if gpus:
        yield f"  generation on {gpus} GPU{'s' if gpus > 1 else ''} of this machine, one worker each"
    yield from _time_lines(material, found, memory, doing, served=served, gpus=gpus)


def _engine_lines(material: Material, found: Forecast, doing: Callable[[str], None]) -> Iterator[str]:
    """Yield the needs of a study that an engine decodes."""
    for action in material.actions:
        yield f"  action {action.name}: {described_action(action.row(material.study.name, prespecified=True))}"
    made = engine_model(material.study)
    need = engine_footprint(made, _lengths(material), material.study.study.horizon)
    if material.study.model.engine == HTTP:
        yield from _server_lines(material, made, need)
    else:
        yield f"  memory of generation: {need.words}"
    if need.fits:
        yield from _measured_lines(material, found, doing, gpus=0)


def _server_lines(material: Material, made: EngineModel, need: EngineFootprint) -> Iterator[str]:
    """Yield a line for each server: the cost of a position of the longest prompt."""
    longest = max(material.of_split("development"), key=lambda document: document.prompt_tokens)
    for name, side in {"reference": made.reference, **made.sides}.items():
        if isinstance(side, ServerSide) and name != FLOOR_ACTION:
            yield f"  {name} at {position_cost(side, longest.tokens).words}"
    yield (
        "  a pair has two streams on its action's server, and shares the reference's with other actions; up to "
        f"{need.replicates_at_once} replicates at once"
    )


def _time_lines(
    material: Material, found: Forecast, memory: MemoryPlan | None, doing: Callable[[str], None], *, served: bool,
    gpus: int,
) -> Iterator[str]:  # fmt: skip
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
    yield from _measured_lines(material, found, doing, gpus=gpus)


def _measured_lines(material: Material, found: Forecast, doing: Callable[[str], None], *, gpus: int) -> Iterator[str]:
    model = material.study.model
    try:
        took = study_time(material, found.splits, doing)
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
    """Return what was measured: how many documents, how long they are, and what of them was left out."""
    longest, horizon = max(_lengths(material)), material.study.study.horizon
    rate = f"{took.prompt_rate:,.0f}" if took.prompt_rate >= 10 else f"{took.prompt_rate:.2g}"
    rate += " prompt tokens a second"
    if not took.samples:
        return (
            f"from {took.measuring:.0f} s of reading a prompt here, at {rate}; decoding was not tried, and is guessed"
        )
    read, decoded = (max(getattr(one, name) for one in took.samples) for name in ("tokens", "positions"))
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
    """Return the footprint of each model of a study: the reference's under None, others by the names of their weights.

    None if some model's configuration is not on this machine.
    """
    model = study.model
    found: dict[str | None, Footprint | None] = {
        None: local_footprint(model_location(model), model.dtype, model.revision)
    }
    for action in with_own_weights(study):
        found[action.weights] = local_footprint(weights_location(study, action), model.dtype)
    known = {weights: footprint for weights, footprint in found.items() if footprint is not None}
    return known if len(known) == len(found) else None


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
        told = described_action(action.row(material.study.study.name, prespecified=True))
        line = f"  action {action.name}: {told}: {_span(*(f'{m:,}' for m in kept))} {what}"
        if footprints is not None:
            held = (
                footprints[action.weights].cache_bytes(m, action.holding, indexed=action.removes(entries, horizon))
                for m, entries in zip(kept, ends, strict=True)
            )
            line += f", {_span(*map(binary, held))} of {cache}"
            fixed = [footprints[action.weights].shape.fixed_bytes(entries) for entries in ends]
            if fixed[-1]:
                line += f", of which no action can evict {_span(*map(binary, fixed))} (windows and states)"
        yield line


def _plan_memory(material: Material, found: Forecast, footprints: _Footprints) -> MemoryPlan:
    """Plan memory for the longest prompt and the most replicates; all replicates at once if the device is not here."""
    study, longest = material.study, max(_lengths(material))
    here = memory_here(study.model.device, study.model.device_map)
    least, most = CONTROL_REPLICATES, max(split.replicates[1] for split in found.splits)
    sides = [
        (
            one.shape,
            [0 if action.control else action.retention.kept(longest) for action in own],
            [min(least, most) if action.control else most for action in own],
        )
        for weights, one in footprints.items()  # the reference's is the first; a control reads its entries
        for own in [[action for action in material.actions if action.weights == weights]]
    ]
    (shape, kept, replicates), *others = sides
    return plan_memory(
        shape,
        longest,
        kept,
        replicates,
        study.study.horizon,
        sys.maxsize if here is None else here - _weight_bytes(footprints),
        PLAIN if study.plan.estimator == PLAIN else SWRB,
        apart=any(action.prefill_chunk is not None for action in material.actions),
        scored=max((action.scored_entries(longest, study.study.horizon) for action in material.actions), default=0),
        others=others,
        packed=(study.model.device, study.model.dtype) == ("cpu", "float32"),
    )


def _weight_bytes(footprints: _Footprints) -> int:
    """Return the bytes of the weights of all models, which share the memory."""
    return sum(footprint.weight_bytes for footprint in footprints.values())


def _memory_line(study: Study, footprints: _Footprints, memory: MemoryPlan) -> str:
    device, weights = "all GPUs" if study.model.device_map else study.model.device, _weight_bytes(footprints)
    if memory.available_bytes == sys.maxsize:
        left = f"there is no {device} here"
    else:
        available = binary(memory.available_bytes + weights)
        left = f"{available} available on {device}" + ("" if memory.fits else ", which is too little")
    models = f" of {len(footprints)} models" if len(footprints) > 1 else ""
    return (
        f"  memory of generation: {binary(weights)} of weights{models} and {binary(memory.peak_bytes)} for the "
        f"longest prompt, {memory.replicates_at_once} of {memory.replicates} replicates at once; {left}"
    )


def _span(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


def binary(count: int) -> str:
    """Format a number of bytes in MiB or GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
