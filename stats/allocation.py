"""The numbers of replicates K and documents N that an evaluation needs, from development data.

Each endpoint is linearized in the pooled moments (delta method). Its influence values per document and replicate split
into variance between documents, sigma_b^2, and between replicates of a document, sigma_w^2, in each stratum. With N
documents of K replicates in every stratum an interval's expected half-width is

    z sqrt( sum_s w_s^2 (sigma_b,s^2 / N + sigma_w,s^2 / (N K)) ),    z the normal quantile at 1 - alpha / (2 m),

and the least costly (K, N) within the bounds that meets every endpoint's target is chosen. If all but a few development
documents are alike (have nearly equal values), the interval must also reach as far as values that the sample lacks
could move the mean (``kvdrift.stats.ends``), given N documents with the same share of unlike documents.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from kvdrift.schema.errors import InputError
from kvdrift.schema.moments import COMPENSATORS
from kvdrift.schema.study import POOLED
from kvdrift.stats.alike import alike_documents
from kvdrift.stats.endpoints import Endpoint, Family
from kvdrift.stats.ends import MOST_UNLIKE, Likeness, reach_of
from kvdrift.stats.moments import DocumentMoments, Float, ReplicateMoments
from kvdrift.stats.pooling import Pooling
from kvdrift.stats.quantities import ANSWER_QUANTITIES, quantity_named
from kvdrift.stats.reduction import is_reduced
from kvdrift.stats.registry import Array, Between, Pooled
from kvdrift.stats.standard_errors import STEP


@dataclass(frozen=True)
class Variance:
    """Variance components of one endpoint's influence in one stratum, in the endpoint's unit squared."""

    stratum: str
    weight: float  # the stratum's w_s: 1 / S for a pooled endpoint, 1 for a stratum's own
    between_documents: float
    between_replicates: float


@dataclass(frozen=True)
class Linearized:
    """An endpoint's value on the development documents and its variance components; the value is NaN if undefined."""

    endpoint: Endpoint
    value: float
    variances: tuple[Variance, ...]
    likeness: Likeness | None = field(default=None, compare=False)  # None if more than a few documents differ
    documents: float = 1.0  # the mean number of development documents in a stratum
    between: Between | None = None

    def half_width(self, replicates: int, documents: int, z: float) -> float:
        """Return the expected half-width with K ``replicates`` and N ``documents`` per stratum, for the quantile ``z``.

        It is z sqrt(sum_s w_s^2 (sigma_b^2 / N + sigma_w^2 / (N K))). If nearly all documents have equal values, it is
        at least the distance by which values that the sample lacks could move the mean (``kvdrift.stats.ends``). NaN if
        the endpoint is undefined.
        """
        between, within = self.components
        half = z * math.sqrt((between + within / replicates) / documents)
        if self.likeness is None or self.between is None:
            return half
        level = 2 * float(ndtr(z)) - 1
        return max(half, reach_of(self.likeness, level, self.between, documents / self.documents))

    @property
    def components(self) -> tuple[float, float]:
        """The variances between documents and between replicates, each summed over strata with weights w_s^2.

        NaN if the endpoint is undefined.
        """
        if math.isnan(self.value):
            return math.nan, math.nan
        between = math.fsum(v.weight**2 * v.between_documents for v in self.variances)
        return between, math.fsum(v.weight**2 * v.between_replicates for v in self.variances)


@dataclass(frozen=True)
class Candidate:
    """A choice of K, with the least N that meets every target (else the largest N), its half-widths and its cost."""

    replicates: int
    documents_per_stratum: int
    half_widths: tuple[float, ...]
    seconds: float
    reachable: bool


@dataclass(frozen=True)
class Allocation(Candidate):
    """The chosen candidate; its half-widths are in the order of ``endpoints``.

    ``curve`` has a candidate for each K within the bounds. ``reason`` says in one line whether every target is met.
    """

    endpoints: tuple[Linearized, ...]
    level: float
    reason: str
    curve: tuple[Candidate, ...]


