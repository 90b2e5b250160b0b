"""Choose the study that a command is about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdrift.schema.errors import InputError, nearest

if TYPE_CHECKING:
    from kvdrift.log.readable_store import ReadableStore


def stored_studies(store: ReadableStore, study: str | None = None) -> list[tuple[str, str]]:
    """Return the studies and models of all documents of a store, or of one study; at least one."""
    rows = store.read("documents", columns=["study", "model"]).to_pylist()
    there = sorted({(row["study"], row["model"]) for row in rows})
    if not there:
        raise InputError(f"{store.location}: the store holds no study yet")
    chosen = [pair for pair in there if study in {None, pair[0]}]
    if not chosen:
        raise InputError(f"no study '{study}' in {store.location}; {nearest(str(study), {name for name, _ in there})}")
    return chosen


def chosen_study(store: ReadableStore, study: str | None = None, model: str | None = None) -> tuple[str, str]:
    """Return the name and model id of the study that a command names, or of the store's only study.

    Args:
        store: A store with documents.
        study: The value of ``--study``; None if the store has one study.
        model: The value of ``--model``; None if the study has one model.
    """
    there = set(stored_studies(store))
    for option, place, asked in (("study", 0, study), ("model", 1, model)):
        known = {one[place] for one in there}
        if asked is not None and asked not in known:
            raise InputError(f"--{option} {asked}: not in {store.location}; {nearest(asked, known)}")
        if asked is None and len(known) > 1:
            raise InputError(f"{store.location} holds several: give --{option}, one of {', '.join(sorted(known))}")
        there = {one for one in there if asked in {None, one[place]}}
    (chosen,) = there
    return chosen


def model_revisions(store: ReadableStore) -> dict[tuple[str, str], str | None]:
    """Return the model revision that each study names, by study and model; None for studies of other generators."""
    return {(row["study"], row["model"]): row["revision"] for row in store.read("studies").to_pylist()}
