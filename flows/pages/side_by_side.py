"""The page that compares several stores or studies, over the documents that they share.

Differences are estimated like contrasts within a study: the same documents are resampled on both sides. All estimates
are exploratory, since no plan names such a difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from kvdrift.flows.estimate.estimation import EXPLORATORY_DRAWS, EXPLORATORY_LEVEL
from kvdrift.flows.estimate.moments import document_moments
from kvdrift.flows.pages.reports import page_folder, writing
from kvdrift.log.checked_files import WEEK
from kvdrift.log.delta.durability import sync
from kvdrift.log.store import Store
from kvdrift.log.studies import stored_studies
from kvdrift.report.reading.content import read_content
from kvdrift.report.reading.estimates import ESTIMATE_COLUMNS, Estimate, Provenance, StudyRows
from kvdrift.report.side_by_side import Comparison, Difference, Entry, Pairing, build_comparison
from kvdrift.schema.errors import InputError
from kvdrift.schema.location import absolute, folder_name
from kvdrift.schema.progress import SILENT, Progress
from kvdrift.sql.catalog import MOMENT_VIEWS, open_views
from kvdrift.stats.bootstrap import Request, estimate
from kvdrift.stats.endpoints import Endpoint
from kvdrift.stats.moments import DocumentMoments

_IDENTITY = ("weights_sha256", "tokenizer_sha256", "selector_sha256", "numerics", "eos_tokens")

QUANTITIES = ("gap", "divergence_probability_difference", "mean_entry_difference", "mismatch_rate_difference")
_Measured = tuple[Entry, DocumentMoments]


def read_entries(
    locations: Sequence[str],
    studies: Collection[str] | None = None,
    progress: Progress = SILENT,
    *,
    model: str | None = None,
) -> list[tuple[Entry, DocumentMoments]]:
    """Read the named studies of some stores, by default all studies, with the moments of their documents.

    A study is read for each of its models, or only for ``model`` if that is given.
    """
    stores = [Store.open(location) for location in locations]
    twice = [name for name, times in Counter(store.location for store in stores).items() if times > 1]
    if twice:
        raise InputError(f"{twice[0]} is named twice: name different stores to compare")
    chosen = [(store, *pair) for store in stores for pair in _studies(store, studies) if model in {None, pair[1]}]
    names = _names([(store.location, study, of) for store, study, of in chosen])
    progress.begin("read", len(chosen), "studies")
    entries = []
    for (store, study, of), name in zip(chosen, names, strict=True):
        entry, moments = _read(store, study, of, name)
        entries.append((replace(entry, page=_own_page(store, study, of)), moments))
        progress.advance(1)
    return entries


def _studies(store: Store, studies: Collection[str] | None) -> list[tuple[str, str]]:
    chosen = [pair for study in studies or () for pair in stored_studies(store, study)]
    return sorted(set(chosen)) if studies is not None else stored_studies(store)


def _own_page(store: Store, study: str, model: str) -> Path | None:
    page = page_folder(store, study, model, stored_studies(store)) / "index.html"
    return page if page.is_file() else None


def _names(studies: Sequence[tuple[str, str, str]]) -> list[str]:
    """Name each study, a triple (location, study, model), by as few of these parts as set it apart from the others."""

    def candidates() -> Iterator[list[str]]:
        folders = [PurePath(location).name for location, _, _ in studies]
        if len({location for location, _, _ in studies}) == 1:
            yield [study for _, study, _ in studies]
            yield [f"{study} / {model}" for _, study, model in studies]
        yield folders
        yield ["/".join(PurePath(location).parts[-2:]) for location, _, _ in studies]
        with_study = [list(dict.fromkeys((folder, place[1]))) for folder, place in zip(folders, studies, strict=True)]
        yield [" / ".join(parts) for parts in with_study]
        yield [" / ".join((*parts, place[2])) for parts, place in zip(with_study, studies, strict=True)]

    unlike = (names for names in candidates() if len(set(names)) == len(names))
    return next(unlike, [" / ".join(place) for place in studies])


def _read(store: Store, study: str, model: str, name: str) -> tuple[Entry, DocumentMoments]:
    with open_views(store, kept=MOMENT_VIEWS, checked_within=WEEK) as views:
        source = StudyRows(views, study, model)
        provenance = Provenance(store=store.location, tables=views.versions)
        content = read_content(source, provenance=provenance)
        moments = document_moments(views, study, model, content.split, content.windows, profiles=False)
        revisions = {row["action"]: row["action_revision"] for row in content.facts.actions}
        identities = {
            row["action"]: tuple(row[column] for column in _IDENTITY)
            for row in source.of("identities")
            if revisions.get(row["action"]) == row["action_revision"]
        }
    documents = {row["doc"]: row for row in content.facts.documents if row["split"] == content.split}
    return Entry(name, store.location, content, documents, identities), moments


def pairings(measured: Sequence[_Measured]) -> list[Pairing]:
    """Subtract each study from every later study, over the documents that both have.

    Documents of one model are the same if their names, strata, clusters and hashes of the prompts' tokens are equal; a
    document with an unknown hash equals no other. Documents of unlike models are matched without the prompt, and
    ``Pairing.by_name`` says so.
    """
    return [_pairing(first, other) for first, other in combinations(measured, 2)]


def _pairing(measured: _Measured, other_measured: _Measured) -> Pairing:
    (first, _), (other, _) = measured, other_measured
    by_name = first.model != other.model
    named = [
        doc
        for doc, row in first.documents.items()
        if doc in other.documents and all(row[key] == other.documents[doc][key] for key in ("stratum", "cluster"))
    ]
    shared = [doc for doc in named if by_name or _same_prompt(first.documents[doc], other.documents[doc])]
    obstacle = _obstacle(first, other, named, shared)
    differences = () if obstacle else tuple(_differences(measured, other_measured, shared))
    if not (obstacle or differences):
        obstacle = "no action of one study has the name or the budget of an action of the other"
    return Pairing(first, other, len(shared), by_name, obstacle, differences)


def _same_prompt(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return row["prompt_sha256"] is not None and row["prompt_sha256"] == other["prompt_sha256"]


def _obstacle(first: Entry, other: Entry, named: Sequence[str], shared: Sequence[str]) -> str | None:
    horizons = [entry.content.windows.horizon for entry in (first, other)]
    if horizons[0] != horizons[1]:
        return f"their horizons are {horizons[0]} and {horizons[1]} tokens, and R is a share of the horizon"
    splits = [entry.content.split for entry in (first, other)]
    if splits[0] != splits[1]:
        return f"{first.name} shows its {splits[0]} documents, {other.name} its {splits[1]} documents"
    if shared:
        return None
    lacking = [
        entry.name for entry in (first, other) if any(entry.documents[doc]["prompt_sha256"] is None for doc in named)
    ]
    if lacking:
        return (
            f"equally named documents have no prompt_sha256 in {' and '.join(lacking)}, so prompts may differ; "
            "add a column prompt_sha256 to the file of kvdrift ingest --documents"
        )
    return "no document is the same in both"


def _differences(measured: _Measured, other_measured: _Measured, shared: Sequence[str]) -> Iterator[Difference]:
    (first, first_moments), (other, other_moments) = measured, other_measured
    moments = _side_by_side(first_moments, other_moments, shared)
    present = dict(zip(moments.actions, moments.present.T, strict=True))
    pairs = {
        (f"first {first_action}", f"other {other_action}"): (first_action, other_action)
        for first_action, other_action in _action_pairs(first, other)
        if (present[f"first {first_action}"] & present[f"other {other_action}"]).any()
    }
    if not pairs:
        return
    estimated = estimate(
        moments, draws=EXPLORATORY_DRAWS, seed=0, request=Request(EXPLORATORY_LEVEL), quantities=list(QUANTITIES),
        pairs=list(pairs),
    )  # fmt: skip
    for (baseline, action), (first_action, other_action) in pairs.items():
        rows = {name: estimated.row(Endpoint(name, action, baseline)) for name in QUANTITIES}
        estimates = {
            name: Estimate(**{column: row[column] for column in ESTIMATE_COLUMNS if column in row})
            for name, row in rows.items()
        }
        identity = first.identities.get(first_action)
        same = identity is not None and None not in identity and identity == other.identities.get(other_action)
        yield Difference(first_action, other_action, same, estimates)


def _action_pairs(first: Entry, other: Entry) -> Iterator[tuple[str, str]]:
    """Yield pairs of actions with equal names; an action without a namesake is paired with actions of equal budget."""
    first_actions, others = first.content.actions, other.content.actions
    for action in first_actions:
        if action in others:
            yield action, action
        elif (budget := first.budget(action)) is not None:
            yield from (
                (action, other_action)
                for other_action in others
                if other_action not in first_actions and other.budget(other_action) == budget
            )


def _side_by_side(first: DocumentMoments, other: DocumentMoments, shared: Sequence[str]) -> DocumentMoments:
    """Join two studies' moments of their ``shared`` documents; actions are named ``first NAME`` and ``other NAME``."""
    parts = {
        side: moments.of_documents(shared).in_canonical_order()
        for side, moments in (("first", first), ("other", other))
    }
    actions = [f"{side} {action}" for side, moments in parts.items() for action in moments.actions]
    first_moments, other_moments = parts.values()
    scalars = {
        name: np.concatenate([first_moments.scalars[name], other_moments.scalars[name]], axis=1)
        for name in first_moments.scalars
    }
    return DocumentMoments(
        first_moments.documents,
        first_moments.strata,
        first_moments.clusters,
        tuple(actions),
        first_moments.windows,
        scalars,
        {},
        {},
    )


def write_comparison(
    locations: Sequence[str],
    folder: Path,
    studies: Collection[str] | None = None,
    progress: Progress = SILENT,
    *,
    model: str | None = None,
) -> Path:
    """Write the comparison of several stores, or of several studies of a store; return the path of the page.

    By default all studies and models of each store are compared.
    """
    measured = read_entries(locations, studies, progress, model=model)
    comparison = Comparison(tuple(entry for entry, _ in measured), tuple(pairings(measured)))
    with writing(folder):
        page = build_comparison(comparison, folder)
        parts = [folder / "figures", folder / "tables"]
        for path in (page, *(file for part in parts for file in part.iterdir()), *parts, folder):
            sync(path)
    return page


def comparison_folder(locations: Sequence[str]) -> Path:
    """Return the default folder of a comparison: a folder in ``reports`` that is named after all of the stores."""
    names = [PurePath(absolute(location)).name for location in locations]
    return Path("reports") / folder_name("-and-".join(names))
