"""``kvdrift run --dry-run``: what a study would generate, at most. Nothing is read from the network or written."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

from flows.material import replicates_of
from flows.outline import Outline, outline_study
from flows.timing import Extent, Seconds, study_time
from generator.transformer.footprint import Footprint, MemoryPlan, local_footprint, memory_here, plan_memory
from generator.transformer.local_folders import has_local_weights
from schema.document import SPLITS
from schema.errors import KvdriftError
from schema.study import FINITE_STATE, Study
from schema.tables import PLAIN, SWRB

# About what a unit and an event take in the store, with what is derived of them, folders and logs; on the quickstart.
_UNIT_BYTES = 25_000
_EVENT_BYTES = 18


def describe_study(study: Study, location: str) -> Iterator[str]:
    """Documents, units, trajectories, events, kept entries, bytes and seconds of a study, line by line.

    The evaluation stands at the upper bounds that the plan may choose; what cannot be known here is said. The last
    lines come from measuring, which takes about a minute where the model is on this machine.
    """
    outline = outline_study(study)
    yield f"study '{study.name}' on {study.model.id}, H = {study.study.horizon}; store {Path(location)}"
    yield from (_split_line(outline, split) for split in SPLITS)
    if study.model.kind == FINITE_STATE:
        yield "  no model is loaded and no prompt is kept: the laws of the systems are looked up"
        return
    model = study.model
    footprint = local_footprint(model.id, model.dtype, model.revision)
    yield from _action_lines(outline, footprint)
    yield from _length_lines(outline)
    for path in dict.fromkeys(outline.absent.values()):
        strata = ", ".join(stratum for stratum, absent in outline.absent.items() if absent == path)
        yield f"  not checked: the files of {strata}; {path} is not here"
    memory = None if footprint is None else _plan_memory(outline, footprint)
    if footprint is None or memory is None:
        yield "  bytes and memory need the model's configuration, which is not on this machine"
    else:
        yield _memory_line(outline, footprint, memory)
    yield from _time_lines(outline, memory)


def _split_line(outline: Outline, split: str) -> str:
    study, extent = outline.study, _extent(outline, split)
    documents, replicates = sum(most for _, most in extent.documents.values()), extent.replicates[1]
    controls = sum(replicates_of(action, replicates) for action in outline.actions if action.control)
    measured = sum(replicates_of(action, replicates) for action in outline.actions if not action.control)
    units, horizon = len(outline.actions), study.study.horizon
    events, branched = (measured + controls) * horizon, ""
    if study.plan.estimator != PLAIN:  # a scan and a branch, each to the horizon at most
        units += sum(not action.control for action in outline.actions)
        events += 2 * measured * horizon
        branched = ", as many replicates of residual branching"
    bound = "" if split == "development" else " at most"
    stored = documents * (units * _UNIT_BYTES + events * _EVENT_BYTES)
    return (
        f"  {split}:{bound} {documents} documents, {documents * units} units, "
        f"{documents * measured:,} trajectories{branched} and {documents * controls:,} of the full-retention control, "
        f"{documents * events:,} events, about {_binary(stored)} in the store"
    )


def _extent(outline: Outline, split: str) -> Extent:
    """The fewest and the most replicates and documents that the study may have."""
    planned = outline.study.plan
    available = {stratum: len(lengths) for stratum, lengths in outline.lengths[split].items()}
    if split == "development":
        replicates = planned.development_replicates
        return Extent((replicates, replicates), {stratum: (count, count) for stratum, count in available.items()})
    if planned.replicates == "auto":
        least, most = planned.replicates_between
    else:
        least = most = planned.replicates
    if planned.documents == "auto":
        fewest = min(planned.documents_at_least, *available.values())
        documents = {stratum: (fewest, count) for stratum, count in available.items()}
    else:
        documents = dict.fromkeys(available, (planned.documents, planned.documents))
    return Extent((least, most), documents)


def _length_lines(outline: Outline) -> Iterator[str]:
    if not outline.nominal:
        return
    yield (
        f"  lengths are nominal in {', '.join(outline.nominal)}: a prompt has at most so many tokens, "
        "and retention goes by its own length, which is known once it is tokenized"
    )
    room = (outline.positions or math.inf) - outline.study.study.horizon
    if tight := [stratum for stratum in outline.nominal if max(outline.lengths["evaluation"][stratum]) > room]:
        yield (
            f"  the model has {outline.positions:,} positions: a prompt of more than {room:,} tokens will be refused, "
            f"if there is one in {', '.join(tight)}"
        )


def _time_lines(outline: Outline, memory: MemoryPlan | None) -> Iterator[str]:
    model = outline.study.model
    if memory is not None and not memory.fits:
        yield "  time: not measured; there is too little memory"
        return
    if not has_local_weights(model.id, model.revision):
        yield "  time: needs the model's weights, which are not on this machine"
        return
    try:
        found = study_time(outline, {split: _extent(outline, split) for split in SPLITS})
    except KvdriftError as error:
        yield f"  time: not measured; {error}"
        return
    spans = [f"{split} {_duration(seconds)}" for split, seconds in found.splits.items()]
    yield f"  time of generation on {found.device} ({model.dtype}), an estimate: {', '.join(spans)}"
    horizon = outline.study.study.horizon
    shorter = {stratum: time.positions for stratum, time in found.strata.items() if time.positions < horizon}
    cut = [f"to position {positions} in {stratum}" for stratum, positions in shorter.items()]
    whole = len(found.strata) - len(cut)
    how = [f"whole in {whole} strata", *cut] if whole else cut
    yield f"    from {found.measuring:.0f} s of generating one document of each stratum here: {'; '.join(how)}"


def _duration(seconds: Seconds) -> str:
    unit, name = next(
        (size, name) for size, name in ((86_400, "d"), (3_600, "h"), (60, "min"), (0, "s")) if seconds.high >= 2 * size
    )
    low, high = (f"{value / (unit or 1):.2g}" for value in (seconds.low, seconds.high))
    return f"{low} to {high} {name}"


def _lengths(outline: Outline) -> list[int]:
    return [tokens for strata in outline.lengths.values() for stratum in strata.values() for tokens in stratum]


def _action_lines(outline: Outline, footprint: Footprint | None) -> Iterator[str]:
    lengths = _lengths(outline)
    for action in outline.actions:
        # What the selector's window and sinks need was checked with the outline.
        kept = [action.retention.kept(entries) for entries in (min(lengths), max(lengths))]
        line = f"  action {action.name}: keep {action.retention}, {_span(*(f'{m:,}' for m in kept))} prompt entries"
        if footprint is not None:
            line += f", {_span(*(_binary(footprint.cache_bytes(m)) for m in kept))} of prompt cache"
        yield line


def _plan_memory(outline: Outline, footprint: Footprint) -> MemoryPlan:
    """The plan of the longest prompt with the most replicates; with all at once where the device is not here."""
    study, longest = outline.study, max(_lengths(outline))
    here = memory_here(study.model.device, study.model.device_map)
    return plan_memory(
        footprint.shape,
        longest,
        [action.retention.kept(longest) for action in outline.actions],
        max(_extent(outline, split).replicates[1] for split in SPLITS),
        study.study.horizon,
        sys.maxsize if here is None else here - footprint.weight_bytes,
        PLAIN if study.plan.estimator == PLAIN else SWRB,
    )


def _memory_line(outline: Outline, footprint: Footprint, memory: MemoryPlan) -> str:
    section = outline.study.model
    device = "all GPUs" if section.device_map else section.device
    if memory.available_bytes == sys.maxsize:
        left = f"there is no {device} here"
    else:
        available = _binary(memory.available_bytes + footprint.weight_bytes)
        left = f"{available} available on {device}" + ("" if memory.fits else ", which is too little")
    weights, peak = _binary(footprint.weight_bytes), _binary(memory.peak_bytes)
    return (
        f"  memory of generation: {weights} of weights and {peak} for the longest prompt, "
        f"{memory.replicates_at_once} of {memory.replicates} replicates at once; {left}"
    )


def _span(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


def _binary(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
