"""The studies of several stores, as entries of a comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from kvdrift.flows.estimate.estimation import document_moments
from kvdrift.flows.pages.reports import page_folder
from kvdrift.log.checked_files import WEEK
from kvdrift.log.store import Store
from kvdrift.log.studies import stored_studies
from kvdrift.report.reading.content import read_content
from kvdrift.report.reading.estimates import Provenance, StudyRows
from kvdrift.report.side_by_side.content import Entry
from kvdrift.schema.errors import InputError
from kvdrift.schema.progress import SILENT, Progress
from kvdrift.sql.catalog import MOMENT_VIEWS, open_views
from kvdrift.stats.moments import DocumentMoments

_IDENTITY = ("weights_sha256", "tokenizer_sha256", "selector_sha256", "numerics", "eos_tokens")


def read_entries(
    locations: Sequence[str],
    studies: Collection[str] | None = None,
    progress: Progress = SILENT,
    *,
    model: str | None = None,
) -> list[tuple[Entry, DocumentMoments]]:
    """Read all studies and models of some stores, or the named ones, with their document moments."""
    stores = [Store.open(location) for location in locations]
    twice = [name for name, times in Counter(store.location for store in stores).items() if times > 1]
    if twice:
        raise InputError(f"{twice[0]} is named twice: name different stores to compare")
    found = [(store, *pair) for store in stores for pair in _studies(store, studies) if model in {None, pair[1]}]
    names = _names([(store.location, study, of) for store, study, of in found])
    progress.begin("read", len(found), "studies")
    entries = []
    for (store, study, of), name in zip(found, names, strict=True):
        entry, moments = _read(store, study, of, name)
        entries.append((replace(entry, page=_own_page(store, study, of)), moments))
        progress.advance(1)
    return entries


def _studies(store: Store, studies: Collection[str] | None) -> list[tuple[str, str]]:
    chosen = [pair for study in studies or () for pair in stored_studies(store, study)]
    return sorted(set(chosen)) if studies is not None else stored_studies(store)


def _own_page(store: Store, study: str, model: str) -> Path | None:
    """Return the page of a study and model at its default place; None if there is no page."""
    page = page_folder(store, study, model, stored_studies(store)) / "index.html"
    return page if page.is_file() else None


def _names(found: Sequence[tuple[str, str, str]]) -> list[str]:
    """Name each of (location, study, model) by as few parts as distinguish it from the others."""

    def candidates() -> Iterator[list[str]]:
        folders = [PurePath(location).name for location, _, _ in found]
        if len({location for location, _, _ in found}) == 1:
            yield [study for _, study, _ in found]
            yield [f"{study} / {model}" for _, study, model in found]
        yield folders
        yield ["/".join(PurePath(location).parts[-2:]) for location, _, _ in found]
        with_study = [list(dict.fromkeys((folder, one[1]))) for folder, one in zip(folders, found, strict=True)]
        yield [" / ".join(parts) for parts in with_study]
        yield [" / ".join((*parts, one[2])) for parts, one in zip(with_study, found, strict=True)]

    unlike = (names for names in candidates() if len(set(names)) == len(names))
    return next(unlike, [" / ".join(one) for one in found])


def _read(store: Store, study: str, model: str, name: str) -> tuple[Entry, DocumentMoments]:
    with open_views(store, kept=MOMENT_VIEWS, checked_within=WEEK) as views:
        source = StudyRows(views, study, model)
        provenance = Provenance(store=store.location, tables=views.versions)
        content = read_content(source, baseline=None, token_text=None, provenance=provenance, latex=False)
        moments = document_moments(views, study, model, content.split, content.windows, profiles=False)
        revisions = {row["action"]: row["action_revision"] for row in content.facts.actions}
        identities = {
            row["action"]: tuple(row[column] for column in _IDENTITY)
            for row in source.of("identities")
            if revisions.get(row["action"]) == row["action_revision"]
        }
    documents = {row["doc"]: row for row in content.facts.documents if row["split"] == content.split}
    return Entry(name, store.location, content, documents, identities), moments
