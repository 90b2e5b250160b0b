"""Coefficients of control variates, fitted on development documents.

Coefficients are ridge regressions of the reduced moments on the control variates, over the differences between the
replicates of a document. An action has coefficients of its own, pooled over strata. The control variates are scaled to
one size, since some nearly are combinations of others. The penalty is the one of a fixed list with the least error when
each cluster of documents is left out in turn; the infinite penalty uses no control variate. One penalty serves all
moments of an action, so that an identity of moments (R = O + E C) also holds for reduced moments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvdrift.stats.moments import Float, ReplicateMoments
from kvdrift.stats.reduction.control_variates import CONTROLS, REDUCED, control_variates, reduced_scalars

PENALTIES: Final = (0.001, 0.01, 0.1, 0.3, 1.0, np.inf)
"""Penalties, of scaled control variates: 1 halves the coefficient of one that is alone."""

FEWEST_CLUSTERS, FEWEST_FREE = 3, 20
"""Fewer clusters, or fewer replicates beyond the first of their document, and an action has no coefficients."""

FARTHEST_MEAN: Final = 6.0
"""Nor has one with a mean so many standard errors from 0: its log is not of the coupling (chance: 1 in 10^8)."""


def fit_coefficients(development: ReplicateMoments) -> dict[str, Float]:
    """Fit the coefficients of every action that has enough development documents.

    By action it returns beta: float64 [5, 13] in the orders of ``CONTROLS`` and ``REDUCED``.
    """
    found = {}
    for action, products in _products(development).items():
        penalty = products.best_penalty()
        found[action] = _ridge(products.controls.sum(axis=0), products.moments.sum(axis=0), penalty)
    return found


def reduced_replicates(development: ReplicateMoments) -> ReplicateMoments:
    """Reduce every development document by coefficients that are fitted on documents of other clusters.

    The variance then is that expected of evaluation documents; coefficients fitted on the same documents would promise
    too small a variance. An action without coefficients keeps its moments.
    """
    controls = control_variates(development.scalars, development.windows)
    beta = np.zeros((*controls.shape[:2], len(CONTROLS), len(REDUCED)))
    for action, products in _products(development).items():
        beta[:, development.actions.index(action)] = products.left_out(products.best_penalty())[products.cluster_of]
    return replace(development, scalars=reduced_scalars(development.scalars, controls, beta[:, :, None]))


@dataclass(frozen=True, eq=False)
class _Products:
    """Sums of products of deviations within document, for one action."""

    cluster_of: NDArray[np.intp]  # the cluster of each document, int [D]
    controls: Float  # of the control variates with each other, float64 [C, 5, 5]
    moments: Float  # of the control variates with the moments, [C, 5, 13]
    squares: Float  # of the moments with themselves, [C, 13]

    def left_out(self, penalty: float) -> Float:
        """Return the coefficients without each cluster in turn, [C, 5, 13]."""
        controls, moments = (whole.sum(axis=0) - whole for whole in (self.controls, self.moments))
        return _ridge(controls, moments, penalty)

    def best_penalty(self) -> float:
        """Return the penalty of least mean relative error in the left-out clusters, over the moments that vary."""
        total = self.squares.sum(axis=0)
        varies = total > 0
        errors = []
        for penalty in PENALTIES:
            beta = self.left_out(penalty)
            explained = np.sum(beta * (2 * self.moments - self.controls @ beta), axis=(0, 1))
            errors.append(float(np.sum(1 - explained[varies] / total[varies])))
        return PENALTIES[int(np.argmin(errors))]


def _products(development: ReplicateMoments) -> dict[str, _Products]:
    """Return the products of every action that has enough development documents."""
    controls = control_variates(development.scalars, development.windows)
    moments = np.stack([development.scalars[name] for name in REDUCED], axis=-1)
    _, cluster_of = np.unique(development.clusters, return_inverse=True)
    clusters, found = int(cluster_of.max()) + 1, {}
    for place, action in enumerate(development.actions):
        present = development.present[:, place]
        count = present.sum(axis=1)
        informative = len(np.unique(cluster_of[count > 1]))
        if informative < FEWEST_CLUSTERS or int(np.maximum(count - 1, 0).sum()) < FEWEST_FREE:
            continue
        own = controls[:, place][present]
        if (np.abs(own.sum(axis=0)) > FARTHEST_MEAN * np.sqrt((own**2).sum(axis=0))).any():
            continue
        d, g = (_deviations(value[:, place], present) for value in (controls, moments))
        sums = [np.einsum("dkc,dkm->dcm", d, d), np.einsum("dkc,dkm->dcm", d, g), (g**2).sum(axis=1)]
        found[action] = _Products(cluster_of, *(_over_clusters(value, cluster_of, clusters) for value in sums))
    return found


def _deviations(values: Float, present: NDArray[np.bool_]) -> Float:
    """Return deviations from the document's mean, [D, K, V]; 0 for absent or null values."""
    values = np.where(present[..., None], values, 0.0)
    mean = values.sum(axis=1, keepdims=True) / np.maximum(present.sum(axis=1), 1)[:, None, None]
    return np.nan_to_num(np.where(present[..., None], values - mean, 0.0))


def _over_clusters(values: Float, cluster_of: NDArray[np.intp], clusters: int) -> Float:
    total = np.zeros((clusters, *values.shape[1:]))
    np.add.at(total, cluster_of, values)
    return total


def _ridge(controls: Float, moments: Float, penalty: float) -> Float:
    """Solve (R + penalty) beta = r in scaled control variates; beta is 0 for a control variate that does not vary.

    Args:
        controls: sums of products of the control variates, [..., 5, 5].
        moments: sums of products of the control variates with the moments, [..., 5, 13].
        penalty: infinite to use no control variate.
    """
    if np.isinf(penalty):
        return np.zeros_like(moments)
    scale = np.sqrt(np.diagonal(controls, axis1=-2, axis2=-1))
    scale = np.where(scale > 0, scale, 1.0)[..., None]
    correlation = controls / (scale * scale.swapaxes(-1, -2))
    solved: Float = np.linalg.solve(correlation + penalty * np.eye(len(CONTROLS)), moments / scale)
    return solved / scale
