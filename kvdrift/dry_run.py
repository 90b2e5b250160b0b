"""``kvdrift run --dry-run``: what a study would generate, at most. Nothing is read from the network or written."""

from __future__ import annotations

from pathlib import Path

from flows.preparation import Outline, outline_study, replicates_of
from generator.footprint import local_cache_shape
from schema.document import SPLITS
from schema.study import Study

_EVENT_BYTES = 12  # about what one event takes in a compressed events file, measured on the quickstart


def describe_study(study: Study, location: str) -> str:
    """Documents, units, trajectories, events, kept entries and bytes of a study.

    The evaluation stands at the upper bounds that the plan may choose; what cannot be known here is said.
    """
    outline = outline_study(study)
    lines = [f"study '{study.name}' on {study.model.id}, H = {study.study.horizon}; store {Path(location)}"]
    lines += [_split_line(outline, split) for split in SPLITS]
    lines += _action_lines(outline)
    if outline.nominal:
        lines.append(
            f"  lengths are nominal in {', '.join(outline.nominal)}: a prompt has at most so many tokens, "
            "and retention goes by its own length, which is known once it is tokenized"
        )
    for path in dict.fromkeys(outline.absent.values()):
        strata = ", ".join(stratum for stratum, absent in outline.absent.items() if absent == path)
        lines.append(f"  not checked: the files of {strata}; {path} is not here")
    lines.append("  memory of generation: not estimated")
    lines.append("  time: measured when the development documents run; it is then in the plan's cost curve")
    return "\n".join(lines)


def _split_line(outline: Outline, split: str) -> str:
    study, planned = outline.study, outline.study.plan
    documents = sum(len(_evaluated(outline, split, stratum)) for stratum in outline.lengths[split])
    if split == "development":
        replicates, bound = planned.development_replicates, ""
    else:
        replicates = planned.replicates_between[1] if planned.replicates == "auto" else planned.replicates
        bound = " at most"
    measured = sum(replicates_of(action, replicates) for action in outline.actions if not action.control)
    controls = sum(replicates_of(action, replicates) for action in outline.actions if action.control)
    events = documents * (measured + controls) * study.study.horizon
    return (
        f"  {split}:{bound} {documents} documents, {documents * len(outline.actions)} units, "
        f"{documents * measured:,} trajectories and {documents * controls:,} of the full-retention control, "
        f"{events:,} events, about {_binary(events * _EVENT_BYTES)} in the store"
    )


def _evaluated(outline: Outline, split: str, stratum: str) -> list[int]:
    """Prompt lengths of the stratum's documents, as many as the plan takes where it fixes their number."""
    lengths, documents = outline.lengths[split][stratum], outline.study.plan.documents
    return lengths if split == "development" or documents == "auto" else lengths[:documents]


def _action_lines(outline: Outline) -> list[str]:
    model = outline.study.model
    shape = local_cache_shape(model.id, model.dtype, model.revision)
    lengths = [tokens for strata in outline.lengths.values() for stratum in strata.values() for tokens in stratum]
    lines = []
    for action in outline.actions:
        # What the selector's window and sinks need was checked with the outline.
        kept = [action.retention.kept(entries) for entries in (min(lengths), max(lengths))]
        line = f"  action {action.name}: keep {action.retention}, {_span(*(f'{m:,}' for m in kept))} prompt entries"
        if shape is not None:
            line += f", {_span(*(_binary(shape.bytes_of(m)) for m in kept))} of prompt cache"
        lines.append(line)
    if shape is None:
        lines.append("  bytes per entry need the model's configuration, which is not on this machine")
    return lines


def _span(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


def _binary(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
