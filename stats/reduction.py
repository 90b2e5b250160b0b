"""Control variates of a coupled pair, and the reduction of moments by them, with coefficients of development documents.

Given the histories up to t - 1 the tokens at t differ with probability delta_t. So D = sum_t a_t (I_t - delta_t) has
mean 0 if a_t depends on these histories alone, for any model, document and action. Five weights are used:

    1/H over block 1, over block 2 and over block 3;  1{t > tau}/H;  1{tau >= t} (H - t)/H.

Other weights that moments of I_t suggest are combinations of these five: 1/H is the sum of the three blocks' weights,
and 1{tau >= t} is H times the difference of 1/H and 1{t > tau}/H. Each D is a difference of two moments, so means of
documents give it.

For any functional g of a replicate and any fixed beta, M(g - beta . D) has the expectation of M(g). Only functionals of
I_t are reduced; moments of total variation stay as they are. delta_t is stored in 32 bits, which moves the mean of a D
by less than 1e-7 of the sum of its weights.

Coefficients are ridge regressions of the reduced moments on the control variates, over the differences between the
replicates of a document. Each action has separate coefficients, pooled over strata. The control variates are scaled to
one size, since some are nearly combinations of others. The penalty is chosen from a fixed list, by the least error when
each cluster of documents is left out in turn; the infinite penalty uses no control variate. One penalty serves all
moments of an action, so that an identity of moments (R = O + E C) also holds for reduced moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvdrift.schema.windows import Windows
from kvdrift.stats.clusters import over_clusters
from kvdrift.stats.moments import DocumentMoments, Float, ReplicateMoments
from kvdrift.stats.registry import Quantity
from kvdrift.stats.standard_errors import features_read

CONTROLS: Final = ("block 1", "block 2", "block 3", "after divergence", "exposure")

REDUCED: Final = (
    "mismatch", "diverged", "entry", "exposure", "occupation", "cohort", "long_agreement", "mismatch_after_agreement",
    "block_1_mismatch", "block_2_mismatch", "block_3_mismatch", "prefix_mismatch", "prefix_diverged",
)  # fmt: skip
"""The moments that are reduced: functionals of the positions at which tokens differ."""

NO_COEFFICIENTS: Final[Mapping[str, Float]] = MappingProxyType({})
"""Coefficients by action, for no action: nothing is reduced."""


def control_variates(scalars: Mapping[str, Float], windows: Windows) -> Float:
    """Compute the control variates of replicates, or their means over a document's replicates.

    For moments of shape [...] the result is float64 [..., 5], in the order of ``CONTROLS``. It is NaN without a
    replicate, and 0 for a block without positions.
    """
    controls = []
    for block, (first, last) in enumerate(windows.blocks, start=1):
        share = max(last - first + 1, 0) / windows.horizon
        difference = scalars[f"block_{block}_mismatch"] - scalars[f"block_{block}_delta"]
        controls.append(difference * share if share else np.zeros_like(difference))
    controls.append(scalars["occupation"] - scalars["occupation_compensator"])
    controls.append(scalars["exposure"] - scalars["exposure_compensator"])
    return np.stack(controls, axis=-1)


def reduced_scalars(scalars: Mapping[str, Float], controls: Float, coefficients: Float) -> dict[str, Float]:
    """Return the moments, with beta . D subtracted from those of ``REDUCED``.

    D is ``controls`` [..., 5], beta ``coefficients`` [..., 5, 13]; moments are [...].
    """
    part = np.einsum("...c,...cm->...m", controls, coefficients)
    return {**scalars, **{name: scalars[name] - part[..., place] for place, name in enumerate(REDUCED)}}


def reduced_documents(moments: DocumentMoments, coefficients: Mapping[str, Float]) -> DocumentMoments | None:
    """Reduce the moments of documents on which the coefficients, beta by action, were not fitted.

    The result has only the actions with coefficients, and no profiles; None if no action has coefficients.
    """
    actions = [action for action in moments.actions if action in coefficients]
    if not actions:
        return None
    kept = replace(moments, positions={}, lags={}).of_actions(actions)
    beta = np.stack([coefficients[action] for action in kept.actions])
    scalars = reduced_scalars(kept.scalars, control_variates(kept.scalars, kept.windows), beta)
    return replace(kept, scalars=scalars)


def is_reduced(quantity: Quantity, moments: DocumentMoments) -> bool:
    """Tell whether a quantity is a function of reduced moments alone."""
    if quantity.profile:
        return False
    return all(feature.kind == "scalar" and feature.name in REDUCED for _, feature in features_read(quantity, moments))


PENALTIES: Final = (0.001, 0.01, 0.1, 0.3, 1.0, np.inf)
"""Penalties of scaled control variates: 1 halves the coefficient of a single control variate."""

FEWEST_CLUSTERS, FEWEST_FREE = 3, 20
"""An action with fewer clusters, or fewer replicates beyond the first of their document, has no coefficients."""

FARTHEST_MEAN: Final = 6.0
"""An action has no coefficients if a control variate's mean is farther from 0, in standard errors.

