"""Moments of documents with answers, from which lost and gained answers are estimated."""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.flows.estimate.current import newest_rows
from kvdrift.flows.estimate.document_index import DocumentIndex, measured
from kvdrift.flows.estimate.scores import Scoring
from kvdrift.log.store import Store
from kvdrift.log.units.revisions import current_actions
from kvdrift.schema.moments import ANSWER_MOMENTS, SCALAR_MOMENTS
from kvdrift.schema.windows import Windows
from kvdrift.sql.catalog import Views
from kvdrift.stats.moments import DocumentMoments, ReplicateMoments
from kvdrift.stats.quantities.answers import ANSWER_QUANTITIES

_PLACE = ["doc", "action", "replicates"]


def answers_are_current(store: Store, study: str, model: str, scoring: Scoring) -> bool:
    """Tell whether the newest estimates include answers in each of their splits that has scored answers.

    A split has scored answers if all its pairs are scored, and some pair is of an action other than the control.
    """
    current = current_actions(store.read("actions"), study)
    scored = scoring.scored_splits({name for name, row in current.items() if row["control"]})
    rows = newest_rows(store, study, model)
    of_answers = rows.filter(pc.is_in(rows["quantity"], value_set=pa.array([*ANSWER_QUANTITIES])))
    lacking = set(rows["split"].to_pylist()) - set(of_answers["split"].to_pylist())
    return not lacking & scored


def answer_moments(
    views: Views, study: str, model: str, split: str, windows: Windows, answered: Collection[str]
) -> DocumentMoments | None:
    """Read the moments of the documents with known answers of a split, controls left out.

    The moments have no profiles. None if there is no such document, or if pairs of such a document are not scored yet.
    """
    table = measured(views.rows("document_answers", study=study, model=model, split=split))
    whole = measured(views.rows("moments", study=study, model=model, split=split))
    whole = whole.filter(pc.is_in(whole["doc"], value_set=pa.array(sorted(answered), pa.string())))
    if not table.num_rows or not table.select(_PLACE).equals(whole.select(_PLACE)):  # in equal order
        return None
    index = DocumentIndex(whole)
    scalars = index.spread(whole, SCALAR_MOMENTS) | index.spread(table, ANSWER_MOMENTS)
    return DocumentMoments(index.documents, index.strata, index.clusters, index.actions, windows, scalars, {}, {})


def replicate_answers(views: Views, study: str, model: str, split: str, windows: Windows) -> ReplicateMoments | None:
    """Read the scalar moments of every scored replicate of a split, controls left out; None if there is none."""
    keys = {"study": study, "model": model, "split": split}
    table = measured(views.rows("trajectory_answers", **keys))
    if not table.num_rows:
        return None
    whole = measured(views.rows("trajectory_moments", **keys)).join(
        table.select(["doc", "action", "replicate"]), ["doc", "action", "replicate"], join_type="left semi"
    )
    index = DocumentIndex(table)
    count = int(table["replicate"].to_numpy().max()) + 1
    scalars = index.spread(whole, SCALAR_MOMENTS, "replicate", count)
    scalars |= index.spread(table, ANSWER_MOMENTS, "replicate", count)
    return ReplicateMoments(index.documents, index.strata, index.clusters, index.actions, windows, scalars)
