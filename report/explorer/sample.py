"""The choice of the explorer's trajectories: those that its jumps lead to, and the first of every document.

The rule, in this order, until there are ``POSITIONS`` positions:

1. the trajectories of all jumps over all strata, then of all jumps within strata; of lost answers the first of each of
   the first three documents;
2. the other actions on the same document and replicate as these;
3. replicates 0 to 3 of every action, of the first document of each stratum, then of the second, and so on to the last;
   then replicates 4 to 7 in the same order, and so on.

Documents come in the order of their ids. A jump is there if its trajectory is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvdrift.report.explorer.trajectories import REPLICATES_AT_ONCE, Ints, Outcomes

POSITIONS: Final = 250_000
"""The most positions in the explorer.

A position takes 12 bytes, or 16 as uncompressed text, so that the file has less than 5 MB.
"""

_LOST: Final = 3  # lost answers, of different documents, for an action within a stratum or over all strata


@dataclass(frozen=True)
class Jump:
    """The trajectories that a jump leads to."""

    kind: str  # earliest, median, latest, exposure, agreement or lost
    stratum: int | None  # an index into the list of strata; None for all strata
    action: int  # an index into the list of actions
    # indices into the outcomes: one trajectory, or lost answers, first one of each document, then a second of each
    rows: tuple[int, ...]
    total: int = 1  # how many trajectories fit; more than 1 only for lost answers


@dataclass(frozen=True)
class Sample:
    """The chosen trajectories, as rising indices into the outcomes, and the jumps that lead to some of them."""

    rows: Ints
    jumps: list[Jump]


def choose(outcomes: Outcomes, positions: int = POSITIONS) -> Sample:
    """Choose trajectories by the rule above, with at most ``positions`` positions in all."""
    scopes: list[int | None] = [None, *range(len(outcomes.strata))]
    jumps = [jump for scope in scopes for jump in _jumps(outcomes, scope)]
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
    """Return all trajectories, replicates 0 to 3 of the first document of each stratum before all others."""
    place = np.zeros(len(outcomes.documents), np.int64)  # within the stratum
    for stratum in range(len(outcomes.strata)):
        own = np.flatnonzero(outcomes.stratum == stratum)
        place[own] = np.arange(len(own))
    keys = (
        outcomes.action, outcomes.replicate, outcomes.stratum[outcomes.doc], place[outcomes.doc],
        outcomes.replicate // REPLICATES_AT_ONCE,
    )  # fmt: skip
    return np.lexsort(keys)  # the last key counts first


def _jumps(outcomes: Outcomes, stratum: int | None) -> list[Jump]:
    """Return the jumps of each action, within a stratum or over all strata; ties go to the first trajectory."""
    within = np.full(len(outcomes), fill_value=True) if stratum is None else outcomes.stratum[outcomes.doc] == stratum
    found = []
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
            found += [Jump(kind, stratum, action, (int(diverged[at]),)) for kind, at in leads.items()]
        lost = rows[outcomes.lost[rows]]
        if len(lost):
            docs, first = np.unique(outcomes.doc[lost], return_index=True)
            turn = np.arange(len(lost)) - first[np.searchsorted(docs, outcomes.doc[lost])]  # index in its document
            found.append(Jump("lost", stratum, action, tuple(lost[np.lexsort((lost, turn))].tolist()), len(lost)))
    return found
