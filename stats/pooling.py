"""Weighted pooling of document moments: within strata, then over strata with equal weight (``docs/quantities.md``).

The weights are whole-number counts per document: all ones for the point estimate, a resample's counts for a draw. Any
number of weightings goes through one matrix product per stratum and support (an action with the documents it is pooled
over). Each support has a product of its own, so that its bits do not depend on other supports and each can be computed
separately.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvdrift.schema.errors import InputError, nearest
from kvdrift.schema.moments import COMPENSATORS
from kvdrift.schema.study import POOLED
from kvdrift.stats.moments import DocumentMoments, Float
from kvdrift.stats.registry import Array, Feature, Pooled, Quantity

TILE_COLUMNS = 64
TILE_WORK = 2**18  # multiplications of one tile; up to this size OpenBLAS uses one thread


@dataclass(frozen=True, eq=False)
class Pooling:
    """The documents behind each row of each quantity.

    A *support* is an action with the documents it is pooled over: the action's own documents for its quantities, the
    documents of both actions for a contrast. ``supports`` is int [U], the action of each; ``masks`` bool [D, U], its
    documents. ``action_support`` has the place in U of each action's support, ``pair_supports`` the two places of each
    pair. ``rows`` are the strata with documents, after ``pooled``; ``members`` has the indices of each stratum's
    documents.
    """

    moments: DocumentMoments
    pairs: tuple[tuple[str, str], ...]
    rows: tuple[str, ...]
    members: tuple[NDArray[np.intp], ...]
    supports: NDArray[np.intp]
    masks: NDArray[np.bool_]
    action_support: tuple[int, ...]
    pair_supports: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, moments: DocumentMoments, pairs: Sequence[tuple[str, str]] | None = None) -> Pooling:
        """Return the pooling of every action and every (baseline, action) of ``pairs``; None for all ordered pairs."""
        actions = moments.actions
        if pairs is None:
            pairs = [(a, b) for a in actions for b in actions if a != b]
        for pair in pairs:
            for name in pair:
                if name not in actions:
                    raise InputError(f"no action is named '{name}'; {nearest(name, actions)}")
            if pair[0] == pair[1]:
                raise InputError(f"contrast of '{pair[0]}' against itself; give two actions")
        known: dict[tuple[int, bytes], int] = {}
        masks: list[NDArray[np.bool_]] = []

        def support(action: int, mask: NDArray[np.bool_]) -> int:
            # If both actions have the same documents, as is usual, a contrast needs no further pooling.
            key = (action, mask.tobytes())
            if key not in known:
                known[key] = len(masks)
                masks.append(mask)
            return known[key]

        action_support = tuple(support(i, moments.present[:, i]) for i in range(len(actions)))
        pair_supports = []
        for baseline, action in pairs:
            a, b = actions.index(baseline), actions.index(action)
            both = moments.present[:, a] & moments.present[:, b]
            pair_supports.append((support(a, both), support(b, both)))
        members = tuple(np.flatnonzero(moments.strata == name) for name in moments.stratum_names)
        return cls(
            moments,
            tuple((str(a), str(b)) for a, b in pairs),
            (POOLED, *moments.stratum_names),
            members,
            np.array([action for action, _ in known], dtype=np.intp),
            np.stack(masks, axis=1),
            action_support,
            tuple(pair_supports),
        )

    def counts_of(self, quantity: Quantity) -> NDArray[np.int64]:
        """Count the documents behind a quantity: int64 [rows, subjects], ``pooled`` first."""
        by_stratum = np.stack([self.masks[documents].sum(axis=0) for documents in self.members])
        counts = np.concatenate([by_stratum.sum(axis=0, keepdims=True), by_stratum])
        return counts[:, [baseline for baseline, _ in self._subjects(quantity)]]

    def subjects(self, quantity: Quantity) -> tuple[tuple[str | None, str], ...]:
        """Return the subjects of a quantity: (None, action) for every action, or (baseline, action) for every pair."""
        if quantity.kind == "action":
            return tuple((None, action) for action in self.moments.actions)
        return self.pairs

    def _subjects(self, quantity: Quantity) -> tuple[tuple[int, int], ...]:
        if quantity.kind == "action":
            return tuple((support, support) for support in self.action_support)
        return self.pair_supports

    def means(self, value: Float, counts: Float) -> Float:
        """Pool one moment under B weightings, for U supports.

        ``value`` is float64 [D, A] or [D, A, X], ``counts`` [B, D]; returns [B, rows, U] or [B, rows, U, X]. A row is
        NaN if a weighting leaves one of its strata without a document; strata in which the support has no document at
        all do not count in the pooled row.
        """
        tail = value.shape[2:]
        kept = np.where(self.masks.reshape(*self.masks.shape, *(1 for _ in tail)), value[:, self.supports], 0.0)
        means = pooled_means(kept.reshape(*self.masks.shape, -1), self.masks, self.members, counts)
        return means.reshape(*means.shape[:3], *tail)

    def evaluate(self, quantities: Sequence[Quantity], counts: Float) -> dict[str, Float]:
        """Evaluate quantities under weightings [B, D]: by name, [B, rows, subjects, X], with X = 1 for a scalar."""
        pooled = self.pool(quantities, counts)
        return {quantity.name: evaluate(quantity, pooled[quantity.name]) for quantity in quantities}

    def pool(self, quantities: Sequence[Quantity], counts: Float) -> dict[str, tuple[Pooled, ...]]:
        """Return the pooled moments that each quantity reads, by the quantity's name.

        A quantity of an action reads one ``Pooled``, a contrast two: the baselines' and the actions'. Arrays are [B,
        rows, subjects] or [B, rows, subjects, X].
        """
        read = [name for name in self.moments.scalars if name not in COMPENSATORS]
        stacked = self.means(np.stack([self.moments.scalars[name] for name in read], axis=-1), counts)
        scalars: dict[str, Array] = {name: stacked[..., i] for i, name in enumerate(read)}
        needed = {name for quantity in quantities for name in quantity.profile}
        source: Mapping[str, Float] = self.moments.profiles
        for name in sorted(needed - source.keys()):
            raise InputError(f"the document moments have no profile '{name}'; give it in positions, lags or bins")
        profiles: dict[str, Array] = {name: self.means(source[name], counts) for name in sorted(needed)}
        selected: dict[tuple[int, ...], dict[str, Array]] = {}
        sums: dict[tuple[int, ...], dict[Feature, Array]] = {}

        def select(quantity: Quantity, supports: tuple[int, ...]) -> Pooled:
            if supports not in selected:
                selected[supports] = {name: self._select(value, supports) for name, value in scalars.items()}
            chosen = {name: self._select(profiles[name], supports) for name in quantity.profile}
            return Pooled(selected[supports], chosen, self.moments.windows, sums.setdefault(supports, {}))

        # All subjects at once: quantities take any leading axes.
        return {
            quantity.name: tuple(select(quantity, supports) for supports in self.sides(quantity))
            for quantity in quantities
        }

    def sides(self, quantity: Quantity) -> tuple[tuple[int, ...], ...]:
        """Return the support of each subject of a quantity; for a contrast, first the baselines', then the actions'.

        So the result is one tuple of indices into ``supports`` for a quantity of an action, and two for a contrast.
        """
        pairs = self._subjects(quantity)
        kept = (0,) if quantity.kind == "action" else (0, 1)
        return tuple(tuple(pair[side] for pair in pairs) for side in kept)

    def _select(self, value: Array, supports: tuple[int, ...]) -> Array:
        """Take some supports of [B, rows, U] or [B, rows, U, X]; without a copy if these are all supports."""
        if supports == tuple(range(len(self.supports))):
            return value
        return value[:, :, list(supports)]


def evaluate(quantity: Quantity, pooled: Sequence[Pooled]) -> Array:
    """Evaluate a quantity from pooled moments: [..., X], with X = 1 for a scalar.

    The moments are those of an action or, for a contrast, of a baseline and of an action.
    """
    value = quantity.function(*pooled)
    return value if quantity.axis else value[..., None]


def pooled_means(values: Float, masks: NDArray[np.bool_], members: Sequence[NDArray[np.intp]], counts: Float) -> Float:
    """Pool values under every weighting, within strata and then over strata: [B, rows, U, V], ``pooled`` first.

    ``values`` is float64 [D, U, V] and 0 where ``masks``, bool [D, U], is false, for U supports and V values;
    ``members`` are the documents of each stratum, ``counts`` [B, D] the weightings.
    """
    means = np.empty((len(counts), 1 + len(members), *values.shape[1:]))
    pooled = means[:, 0]
    pooled[:] = 0.0
    strata = np.zeros(values.shape[1])
    total = np.empty((len(counts), *values.shape[1:]))
    for row, documents in enumerate(members, start=1):
        weights = np.ascontiguousarray(counts[:, documents])
        for support in range(values.shape[1]):
            total[:, support] = _product(weights, values[documents, support])
        weight = weights @ masks[documents].astype(np.float64)  # a product of whole numbers, hence exact
        # w_d = 1 / n_stratum(d), n counted in the resample.
        with np.errstate(invalid="ignore"):
            np.divide(total, weight[:, :, None], out=means[:, row])
        has = masks[documents].any(axis=0)
        strata += has
        if has.all():
            pooled += means[:, row]
        else:
            pooled[:, has] += means[:, row, has]
    with np.errstate(invalid="ignore"):
        pooled /= strata[:, None]  # equal weight of strata
    return means


def _product(weights: Float, values: Float) -> Float:
    """Multiply [B, n] by [n, V] in tiles that BLAS does not split over threads.

    The product of one stratum is too small to gain from threads: on a machine with other work each of thousands of
    products would wait until all its threads had a core (measured: 6 times slower). Tiles depend on the shapes alone,
    so equal blocks give equal bits.
    """
    if len(weights) == 1:  # BLAS would round a column of a single row by its place among the columns
        summed: Float = (weights.T * values).sum(axis=0, keepdims=True)
        return summed
    most = max(TILE_WORK // (TILE_COLUMNS * weights.shape[1]), 1)
    rows = min(1 << (most.bit_length() - 1), len(weights))  # a power of 2, so that it divides the block of draws
    if rows < 8 or len(weights) % rows:  # large strata are worth using threads
        whole: Float = weights @ values
        return whole
    tiled = weights.reshape(-1, rows, weights.shape[1])
    result = np.empty((len(weights), values.shape[1]))
    for first in range(0, values.shape[1], TILE_COLUMNS):
        part = slice(first, first + TILE_COLUMNS)
        result[:, part] = (tiled @ np.ascontiguousarray(values[:, part])).reshape(len(weights), -1)
    return result
