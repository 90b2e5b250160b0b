"""Whether a study's estimates are those of the store's present events."""

from __future__ import annotations

import pyarrow.compute as pc

from schema.store.store import Store


def estimates_are_current(store: Store, study: str, model: str) -> bool:
    """Whether the study's results were estimated from the store's present events."""
    return estimated_version(store, study, model) == store.version("events")


def estimated_version(store: Store, study: str, model: str) -> int | None:
    """Return the newest events version that the study's results were estimated from, None where there are none."""
    results = store.read("results", columns=["study", "model", "events_version"])
    own = results.filter(pc.and_(pc.equal(results["study"], study), pc.equal(results["model"], model)))
    newest = pc.max(own["events_version"]).as_py()
    return None if newest is None else int(newest)