def allocate(
    development: ReplicateMoments,
    endpoints: Sequence[Endpoint],
    *,
    target: float,
    document_seconds: float,
    replicate_seconds: float,
    replicates: tuple[int, int],
    documents: tuple[int, int],
    alpha: float = 0.05,
    family_size: int = 0,
    constant: float | None = None,
    answers: ReplicateMoments | None = None,
    reduced: ReplicateMoments | None = None,
    alike_within: float = 0.0,
) -> Allocation:
    """Choose K, and N in each of S strata, at the least cost N S (document_seconds + K replicate_seconds).

    Of equal costs, the choice with fewer replicates is taken. If no choice within the bounds meets the targets, or an
    endpoint is undefined on the development documents, both upper bounds are taken and ``reason`` says so.

    Args:
        development: Moments of the development documents.
        endpoints: The endpoints whose half-widths count.
        target: The largest half-width that an endpoint may have.
        document_seconds: Cost of a document apart from its replicates, for all actions, averaged over strata.
        replicate_seconds: Cost of a replicate of a document, for all actions.
        replicates: The least and the largest K.
        documents: The least and the largest N.
        alpha: 1 - alpha is the level of all m intervals together.
        family_size: m; 0 for the number of endpoints.
        constant: In a sequential study, the last interim look's critical constant, in place of the normal quantile z.
        answers: Moments of the documents with answers, for endpoints over these documents alone.
        reduced: Reduced moments of the development documents, for endpoints that have reduced estimates.
        alike_within: How far the value of a document may be from the median of its stratum for the document to count as
            alike; the margin, if a study resolves equivalence.
    """
    level = Family("plan", tuple(endpoints), alpha, family_size).level
    linearized = tuple(
        linearize(_measured(development, answers, reduced, endpoint), endpoint, alike_within) for endpoint in endpoints
    )
    z = float(ndtri((1 + level) / 2)) if constant is None else constant
    strata = len(np.unique(development.strata))
    curve = tuple(
        _least_documents(
            linearized, target, z, count, documents, strata * (document_seconds + count * replicate_seconds)
        )
        for count in range(replicates[0], replicates[1] + 1)
    )
    reachable = [choice for choice in curve if choice.reachable]
    chosen = min(reachable, key=lambda choice: (choice.seconds, choice.replicates)) if reachable else curve[-1]
    return Allocation(
        **vars(chosen), endpoints=linearized, level=level, reason=_reason(linearized, target, chosen), curve=curve
    )


def _measured(
    development: ReplicateMoments, answers: ReplicateMoments | None, reduced: ReplicateMoments | None,
    endpoint: Endpoint,
) -> ReplicateMoments:  # fmt: skip
    """Return the moments of an endpoint's documents; reduced moments if the endpoint has a reduced estimate."""
    if endpoint.quantity in ANSWER_QUANTITIES:
        if answers is None:
            raise InputError(f"endpoint {endpoint}: no development document has answers that are scored")
        return answers
    if reduced is not None and is_reduced(quantity_named(endpoint.quantity), development.document_means()):
        return reduced
    return development


def linearize(development: ReplicateMoments, endpoint: Endpoint, alike_within: float = 0.0) -> Linearized:
    """Linearize one endpoint at the development documents' pooled moments and estimate its variance components.

    The variance between documents (by ANOVA of unweighted document means) is n times the cluster-robust variance of the
    stratum mean, less the replicate variance that document means carry, and at least 0. If no documents share a
    cluster, n times the cluster-robust variance is the sample variance of document means. If some share one, it
    includes the design effect, which the evaluation has too if its clusters have the same sizes.
    """
    strata = tuple(str(name) for name in np.unique(development.strata))
    endpoint.check(development.actions, strata, development.windows)
    influence, value = influences(development, endpoint)
    names = strata if endpoint.stratum == POOLED else (endpoint.stratum,)
    rows = [(name, np.flatnonzero(development.strata == name)) for name in names]
    # Strata without a document of the endpoint do not count, as in the estimate itself.
    rows = [(name, row) for name, row in rows if not np.isnan(influence[row]).all()] if not math.isnan(value) else []
    variances = tuple(
        Variance(name, 1 / len(rows), *_components(influence[row], development.clusters[row], f"{endpoint} in {name}"))
        for name, row in rows
    )
    return Linearized(endpoint, value, variances, *_likeness(development.document_means(), endpoint, alike_within))


def _likeness(moments: DocumentMoments, endpoint: Endpoint, within: float) -> tuple[Likeness | None, float, Between]:
    """Return how alike an endpoint's documents are, how many a stratum has on average, and the quantity's range.

    The likeness is None if it bounds no interval: if too many documents are unlike the others, or if the range has no
    end.
    """
    moments = moments.in_canonical_order()
    pairs = [] if endpoint.baseline is None else [(endpoint.baseline, endpoint.action)]
    pooling, quantity = Pooling.of(moments, pairs), quantity_named(endpoint.quantity)
    row = pooling.rows.index(endpoint.stratum)
    subject = pooling.subjects(quantity).index((endpoint.baseline, endpoint.action))
    place = quantity.x(moments.windows).index(endpoint.x)
    likeness = alike_documents(pooling, quantity, within).of((slice(row, row + 1), subject, place))
    strata = len(pooling.rows) - 1 if row == 0 else 1
    count = float(pooling.counts_of(quantity)[row, subject]) / strata
    between = quantity.range.between(moments.windows.horizon)
    says = between.bounded and count > 0 and likeness.unlike[0] <= MOST_UNLIKE
    return likeness if says else None, max(count, 1.0), between


