"""``kvdrift report``: the pages of a store's studies."""

from __future__ import annotations

from pathlib import Path

from flows.stages import model_folder, report_folder, write_report
from generator.transformer.tokenizer import token_reader
from schema.errors import InputError, nearest
from schema.store.store import Store

REPORT_FORMATS = ("html", "latex")


def report_store(location: str, output: Path | None, study: str | None, output_format: str = "html") -> list[Path]:
    """Write the report of each study (or of one) of a store; returns the pages.

    The format ``html`` is the page, its figures and its tables as CSV; ``latex`` adds every table as a .tex file.
    """
    if output_format not in REPORT_FORMATS:
        raise InputError(f"--format {output_format}: {nearest(output_format, REPORT_FORMATS)}")
    store = Store.open(location)
    studies = {(row["study"], row["model"]) for row in store.read("documents", columns=["study", "model"]).to_pylist()}
    chosen = sorted(pair for pair in studies if study in {None, pair[0]})
    if not chosen:
        known = {name for name, _ in studies}
        hint = "the store holds no study yet" if not known else nearest(str(study), known)
        raise InputError(f"no study '{study}' in {store.location}; {hint}" if study else f"{store.location}: {hint}")
    pages = []
    for name, model in chosen:
        several = sum(other == name for other, _ in chosen) > 1  # then each model has a page of its own
        if output is None:
            folder = report_folder(store, name, model if several else None)
        elif len(chosen) == 1:
            folder = output
        else:
            folder = output / name / model_folder(model) if several else output / name
        tex = output_format == "latex"
        pages.append(write_report(store, name, model, folder, token_text=token_reader(model), latex=tex))
    return pages
