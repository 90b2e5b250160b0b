"""Every trajectory that the explorer may hold, the choice of those that it shows, and their tokens and distances.

The rule of the choice, in this order, until there are ``POSITIONS`` positions:

1. the trajectories that jumps (buttons of the explorer) lead to, first the jumps over all strata, then those within a
   stratum; of a jump to lost answers the first three trajectories, of different documents if there are such;
2. the trajectories of all other actions on the documents and replicates of step 1;
3. replicates 0 to 3 of every action, of the first document of each stratum, then of the second, and so on to the last;
   then replicates 4 to 7 in the same order, and so on.

Documents come in the order of their ids. A jump is left out if none of its trajectories is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import StudyRows, ViewRow
from kvdrift.schema.errors import OperationError
from kvdrift.schema.tables import COUPLED

Ints = NDArray[np.int64]

REPLICATES_AT_ONCE = 4
"""Replicates that the sample takes of a document in a turn."""

_KEY = ("doc", "action", "replicate")
_COLUMNS = (*_KEY, "tau", "eos_x", "eos_y", "last_eos", "mismatches", "longest_agreement")
_EVENTS = (*_KEY, "t", "x_token", "y_token", "delta", "f")
SCORED = ("score_x", "score_y", "span_first", "span_last")
POSITIONS: Final = 250_000
"""The most positions in the explorer.

A position takes 12 bytes, or 16 as uncompressed text, so that the file has less than 5 MB.
"""
_LOST: Final = 3  # lost answers, of different documents, for an action within a stratum or over all strata


@dataclass(frozen=True)
class Outcomes:
    """The trajectories of the page's split that enter estimates, sorted by document, replicate and action."""

    documents: list[ViewRow]  # rows of the view ``documents``, in the order of their ids
    strata: list[str]  # names, in the page's order
    actions: list[str]  # the compared actions, in the page's order
    horizon: int  # H
    stratum: Ints  # int64[documents], the index of each document's stratum in ``strata``
    doc: Ints  # int64[trajectories], indices into ``documents``
    action: Ints  # int64[trajectories], indices into ``actions``
    replicate: Ints  # int64[trajectories]
    tau: Ints  # int64[trajectories], 0 without divergence
    eos_x: Ints  # int64[trajectories], 0 if X does not end
    eos_y: Ints  # int64[trajectories], 0 if Y does not end
    last_eos: Ints  # int64[trajectories], e', which is H + 1 if a side does not end
    mismatches: Ints  # int64[trajectories], the sum of I_t
    longest_agreement: Ints  # int64[trajectories], in tau < t < e; 0 without divergence
    lost: NDArray[np.bool_]  # bool[trajectories], whether X states the answer and Y does not; false if not scored

    def __len__(self) -> int:
        """Return the number of trajectories."""
        return len(self.doc)

    @property
    def turns(self) -> Ints:
        """The number of each document within its stratum, int64[documents]."""
        order = np.argsort(self.stratum, kind="stable")
        turns = np.empty_like(order)
        turns[order] = np.arange(len(order)) - np.searchsorted(self.stratum, self.stratum[order], sorter=order)
        return turns

    def places(self, table: pa.Table) -> Ints:
        """Return the index of each row's trajectory, by document, action and replicate; -1 if there is none."""
        docs = [row["doc"] for row in self.documents]
        doc, action = (_indices(table, name, known) for name, known in (("doc", docs), ("action", self.actions)))
        replicate, last = _whole(table, "replicate"), int(self.replicate.max(initial=0)) + 1

        def code(doc: Ints, replicate: Ints, action: Ints) -> Ints:
            return (doc * last + replicate) * len(self.actions) + action

        own = code(self.doc, self.replicate, self.action)  # rising
        codes = np.where((doc < 0) | (action < 0) | (replicate >= last), -1, code(doc, replicate, action))
        at = np.searchsorted(own, codes)
        return np.where(np.append(own, -2)[at] == codes, at, -1)


