"""The tokens, distances and answers of chosen trajectories, read from the views."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from kvdrift.report.explorer.outcomes import Ints, Outcomes
from kvdrift.report.explorer.sample import REPLICATES_AT_ONCE
from kvdrift.report.reading.source import StudyRows, ViewRow
from kvdrift.schema.errors import OperationError
from kvdrift.schema.tables import COUPLED

_EVENTS = ("doc", "action", "replicate", "t", "x_token", "y_token", "delta", "f")
SCORED = ("score_x", "score_y", "span_first", "span_last")


@dataclass(frozen=True)
class Streams:
    """The n chosen trajectories, with H positions each."""

    x: NDArray[np.int32]  # int32[n, H], X's tokens
    y: NDArray[np.int32]  # int32[n, H], Y's tokens
    delta: NDArray[np.float32]  # float32[n, H]
    f: NDArray[np.float32]  # float32[n, H]
    scores: dict[int, ViewRow]  # the columns ``SCORED`` of each scored trajectory, by its index


def read_streams(source: StudyRows, outcomes: Outcomes, rows: Ints) -> Streams:
    """Read the trajectories at rising indices into ``outcomes``."""
    wanted = outcomes.own_codes()[rows]
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
        events, at = _chosen(source.columns_of("events", *_EVENTS, kind=COUPLED, **where), outcomes, wanted)
        t = events["t"].to_numpy().astype(np.int64) - 1
        seen[at, t] = True
        for into, name in ((x, "x_token"), (y, "y_token"), (delta, "delta"), (f, "f")):
            into[at, t] = events[name].to_numpy()
        scored, at = _chosen(source.columns_of("scores", *_EVENTS[:3], *SCORED, **where), outcomes, wanted)
        scores |= dict(zip(at.tolist(), scored.to_pylist(), strict=True))
    if not seen.all():
        place = outcomes.documents[int(outcomes.doc[rows[int(np.argmin(seen.all(axis=1)))]])]["doc"]
        raise OperationError(f"view events: document {place} lacks positions that its trajectories have")
    return Streams(x, y, delta, f, scores)


def _chosen(table: pa.Table, outcomes: Outcomes, wanted: Ints) -> tuple[pa.Table, Ints]:
    """Return the rows of wanted trajectories, and the index of each row's trajectory."""
    codes = outcomes.codes(table)
    at = np.minimum(np.searchsorted(wanted, codes), len(wanted) - 1)
    own = wanted[at] == codes
    return table.filter(pa.array(own)), at[own]
