"""The estimates, costs and gains of residual branching (SWRB) against plain coupling, with intervals.

Documents are resampled by the same draws as for every other estimate; the means, variances and costs of their
replicates are pooled (``docs/quantities.md``) and ratios are taken after that. The variance is that of one replicate
given its document, the cost that of one replicate: efficiency = variance ratio / cost ratio says by what factor Monte
Carlo variance falls at equal cost (paper, sec. "swrb").
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvdrift.schema.study import POOLED
from kvdrift.stats.bootstrap import BLOCK, COLUMNS, EXPLORATORY, REDUCED_COLUMNS, Estimates, nullable
from kvdrift.stats.clusters import ClusterDraws
from kvdrift.stats.ends import PERCENTILE, percentile_intervals
from kvdrift.stats.moments import Float, MeasuredDocuments, Text, standardize
from kvdrift.stats.pooling import pooled_means
from kvdrift.stats.quantities import BRANCHING_QUANTITIES
from kvdrift.stats.registry import Support

# For one document, action and estimator: means over replicates, and the variance and cost of one replicate (view
# ``swrb``).
MEASURED: dict[str, str] = {
    "risk": "R: mean of sum_t I_t / H, or of Z^R",
    "risk_variance": "sample variance of one replicate's risk; NaN with one replicate",
    "occurrence": "O: mean of 1{tau <= H} / H, or of Z^O",
    "occupation": "Pi: mean of sum_{t > tau} I_t / H, or of Z^Pi",
    "divergence_probability": "P(tau <= H): mean of 1{tau <= H}, or of M",
    "evaluations": "kernel pairs evaluated per replicate; NaN if unknown",
    "seconds": "decoding seconds per replicate; NaN if unknown",
}


@dataclass(frozen=True, eq=False)
class BranchingMoments(MeasuredDocuments):
    """Measurements of documents from the replicates of both estimators, plain coupling and residual branching.

    ``plain`` and ``swrb`` map every name of MEASURED to float64 [D, A]. All values are NaN if a document has no
    replicates of the estimator under the action.
    """

    plain: Mapping[str, Float]
    swrb: Mapping[str, Float]

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = (len(self.documents), len(self.actions))
        for field, measured in (("plain", self.plain), ("swrb", self.swrb)):
            object.__setattr__(self, field, standardize(field, measured, MEASURED, shape))

    def of_actions(self, names: Collection[str]) -> BranchingMoments:
        """Return the moments of the named actions; all documents are kept, so that bootstrap draws stay the same."""
        chosen = [place for place, action in enumerate(self.actions) if action in names]
        plain, swrb = (
            {name: value[:, chosen] for name, value in measured.items()} for measured in (self.plain, self.swrb)
        )
        actions = tuple(self.actions[place] for place in chosen)
        return BranchingMoments(self.documents, self.strata, self.clusters, actions, plain, swrb)

    @cached_property
    def supports(self) -> dict[Support, NDArray[np.bool_]]:
        """The documents behind a quantity, bool [D, A], by the quantity's ``support``.

        ``branched`` marks the documents with SWRB replicates, ``both`` those with at least two replicates of each
        estimator.
        """
        both = ~np.isnan(self.plain["risk_variance"]) & ~np.isnan(self.swrb["risk_variance"])
        return {"branched": ~np.isnan(self.swrb["risk"]), "both": both}


def observed_branching(moments: BranchingMoments) -> dict[str, Float]:
    """Compute point estimates with every document counted once: name -> float64 [rows, A], ``pooled`` first."""
    return {name: value[0] for name, value in _evaluate(moments, np.ones((1, len(moments.documents)))).items()}


def resample_branching(moments: BranchingMoments, *, draws: int, seed: int) -> dict[str, Float]:
    """Compute quantities in the bootstrap draws of ``resample``: float64 [draws, rows, A] by name, NaN if undefined.

    Rows are as in ``observed_branching``.
    """
    clusters = ClusterDraws(moments.strata, moments.clusters)
    # Whole blocks, as in kvdrift.stats.bootstrap: BLAS may round otherwise for another number of rows.
    blocks = [_evaluate(moments, clusters.counts(seed, first, first + BLOCK)) for first in range(0, draws, BLOCK)]
    return {name: np.concatenate([block[name] for block in blocks])[:draws] for name in BRANCHING_QUANTITIES}


def estimate_branching(moments: BranchingMoments, *, draws: int, seed: int, level: float = 0.95) -> Estimates:
    """Estimate all quantities of every action, pooled and in each stratum, with percentile intervals.

    All estimates are exploratory, since no plan names them. Rows without documents are left out.
    """
    sample, points = resample_branching(moments, draws=draws, seed=seed), observed_branching(moments)
    columns: dict[str, list[object]] = {name: [] for name in COLUMNS}
    rows = (POOLED, *moments.stratum_names)
    for name, quantity in BRANCHING_QUANTITIES.items():
        documents = _counts(moments, quantity.support, moments.documents)
        clusters = _counts(moments, quantity.support, moments.clusters)
        row, action = np.nonzero(documents)
        count, point = len(row), points[name][row, action]
        low, high = percentile_intervals(sample[name][:, row, action], np.full(count, level))
        undefined = np.isnan(point)
        columns["stratum"] += [rows[i] for i in row]
        columns["action"] += [moments.actions[i] for i in action]
        columns["quantity"] += [name] * count
        columns["estimate"] += nullable(point)
        columns["low"] += nullable(np.where(undefined, np.nan, low))
        columns["high"] += nullable(np.where(undefined, np.nan, high))
        columns["documents"] += documents[row, action].tolist()
        columns["clusters"] += clusters[row, action].tolist()
        for constant, value in (
            ("level", level), ("draws", draws), ("status", EXPLORATORY), ("interval", PERCENTILE),
        ):  # fmt: skip
            columns[constant] += [value] * count
        for absent in ("baseline", "x", "family", *REDUCED_COLUMNS):
            columns[absent] += [None] * count
    return Estimates(columns)


def _evaluate(moments: BranchingMoments, counts: Float) -> dict[str, Float]:
    """Evaluate all quantities under B weightings, ``counts`` [B, D] in the moments' order: float64 [B, rows, A]."""
    order = moments.canonical_order
    members = [np.flatnonzero(moments.strata[order] == name) for name in moments.stratum_names]
    names = [(f"{kind}_{name}", kind, name) for kind in ("plain", "swrb") for name in MEASURED]
    stacked = np.stack([getattr(moments, kind)[name][order] for _, kind, name in names], axis=-1)  # [D, A, V]
    pooled = {}
    for support, whole in moments.supports.items():
        mask = whole[order]
        means = pooled_means(np.where(mask[..., None], stacked, 0.0), mask, members, counts[:, order])
        pooled[support] = {name: means[..., place] for place, (name, _, _) in enumerate(names)}
    return {name: quantity.function(pooled[quantity.support]) for name, quantity in BRANCHING_QUANTITIES.items()}


def _counts(moments: BranchingMoments, support: Support, keys: Text) -> NDArray[np.int64]:
    """Count the different ``keys`` [D] (documents or clusters) behind each row: int64 [rows, A], ``pooled`` first."""
    mask = moments.supports[support]
    rows = [np.ones(len(keys), dtype=np.bool_), *(moments.strata == name for name in moments.stratum_names)]
    return np.array(
        [[len(set(keys[row & support_mask].tolist())) for support_mask in mask.T] for row in rows], dtype=np.int64
    )
