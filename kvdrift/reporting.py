"""``kvdrift report``: the pages of a store's studies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flows.generation import study_model
from flows.stages import report_folder, write_report
from schema.errors import InputError, KvdriftError, nearest
from schema.store import Store


def report_store(location: str, output: Path | None, study: str | None) -> list[Path]:
    """Write the report of each study (or of one) of a store; returns the pages."""
    store = Store.open(location)
    studies = {(row["study"], row["model"]) for row in store.read("documents", columns=["study", "model"]).to_pylist()}
    chosen = sorted(pair for pair in studies if study in {None, pair[0]})
    if not chosen:
        known = {name for name, _ in studies}
        hint = "the store holds no study yet" if not known else nearest(str(study), known)
        raise InputError(f"no study '{study}' in {store.location}; {hint}" if study else f"{store.location}: {hint}")
    pages = []
    for name, model in chosen:
        folder = report_folder(store, name) if output is None else output if len(chosen) == 1 else output / name
        pages.append(write_report(store, name, model, folder, token_text=_token_text(model)))
    return pages


def _token_text(model: str) -> Callable[[int], str] | None:
    """The model's tokens as text where its tokenizer can be had here, else None: then ids are shown."""
    try:
        return study_model(model, "cpu", "float32", None).token_text
    except KvdriftError:
        return None
