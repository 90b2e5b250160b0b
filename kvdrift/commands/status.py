"""``kvdrift status``: what a store holds and what is left to do in it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import typer

from kvdrift.options import StoreArgument

if TYPE_CHECKING:
    from schema.store.store import Store


def status(store: StoreArgument) -> None:
    """Show what a store holds, and what is left to derive and to estimate."""
    from schema.store.store import Store

    for line in status_lines(Store.open(store)):
        typer.echo(line)


def status_lines(store: Store) -> list[str]:
    """Describe a store, and each study and model in it."""
    from flows.analysis.stored import estimated_version
    from flows.frozen_plan import find_plan

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
            wanted = total if split != "evaluation" or plan is None else plan.documents
            lines.append(f"  {split}: {generated[split]} of {wanted} documents generated")
        lines.append(
            "  plan: none yet" if plan is None else
            f"  plan: {plan.sha256[:12]}, frozen {plan.frozen_at:%Y-%m-%d %H:%M} UTC, K = {plan.replicates}"
        )  # fmt: skip
        lines.append(
            "  estimates: none yet" if estimated is None else
            f"  estimates: from events version {estimated}" + (" (current)" if estimated == version else "")
        )  # fmt: skip
    return lines
