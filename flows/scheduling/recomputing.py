"""Everything that follows from a store's events, computed unless current: derivation, estimates and reports."""

from __future__ import annotations

from pathlib import Path

from kvdrift.flows.estimate.scores import record_tokens, score_stored
from kvdrift.flows.estimate.stored import analyze_stored
from kvdrift.flows.orchestration.page import FlowRunPage
from kvdrift.flows.pages.reports import own_model, page_beside, page_folder, report_is_current, write_report
from kvdrift.generator.transformer.files.tokenizer import token_reader
from kvdrift.log.store import Store
from kvdrift.log.studies import model_revisions, stored_studies
from kvdrift.schema.progress import Progress
from kvdrift.sql.catalog_file import refresh_catalog
from kvdrift.transforms.pipeline import run_derivation


def derive_store(location: str, page: FlowRunPage) -> int:
    """Derive underived units, gather small files and refresh the catalogue; return the number of new units."""
    done, store = run_derivation(location).units, Store.open(location)
    page.say(f"derived {done} new units" if done else "all events are derived")
    if done:
        store.gather()
        refresh_catalog(store)
    return done


def estimate_stored(store: Store, study: str, model: str, progress: Progress) -> tuple[int, int, int]:
    """Record tokens, score answers and estimate; return the new texts of tokens, scored pairs and estimates."""
    revision = model_revisions(store).get((study, model))
    texts = record_tokens(store, study, model, revision=revision, progress=progress)
    scored = score_stored(store, study, model, revision=revision, progress=progress)
    return texts, scored, analyze_stored(store, study, model, progress=progress)


def estimate_study(location: str, study: str, model: str, page: FlowRunPage) -> int:
    """Score and estimate a study, unless that is done; return the number of estimates."""
    store = Store.open(location)
    _, _, count = estimate_stored(store, study, model, page)
    refresh_catalog(store)
    page.say(f"{study}, {model}: " + (f"{count} estimates" if count else "estimates are up to date"))
    return count


def study_page(location: str, study: str, model: str, page: FlowRunPage) -> Path:
    """Write a study's report, unless it is current; return the path of its page."""
    store = Store.open(location)
    studies = stored_studies(store)
    folder = page_folder(store, study, model, studies)
    report = folder / "index.html"
    if not report_is_current(store, folder):
        text = token_reader(model, revision=model_revisions(store).get((study, model)))
        beside = page_beside(store, study, own_model(study, model, studies))
        report = write_report(store, study, model, folder, token_text=text, progress=page, beside=beside)
    page.publish(store, study, model, report)
    return report