def influences(development: ReplicateMoments, endpoint: Endpoint) -> tuple[Float, float]:
    """Return each replicate's influence on the endpoint, float64 [D, K] (NaN if absent), and the endpoint's value."""
    moments = development.document_means()
    pairs = [] if endpoint.baseline is None else [(endpoint.baseline, endpoint.action)]
    pooling = Pooling.of(moments, pairs)
    names = [name for name in moments.scalars if name not in COMPENSATORS]
    stacked = np.stack([moments.scalars[name] for name in names], axis=-1)
    pooled = pooling.means(stacked, np.ones((1, len(moments.documents))))
    row = pooling.rows.index(endpoint.stratum)
    if endpoint.baseline is None:
        supports = [pooling.action_support[moments.actions.index(endpoint.action)]]
    else:
        supports = list(pooling.pair_supports[0])
    at = pooled[0, row, supports]  # [1 or 2 actions, moments]
    quantity = endpoint.check(moments.actions, moments.stratum_names, moments.windows)
    if quantity.profile:
        raise InputError(
            f"endpoint {endpoint}: it needs moments at every position or lag, and a plan is made from means over whole "
            "pairs; give another quantity"
        )
    place = quantity.x(moments.windows).index(endpoint.x)

    def evaluate(values: Array) -> Array:
        # [steps, actions, moments] -> [steps]
        scalars = [{name: values[:, side, i] for i, name in enumerate(names)} for side in range(len(at))]
        result = quantity.function(*(Pooled(side, {}, moments.windows) for side in scalars))
        return result[..., place] if quantity.axis else result

    value = float(evaluate(at[None])[0])
    steps = at.astype(np.complex128).reshape(1, -1) + 1j * STEP * np.eye(at.size)
    gradient = (evaluate(steps.reshape(at.size, *at.shape)).imag / STEP).reshape(at.shape)
    values = np.stack([development.scalars[name] for name in names], axis=-1)[:, pooling.supports[supports]]
    present = development.present[:, pooling.supports[supports]].all(axis=1)
    # A moment over an empty window plays no part in a defined endpoint: its derivative is 0, its value NaN.
    centred = np.where(gradient[:, None, :] == 0, 0.0, values - at[:, None, :])
    influence = np.einsum("dakm,am->dk", centred, gradient)
    return np.where(present, influence, np.nan), value


def _components(influence: Float, clusters: NDArray[np.str_], where: str) -> tuple[float, float]:
    """Estimate a stratum's variance between documents and between replicates from influence [documents, replicates].

    ``where`` names the endpoint and the stratum for an error message.
    """
    present = ~np.isnan(influence)
    counts = present.sum(axis=1)
    influence, present, clusters, counts = (part[counts > 0] for part in (influence, present, clusters, counts))
    _, cluster_of = np.unique(clusters, return_inverse=True)
    sets = int(cluster_of.max()) + 1
    if sets < 2 or counts.max() < 2:
        raise InputError(
            f"endpoint {where}: too few development documents or replicates: a variance needs two documents of "
            "different clusters, and two replicates of a document"
        )
    means = np.where(present, influence, 0.0).sum(axis=1) / counts
    residual = np.where(present, influence - means[:, None], 0.0)
    within = float((residual**2).sum() / (counts - 1).sum())
    totals = np.bincount(cluster_of, weights=means - means.mean())
    robust = float((totals**2).sum() / len(means) * sets / (sets - 1))  # n Var(stratum mean); s^2 for single clusters
    return max(robust - within * float((1 / counts).mean()), 0.0), within


def _least_documents(
    linearized: Sequence[Linearized], target: float, z: float, replicates: int, bounds: tuple[int, int],
    seconds_per_document: float,
) -> Candidate:  # fmt: skip
    def half_widths(documents: int) -> tuple[float, ...]:
        return tuple(endpoint.half_width(replicates, documents, z) for endpoint in linearized)

    def meets(documents: int) -> bool:
        return all(width <= target for width in half_widths(documents))  # False for NaN

    # Half-widths fall with N, so bisection finds the first N that meets the targets.
    candidates = range(bounds[0], bounds[1] + 1)
    place = bisect_left(candidates, 1, key=lambda documents: int(meets(documents)))
    documents = candidates[min(place, len(candidates) - 1)]
    return Candidate(
        replicates, documents, half_widths(documents), documents * seconds_per_document, place < len(candidates)
    )


def _reason(linearized: Sequence[Linearized], target: float, chosen: Candidate) -> str:
    size = f"K = {chosen.replicates}, N = {chosen.documents_per_stratum} per stratum"
    for endpoint in linearized:
        if math.isnan(endpoint.value):
            return f"{endpoint.endpoint} is undefined on the development documents: both upper bounds are taken, {size}"
    width = max(chosen.half_widths)
    endpoint = linearized[chosen.half_widths.index(width)]
    if chosen.reachable:
        return (
            f"all targets are met at {size}; the widest half-width is expected of {endpoint.endpoint}: {width:.3g}, "
            f"with a target of {target:.3g}"
        )
    return (
        f"targets out of reach: at the upper bounds, {size}, the half-width of {endpoint.endpoint} is expected to be "
        f"{width:.3g} instead of {target:.3g}; intervals hold nevertheless, and are wider than requested: more "
        "evaluation documents would make them narrower, and a larger plan.target_half_width needs fewer documents"
    )
