"""Residual branching in an analysis: the moments of both estimators, read from the views."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.flows.estimate.document_index import DocumentIndex, measured
from kvdrift.schema.tables import PLAIN, SWRB
from kvdrift.sql.catalog import Views
from kvdrift.sql.quoting import literal
from kvdrift.stats.efficiency import MEASURED, BranchingMoments


def branching_moments(views: Views, study: str, model: str, split: str) -> BranchingMoments | None:
    """Read the moments of both estimators for every document and action of a split, controls left out.

    Returns:
        Moments of all measured documents, which other estimates resample too; None if nothing was branched.
    """
    own = f"study = {literal(study)} and model = {literal(model)}"
    if not views.table(
        f"from internal.branchings where {own} limit 1"
    ).num_rows:  # the view would otherwise read all trajectories
        return None
    table = measured(views.rows("swrb", study=study, model=model, split=split))
    if SWRB not in table["estimator"].to_pylist():
        return None
    listed = views.rows("documents", study=study, model=model)
    cluster_of = dict(zip(listed["doc"].to_pylist(), listed["cluster"].to_pylist(), strict=True))
    clusters = [cluster_of[doc] for doc in table["doc"].to_pylist()]
    table = table.append_column("cluster", pa.array(clusters, type=pa.string()))
    index = DocumentIndex(table)
    plain, swrb = (
        index.spread(table.filter(pc.equal(table["estimator"], estimator)), MEASURED) for estimator in (PLAIN, SWRB)
    )
    return BranchingMoments(index.documents, index.strata, index.clusters, index.actions, plain, swrb)
