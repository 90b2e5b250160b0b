"""``kvdrift run --dry-run``: what a study would generate, at most."""

from __future__ import annotations

from pathlib import Path

from flows.preparation import gather_material, replicates_of
from generator.eviction import kept_entries
from schema.study import Study

_EVENT_BYTES = 12  # about what one event takes in a compressed events file, measured on the quickstart


def describe_study(study: Study, location: str) -> str:
    """Units, kept entries and bytes of a study; the evaluation at the upper bounds that the plan may choose."""
    material = gather_material(study)
    planned = study.plan
    most = planned.replicates_between[1] if planned.replicates == "auto" else planned.replicates
    splits = {"development": planned.development_replicates, "evaluation": most}
    lines = [f"study '{study.name}' on {study.model.id}, H = {study.study.horizon}; store {Path(location)}"]
    for split, replicates in splits.items():
        documents = material.of_split(split)
        units = len(documents) * len(material.actions)
        pairs = len(documents) * sum(replicates_of(action, replicates) for action in material.actions)
        events = pairs * study.study.horizon
        bound = "" if split == "development" else " at most"
        lines.append(
            f"  {split}:{bound} {len(documents)} documents, {units} units, {pairs} trajectories, {events:,} events, "
            f"about {events * _EVENT_BYTES / 2**20:.1f} MiB"
        )
    for action in material.actions:
        kept = [
            kept_entries(action.selector, action.retention, document.prompt_tokens, action.name)
            for document in material.of_split("evaluation")
        ]
        lines.append(f"  action {action.name}: keep {action.retention}, {min(kept)} to {max(kept)} prompt entries")
    lines.append("  time: measured on the development documents once they run; it is then in the plan's cost curve")
    return "\n".join(lines)
