"""Differences between two studies of a comparison, over the documents that both have.

Differences are estimated like contrasts within a study: the same documents are resampled on both sides. No plan names
them, so all are exploratory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from kvdrift.flows.estimate.parts import EXPLORATORY_DRAWS, EXPLORATORY_LEVEL
from kvdrift.report.reading.estimates import ESTIMATE_COLUMNS, Estimate
from kvdrift.report.side_by_side.content import Difference, Entry, Pairing
from kvdrift.stats.endpoints import Endpoint
from kvdrift.stats.moments import DocumentMoments
from kvdrift.stats.resampling.bootstrap import estimate
from kvdrift.stats.resampling.intervals import Request

QUANTITIES = ("gap", "divergence_probability_difference", "mean_entry_difference", "mismatch_rate_difference")

_Measured = tuple[Entry, DocumentMoments]


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
        obstacle = "no action of one has the name of an action of the other, or keeps as much"
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
    lacking = [one.name for one in (first, other) if any(one.documents[doc]["prompt_sha256"] is None for doc in named)]
    if lacking:
        return (
            f"their documents of one name have no prompt_sha256 in {' and '.join(lacking)}, so nothing says that the "
            "prompts are the same; a column prompt_sha256 in the file of kvdrift ingest --documents says it"
        )
    return "no document is the same in both"


def _differences(measured: _Measured, other_measured: _Measured, shared: Sequence[str]) -> Iterator[Difference]:
    (first, first_moments), (other, other_moments) = measured, other_measured
    moments = _side_by_side(first_moments, other_moments, shared)
    present = dict(zip(moments.actions, moments.present.T, strict=True))
    pairs = {
        (f"first {one}", f"other {two}"): (one, two)
        for one, two in _action_pairs(first, other)
        if (present[f"first {one}"] & present[f"other {two}"]).any()
    }
    if not pairs:
        return
    found = estimate(
        moments, draws=EXPLORATORY_DRAWS, seed=0, request=Request(EXPLORATORY_LEVEL), quantities=list(QUANTITIES),
        pairs=list(pairs),
    )  # fmt: skip
    for (baseline, action), (one, two) in pairs.items():
        rows = {name: found.row(Endpoint(name, action, baseline)) for name in QUANTITIES}
        estimates = {
            name: Estimate(**{column: row[column] for column in ESTIMATE_COLUMNS if column in row})
            for name, row in rows.items()
        }
        identity = first.identities.get(one)
        same = identity is not None and None not in identity and identity == other.identities.get(two)
        yield Difference(one, two, same, estimates)


def _action_pairs(first: Entry, other: Entry) -> Iterator[tuple[str, str]]:
    """Yield two actions of one name; an action without a namesake is paired with actions of the same budget."""
    own, others = first.content.actions, other.content.actions
    for one in own:
        if one in others:
            yield one, one
        elif (budget := first.budget(one)) is not None:
            yield from ((one, two) for two in others if two not in own and other.budget(two) == budget)


def _side_by_side(first: DocumentMoments, other: DocumentMoments, shared: Sequence[str]) -> DocumentMoments:
    """Return the moments of the shared documents, with the actions of both entries."""
    parts = {
        side: moments.of_documents(shared).in_canonical_order()
        for side, moments in (("first", first), ("other", other))
    }
    actions = [f"{side} {action}" for side, moments in parts.items() for action in moments.actions]
    one, two = parts.values()
    scalars = {name: np.concatenate([one.scalars[name], two.scalars[name]], axis=1) for name in one.scalars}
    return DocumentMoments(one.documents, one.strata, one.clusters, tuple(actions), one.windows, scalars, {}, {})
