"""Document bootstrap (definitions, "Bootstrap"): resampled documents, pooled moments, quantities of every draw.

Documents are drawn by ``kvdrift.stats.clusters``, one draw for all actions, strata and quantities: draw i is a function
of (seed, i) and of the set of documents alone, not of their order, nor of the number of draws. On one machine and build
of BLAS, more draws leave the bits of the first ones, because products are taken over the same blocks of draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvdrift.stats.clusters import ClusterBlocks, ClusterDraws
from kvdrift.stats.ends import STUDENTIZED, Studentized
from kvdrift.stats.moments import DocumentMoments, Float
from kvdrift.stats.pooling import Pooling, evaluate
from kvdrift.stats.quantities import QUANTITIES, quantity_named
from kvdrift.stats.registry import Pooled, Quantity, Range
from kvdrift.stats.resampling.intervals import Estimates, Request, summarize
from kvdrift.stats.standard_errors import StandardErrors

BLOCK = 256  # draws per matrix product; it decides the last bits of results, so it is no tuning knob
_GROUP_BYTES = 400 * 2**20  # bytes of the draws of one group of quantities that `estimate` holds at once


@dataclass(frozen=True, eq=False)
class BootstrapDraws:
    """Quantities of draws.

    ``values`` maps each quantity's name to float64 [draws, rows, subjects, X]. Rows are ``pooled`` and the strata in
    sorted order; subjects are the actions, or the (baseline, action) pairs; X is 1 for a scalar. NaN where a draw
    leaves the quantity undefined. ``distances`` are the draws' distances from the estimate in their own standard
    errors, t* = (theta* - theta) / SE* (definitions, "Intervals"), of the same shapes if they were asked for; NaN also
    if SE* vanishes.
    """

    values: dict[str, Float]
    distances: dict[str, Float]


def resample(
    moments: DocumentMoments, quantities: Sequence[str], *, seed: int, draws: int,
    pairs: Sequence[tuple[str, str]] | None = None, studentized: bool = False,
) -> BootstrapDraws:  # fmt: skip
    """Compute quantities of some draws, and with ``studentized`` their t* too.

    ``pairs`` are the (baseline, action) of each contrast; None for all ordered pairs of actions.
    """
    moments = moments.in_canonical_order()
    pooling = Pooling.of(moments, pairs)
    chosen = [quantity_named(name) for name in quantities]
    clusters = ClusterDraws(moments.strata, moments.clusters)
    values: dict[str, Float] = {}
    distances: dict[str, Float] = {}
    studentize = _Studentizing(pooling, chosen) if studentized else None
    for first in range(0, draws, BLOCK):
        # A block is computed whole even if only a part is needed: for another number of rows BLAS may round a product's
        # last bit otherwise.
        counts = clusters.counts(seed, first, first + BLOCK)
        place, kept = slice(first, first + BLOCK), slice(min(BLOCK, draws - first))
        pooled = pooling.pool(chosen, counts)
        for quantity in chosen:
            name = quantity.name
            value = evaluate(quantity, pooled[name])
            if not quantity.smooth and quantity.range is Range.POSITION:  # a position beyond H: not reached in the draw
                value = np.where(np.isnan(value), moments.windows.horizon, value)
            if name not in values:  # filled in place, since concatenating blocks would hold everything twice
                values[name] = np.empty((draws, *value.shape[1:]))
                if studentize:
                    distances[name] = np.empty_like(values[name])
            values[name][place] = value[kept]
            if studentize:
                studentize(quantity, value, pooled[name], counts, kept, out=distances[name][place])
    return BootstrapDraws(values, distances)


class _Studentizing:
    """The distances of draws from the estimates, in their own standard errors."""

    def __init__(self, pooling: Pooling, quantities: Sequence[Quantity]) -> None:
        blocks = ClusterBlocks(pooling)
        self._errors = {one.name: StandardErrors(blocks, one) for one in quantities if one.smooth}
        self._estimates = pooling.evaluate(quantities, np.ones((1, len(pooling.moments.documents))))
        self._horizon = pooling.moments.windows.horizon

    def __call__(
        self, quantity: Quantity, value: Float, pooled: Sequence[Pooled], counts: Float, inside: slice, out: Float
    ) -> None:
        if not quantity.smooth:
            out[:] = np.nan
            return
        errors = self._errors[quantity.name](pooled, counts)[inside]
        np.copyto(errors, np.nan, where=errors <= quantity.range.between(self._horizon).resolution)
        np.subtract(value[inside], self._estimates[quantity.name], out=out)
        out /= errors


def groups(
    moments: DocumentMoments,
    draws: int,
    quantities: Sequence[str] | None = None,
    pairs: Sequence[tuple[str, str]] | None = None,
    *,
    studentized: bool = False,
) -> tuple[tuple[str, ...], ...]:
    """Split quantities into groups, one for each task, whose draws fit into memory together.

    ``quantities`` None stands for every quantity whose moments are given. With ``studentized`` every draw has its t*
    too. A single profile may exceed the bound, and is then a group of its own.
    """
    if quantities is None:
        known = {*moments.positions, *moments.lags}
        quantities = [name for name, quantity in QUANTITIES.items() if known.issuperset(quantity.profile)]
    pooling = Pooling.of(moments, pairs)
    result: list[tuple[str, ...]] = []
    held = 0
    for name in quantities:
        quantity = quantity_named(name)
        cells = len(pooling.rows) * len(pooling.subjects(quantity)) * len(quantity.x(moments.windows))
        size = draws * cells * np.dtype(np.float64).itemsize * (2 if studentized else 1)
        if result and held + size <= _GROUP_BYTES:
            result[-1] = (*result[-1], name)
            held += size
        else:
            result.append((name,))
            held = size
    return tuple(result)


def observed(
    moments: DocumentMoments, quantities: Sequence[str], pairs: Sequence[tuple[str, str]] | None = None
) -> dict[str, Float]:
    """Compute point estimates with every document counted once: name -> float64 [rows, subjects, X]."""
    moments = moments.in_canonical_order()
    chosen = [quantity_named(name) for name in quantities]
    values = Pooling.of(moments, pairs).evaluate(chosen, np.ones((1, len(moments.documents))))
    return {name: value[0] for name, value in values.items()}


def observed_errors(
    moments: DocumentMoments, quantities: Sequence[str], pairs: Sequence[tuple[str, str]] | None = None
) -> dict[str, Float]:
    """Compute standard errors of the estimates (definitions, "Intervals"): name -> float64 [rows, subjects, X].

    They are 0 for quantities that are not smooth, which have none.
    """
    moments = moments.in_canonical_order()
    chosen = [quantity_named(name) for name in quantities]
    pooling, counts = Pooling.of(moments, pairs), np.ones((1, len(moments.documents)))
    pooled, blocks = pooling.pool(chosen, counts), ClusterBlocks(pooling)
    return {
        one.name: StandardErrors(blocks, one)(pooled[one.name], counts)[0]
        if one.smooth
        else np.zeros(evaluate(one, pooled[one.name]).shape[1:])
        for one in chosen
    }


def resampled(
    moments: DocumentMoments, quantities: Sequence[str], *, seed: int, draws: int,
    pairs: Sequence[tuple[str, str]] | None = None, studentized: bool = True,
) -> dict[str, Studentized]:  # fmt: skip
    """Return the estimates of quantities with their draws, and with standard errors and t* if ``studentized``."""
    sample = resample(moments, quantities, seed=seed, draws=draws, pairs=pairs, studentized=studentized)
    estimates, nothing = observed(moments, quantities, pairs), np.empty((0, 0))
    errors = observed_errors(moments, quantities, pairs) if studentized else {}
    return {
        name: Studentized(
            estimates[name], errors.get(name, nothing), sample.values[name], sample.distances.get(name, nothing)
        )
        for name in quantities
    }


def estimate(
    moments: DocumentMoments,
    *,
    draws: int,
    seed: int,
    request: Request | None = None,
    quantities: Sequence[str] | None = None,
    pairs: Sequence[tuple[str, str]] | None = None,
) -> Estimates:
    """Estimate quantities with intervals, as columns of the ``results`` table.

    Quantities (None: every quantity whose moments are given) are taken group by group, so that only one group's draws
    are held at once. By default all estimates are exploratory. ``pairs`` are the (baseline, action) of each contrast;
    None for all ordered pairs of actions.
    """
    request = request or Request()
    parts = []
    studentized = request.interval == STUDENTIZED
    for names in groups(moments, draws, quantities, pairs, studentized=studentized):
        own = resampled(moments, names, seed=seed, draws=draws, pairs=pairs, studentized=studentized)
        parts.append(summarize(moments, own, request, pairs))
    return Estimates.join(parts)
