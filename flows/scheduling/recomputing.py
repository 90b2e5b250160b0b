"""Everything that follows from a store's events, computed unless current: derivation, estimates and reports."""

from __future__ import annotations

from pathlib import Path

from flows.estimate.scores import score_stored
from flows.estimate.stored import analyze_stored
from flows.generate.tokens import record_tokens
from flows.orchestration.page import FlowRunPage
from flows.pages.reports import page_beside, report_folder, report_is_current, write_report
from generator.transformer.files.tokenizer import token_reader
from log.store import Store
from sql.catalog_file import refresh_catalog
from transforms.pipeline import run_derivation


def stored_studies(location: str) -> list[tuple[str, str]]:
    """Return study and model of all documents of a store."""
    documents = Store.open(location).read("documents", columns=["study", "model"])
    return sorted({(row["study"], row["model"]) for row in documents.to_pylist()})


def derive_store(location: str, page: FlowRunPage) -> int:
    """Derive underived units, gather small files and refresh the catalogue; return the number of new units."""
    done, store = run_derivation(location).units, Store.open(location)
    page.say(f"derived {done} new units" if done else "all events are derived")
    if done:
        store.gather()
        refresh_catalog(store)
    return done


def estimate_study(location: str, study: str, model: str, page: FlowRunPage) -> int:
    """Score and estimate a study, unless that is done; return the number of estimates."""
    store = Store.open(location)
    revision = _revision(store, study, model)
    record_tokens(store, study, model, revision=revision, progress=page)
    score_stored(store, study, model, revision=revision, progress=page)
    count = analyze_stored(store, study, model, progress=page)
    refresh_catalog(store)
    page.say(f"{study}, {model}: " + (f"{count} estimates" if count else "estimates are up to date"))
    return count


def study_page(location: str, study: str, model: str, page: FlowRunPage) -> Path:
    """Write a study's report, unless it is current; return the path of its page."""
    store = Store.open(location)
    several = sum(name == study for name, _ in stored_studies(location)) > 1  # then each model has its own page
    own = model if several else None
    folder = report_folder(store, study, own)
    report = folder / "index.html"
    if not report_is_current(store, folder):
        text = token_reader(model, revision=_revision(store, study, model))
        beside = page_beside(store, study, own)
        report = write_report(store, study, model, folder, token_text=text, progress=page, beside=beside)
    page.publish(store, study, model, report)
    return report


def _revision(store: Store, study: str, model: str) -> str | None:
    revisions = {(row["study"], row["model"]): row["revision"] for row in store.read("studies").to_pylist()}
    return revisions.get((study, model))