def read_outcomes(content: PageContent) -> Outcomes:
    """Read the trajectories of the page's split under its compared actions."""
    facts, source = content.facts, content.source
    documents = [row for row in facts.documents if row["split"] == content.split]
    strata = [name for name in facts.strata if any(row["stratum"] == name for row in documents)]
    table = source.columns_of("analyzed_trajectories", *_COLUMNS, split=content.split)
    names = {"doc": [row["doc"] for row in documents], "action": content.actions}
    places = {name: _indices(table, name, known) for name, known in names.items()}
    kept = np.flatnonzero((places["doc"] >= 0) & (places["action"] >= 0))
    columns = places | {name: _whole(table, name) for name in _COLUMNS if name not in places}
    values = {name: column[kept] for name, column in columns.items()}
    order = np.lexsort((values["action"], values["replicate"], values["doc"]))
    outcomes = Outcomes(
        documents=documents,
        strata=strata,
        actions=content.actions,
        horizon=facts.windows.horizon,
        stratum=np.array([strata.index(row["stratum"]) for row in documents], np.int64),
        lost=np.zeros(len(kept), np.bool_),
        **{name: column[order] for name, column in values.items()},
    )
    lost = outcomes.places(source.columns_of("trajectory_answers", *_KEY, lost=1.0))
    outcomes.lost[lost[lost >= 0]] = True
    return outcomes


def _indices(table: pa.Table, name: str, known: list[str]) -> Ints:
    """Return the index in ``known`` of each value of the column ``name``, -1 if ``known`` lacks the value."""
    column = table[name].cast(pa.string()).combine_chunks()
    indices = pc.fill_null(pc.index_in(column, value_set=pa.array(known, pa.string())), -1)
    return np.asarray(indices, np.int64)


def _whole(table: pa.Table, name: str) -> Ints:
    """Return a column of whole numbers, 0 for null."""
    return np.asarray(pc.fill_null(table[name].cast(pa.int64()).combine_chunks(), 0), np.int64)


@dataclass(frozen=True)
class Streams:
    """The n chosen trajectories, with H positions each."""

    x: NDArray[np.int32]  # int32[n, H], X's tokens
    y: NDArray[np.int32]  # int32[n, H], Y's tokens
    delta: NDArray[np.float32]  # float32[n, H]
    f: NDArray[np.float32]  # float32[n, H]
    scores: dict[int, ViewRow]  # the columns ``SCORED`` of each scored trajectory, by its index


def read_streams(source: StudyRows, outcomes: Outcomes, rows: Ints) -> Streams:
    """Read the tokens, distances and scores of the trajectories at ``rows``, rising indices into ``outcomes``.

    Raises:
        OperationError: The view ``events`` lacks positions of a trajectory.
    """
    place = np.full(len(outcomes) + 1, -1)  # of each trajectory among ``rows``; the last is for those not in outcomes
    place[rows] = np.arange(len(rows))
    size = (len(rows), outcomes.horizon)
    x, y = np.zeros(size, np.int32), np.zeros(size, np.int32)
    delta, f = np.zeros(size, np.float32), np.zeros(size, np.float32)
    seen = np.zeros(size, np.bool_)
    scores: dict[int, ViewRow] = {}
    early = outcomes.replicate[rows] < REPLICATES_AT_ONCE  # most documents have only these replicates in the sample
    for part in (rows[early], rows[~early]):
        if not len(part):
            continue
        where = {
            "doc": [outcomes.documents[doc]["doc"] for doc in np.unique(outcomes.doc[part])],
            "replicate": np.unique(outcomes.replicate[part]).tolist(),
        }
        events, at = _chosen(source.columns_of("events", *_EVENTS, kind=COUPLED, **where), outcomes, place)
        t = events["t"].to_numpy().astype(np.int64) - 1
        seen[at, t] = True
        for into, name in ((x, "x_token"), (y, "y_token"), (delta, "delta"), (f, "f")):
            into[at, t] = events[name].to_numpy()
        scored, at = _chosen(source.columns_of("scores", *_KEY, *SCORED, **where), outcomes, place)
        scores |= dict(zip(at.tolist(), scored.to_pylist(), strict=True))
    if not seen.all():
        place = outcomes.documents[int(outcomes.doc[rows[int(np.argmin(seen.all(axis=1)))]])]["doc"]
        raise OperationError(
            f"view events: document '{place}' lacks positions that its trajectories have; 'kvdrift verify' looks for "
            "damage of the store"
        )
    return Streams(x, y, delta, f, scores)


