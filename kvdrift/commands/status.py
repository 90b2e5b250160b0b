"""``kvdrift status``: what a store holds and what is left to do in it."""

from __future__ import annotations

from collections import Counter

from flows.plan import find_plan
from flows.stages import estimated_version
from schema.store.store import Store


def store_status(store: Store) -> str:
    """A paragraph for the store and one for each study."""
    version = store.version("events")
    units = store.units()
    pending = store.pending_segments(version)
    lines = [
        f"store: {store.location}",
        f"events: version {version}, {units.num_rows} units; {len(pending)} still to derive",
    ]
    documents = store.read("documents", columns=["study", "model", "doc", "split"]).to_pylist()
    for study, model in sorted({(row["study"], row["model"]) for row in documents}):
        own = [row for row in documents if (row["study"], row["model"]) == (study, model)]
        splits = {row["doc"]: row["split"] for row in own}
        generated = Counter(splits.get(doc, "unknown") for doc in set(store.units(study, model)["doc"].to_pylist()))
        plan = find_plan(store, study, model)
        estimated = estimated_version(store, study, model)
        lines.append(f"study {study}, model {model}:")
        for split, total in sorted(Counter(splits.values()).items()):
            wanted = total if split != "evaluation" or plan is None else _planned(plan.content)
            lines.append(f"  {split}: {generated[split]} of {wanted} documents generated")
        lines.append(
            "  plan: none yet" if plan is None else
            f"  plan: {plan.sha256[:12]}, frozen {plan.frozen_at:%Y-%m-%d %H:%M} UTC, K = {plan.replicates}"
        )  # fmt: skip
        lines.append(
            "  estimates: none yet" if estimated is None else
            f"  estimates: from events version {estimated}" + (" (current)" if estimated == version else "")
        )  # fmt: skip
    return "\n".join(lines)


def _planned(content: dict[str, object]) -> int:
    strata = content["strata"]
    return int(str(content["documents_per_stratum"])) * (len(strata) if isinstance(strata, list) else 0)