Such a log does not come from the coupling: the probability by chance is 1 in 10^8.
"""


def fit_coefficients(development: ReplicateMoments) -> dict[str, Float]:
    """Fit the coefficients of every action that has enough development documents.

    Returns beta for each such action: float64 [5, 13] in the orders of ``CONTROLS`` and ``REDUCED``.
    """
    coefficients = {}
    for action, products in _products(development).items():
        penalty = products.best_penalty()
        coefficients[action] = _ridge(products.controls.sum(axis=0), products.moments.sum(axis=0), penalty)
    return coefficients


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
    """For one action and each cluster, sums of products of the replicates' deviations from their document's mean."""

    cluster_of: NDArray[np.intp]  # the cluster of each document, int [D]
    controls: Float  # of the control variates with each other, float64 [C, 5, 5]
    moments: Float  # of the control variates with the moments, [C, 5, 13]
    squares: Float  # of the moments with themselves, [C, 13]

    def left_out(self, penalty: float) -> Float:
        """Return the coefficients fitted without each cluster in turn, [C, 5, 13]."""
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
    clusters, products = int(cluster_of.max()) + 1, {}
    for place, action in enumerate(development.actions):
        present = development.present[:, place]
        count = present.sum(axis=1)
        informative = len(np.unique(cluster_of[count > 1]))
        if informative < FEWEST_CLUSTERS or int(np.maximum(count - 1, 0).sum()) < FEWEST_FREE:
            continue
        controls_present = controls[:, place][present]
        if (np.abs(controls_present.sum(axis=0)) > FARTHEST_MEAN * np.sqrt((controls_present**2).sum(axis=0))).any():
            continue
        d, g = (_deviations(value[:, place], present) for value in (controls, moments))
        sums = [np.einsum("dkc,dkm->dcm", d, d), np.einsum("dkc,dkm->dcm", d, g), (g**2).sum(axis=1)]
        products[action] = _Products(cluster_of, *(over_clusters(value, cluster_of, clusters) for value in sums))
    return products


def _deviations(values: Float, present: NDArray[np.bool_]) -> Float:
    """Return deviations from the document's mean, [D, K, V]; 0 for absent or null values."""
    values = np.where(present[..., None], values, 0.0)
    mean = values.sum(axis=1, keepdims=True) / np.maximum(present.sum(axis=1), 1)[:, None, None]
    return np.nan_to_num(np.where(present[..., None], values - mean, 0.0))


def _ridge(controls: Float, moments: Float, penalty: float) -> Float:
    """Return ridge coefficients beta, [..., 5, 13], of moments on control variates that are scaled to one size.

    ``controls`` are the sums of products of control variates with each other, [..., 5, 5], ``moments`` those with the
    moments, [..., 5, 13]. beta is 0 for a control variate that does not vary, and everywhere at an infinite penalty.
    """
    if np.isinf(penalty):
        return np.zeros_like(moments)
    scale = np.sqrt(np.diagonal(controls, axis1=-2, axis2=-1))
    scale = np.where(scale > 0, scale, 1.0)[..., None]
    correlation = controls / (scale * scale.swapaxes(-1, -2))
    solved: Float = np.linalg.solve(correlation + penalty * np.eye(len(CONTROLS)), moments / scale)
    return solved / scale


PLAIN_VARIANCE, REDUCED_VARIANCE = "plain", "reduced"
"""The two variances from which a plan can choose K replicates and N documents: of plain or of reduced estimates."""


def saving(plan: dict[str, Any]) -> str:
    """Return a line that compares the sample sizes a plan needs with reduced and with plain estimates.

    It is a line such as "9 replicates instead of 14"; empty if both sizes are equal, or without a plan.
    """
    if not (sizes := plan.get("sizes")):
        return ""
    kinds = (("replicates", "replicates"), ("documents_per_stratum", "documents per stratum"))
    counts = [(sizes[REDUCED_VARIANCE][name], sizes[PLAIN_VARIANCE][name], words) for name, words in kinds]
    changed = [f"{less} {words} instead of {more}" for less, more, words in counts if less != more]
    if not changed:
        return ""
    seconds = [sizes[name]["seconds"] for name in (REDUCED_VARIANCE, PLAIN_VARIANCE)]
    if seconds[1] > 0:
        changed.append(f"{100 * seconds[0] / seconds[1]:.0f}% of the time")
    text = ", ".join(changed)
    return text if plan["variance"] == REDUCED_VARIANCE else f'with variance = "reduced" {text}'