def _chosen(table: pa.Table, outcomes: Outcomes, place: Ints) -> tuple[pa.Table, Ints]:
    """Return the rows of a table whose trajectories have a ``place``, and these places."""
    at = place[outcomes.places(table)]
    return table.filter(pa.array(at >= 0)), at[at >= 0]


@dataclass(frozen=True)
class Jump:
    """A jump, which is a button of the explorer, and the trajectories that it leads to."""

    kind: str  # earliest, median, latest, exposure, agreement or lost
    stratum: int | None  # an index into the list of strata; None for all strata
    action: int  # an index into the list of actions
    # indices into the outcomes: one trajectory, or lost answers, first one of each document, then a second of each
    rows: tuple[int, ...]
    total: int = 1  # how many trajectories fit; more than 1 only for lost answers


@dataclass(frozen=True)
class Sample:
    """The chosen trajectories, as rising indices into the outcomes, and the jumps to some of these trajectories."""

    rows: Ints
    jumps: list[Jump]


def choose(outcomes: Outcomes, positions: int = POSITIONS) -> Sample:
    """Choose trajectories by the rule in the module's docstring, with at most ``positions`` positions in all."""
    scopes: list[int | None] = [None, *range(len(outcomes.strata))]
    jumps = [jump for scope in scopes for jump in _jumps_of(outcomes, scope)]
    first = np.array([row for jump in jumps for row in jump.rows[:_LOST]], np.int64)
    pair = outcomes.doc * (int(outcomes.replicate.max(initial=0)) + 1) + outcomes.replicate
    beside = np.flatnonzero(np.isin(pair, pair[first]))
    candidates = np.concatenate([first, beside, _in_turn(outcomes)])
    _, places = np.unique(candidates, return_index=True)
    chosen = candidates[np.sort(places)][: positions // outcomes.horizon]
    held = set(chosen.tolist())
    kept = [
        Jump(jump.kind, jump.stratum, jump.action, rows, jump.total)
        for jump in jumps if (rows := tuple(row for row in jump.rows if row in held))
    ]  # fmt: skip
    return Sample(np.sort(chosen), kept)


def _in_turn(outcomes: Outcomes) -> Ints:
    """Return the indices of all trajectories, those of replicates 0 to 3 first, then of 4 to 7, and so on.

    Each of these parts has the first document of every stratum, then the second document of every stratum, and so on.
    """
    keys = (
        outcomes.action, outcomes.replicate, outcomes.stratum[outcomes.doc], outcomes.turns[outcomes.doc],
        outcomes.replicate // REPLICATES_AT_ONCE,
    )  # fmt: skip
    return np.lexsort(keys)  # the last key counts first


def _jumps_of(outcomes: Outcomes, stratum: int | None) -> list[Jump]:
    """Return the jumps of each action, within a stratum or over all strata; ties go to the first trajectory."""
    within = np.full(len(outcomes), fill_value=True) if stratum is None else outcomes.stratum[outcomes.doc] == stratum
    jumps = []
    for action in range(len(outcomes.actions)):
        rows = np.flatnonzero(within & (outcomes.action == action))
        diverged = rows[outcomes.tau[rows] > 0]
        if len(diverged):
            tau = outcomes.tau[diverged]
            apart = np.minimum(outcomes.last_eos[diverged], outcomes.horizon) - tau
            agreement = outcomes.longest_agreement[diverged]
            leads = {
                "earliest": np.argmin(tau),
                "median": np.argsort(tau, kind="stable")[(len(tau) - 1) // 2],
                "latest": np.argmax(tau),
                "exposure": np.argmax(apart),
                "agreement": np.argmax(agreement),
            }
            if not agreement.any():
                del leads["agreement"]
            jumps += [Jump(kind, stratum, action, (int(diverged[at]),)) for kind, at in leads.items()]
        lost = rows[outcomes.lost[rows]]
        if len(lost):
            docs, first = np.unique(outcomes.doc[lost], return_index=True)
            turn = np.arange(len(lost)) - first[np.searchsorted(docs, outcomes.doc[lost])]  # index in its document
            jumps.append(Jump("lost", stratum, action, tuple(lost[np.lexsort((lost, turn))].tolist()), len(lost)))
    return jumps
