"""The input of an analysis: additive moments of each document, or of each replicate on development documents.

Names are those of ``kvdrift.schema.moments``; the arrays are filled from the SQL views ``moments`` and ``profiles``.
Everything is validated here, once, so that later modules only compute.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvdrift.schema.errors import InputError
from kvdrift.schema.moments import ANSWER_MOMENTS, BIN_MOMENTS, KL_BINS, LAG_MOMENTS, POSITION_MOMENTS, SCALAR_MOMENTS
from kvdrift.schema.study import POOLED
from kvdrift.schema.windows import Windows

Float = NDArray[np.float64]
Text = NDArray[np.str_]


@dataclass(frozen=True, eq=False)
class MeasuredDocuments:
    """The documents of some measurements, each with its stratum and cluster, str [D], and the actions measured."""

    documents: Text
    strata: Text
    clusters: Text
    actions: tuple[str, ...]

    def __post_init__(self) -> None:
        for field in ("documents", "strata", "clusters"):
            keys = np.asarray(getattr(self, field), dtype=np.str_)
            if keys.ndim != 1 or len(keys) != len(self.documents):
                raise InputError(f"{field} has shape {keys.shape}, not one entry for each document")
            object.__setattr__(self, field, keys)
        object.__setattr__(self, "actions", tuple(self.actions))
        if not len(self.documents) or not self.actions:
            raise InputError("moments without documents or without actions: nothing to estimate")
        for kind, names in (("document", self.documents.tolist()), ("action", list(self.actions))):
            if repeated := [name for name, count in Counter(names).items() if count > 1]:
                raise InputError(f"{kind} '{repeated[0]}' is given twice")
        if POOLED in self.strata:
            raise InputError(f"a stratum cannot be named '{POOLED}': rows that pool the strata carry that name")

    @cached_property
    def stratum_names(self) -> tuple[str, ...]:
        """Strata in sorted order, without ``pooled``."""
        return tuple(str(name) for name in np.unique(self.strata))

    @property
    def canonical_order(self) -> NDArray[np.intp]:
        """The indices that sort documents by (stratum, cluster, document), int [D].

        Results of documents in this order do not depend on the order in which the documents were given.
        """
        return np.lexsort((self.documents, self.clusters, self.strata))


@dataclass(frozen=True, eq=False)
class DocumentMoments(MeasuredDocuments):
    """Replicate means of every moment, by document and action.

    Shapes, with D documents, A actions, horizon H, cohort bound T: ``scalars`` maps every name of SCALAR_MOMENTS to
    float64 [D, A], and in moments of documents with answers every name of ANSWER_MOMENTS too; ``positions`` every name
    of POSITION_MOMENTS to [D, A, H], or is empty; ``lags`` every name of LAG_MOMENTS to [D, A, T], or is empty;
    ``bins`` every name of BIN_MOMENTS to [D, A, KL_BINS], or is empty. Units are those of ``kvdrift.schema.moments``.

    NaN has two meanings, and no third: an action lacks a document (then all its moments are NaN there), or a moment is
    null over an empty window (then it is NaN for all documents of the action).
    """

    windows: Windows
    scalars: Mapping[str, Float]
    positions: Mapping[str, Float]
    lags: Mapping[str, Float]
    bins: Mapping[str, Float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = (len(self.documents), len(self.actions))
        for field, declared, tail in (
            ("scalars", declared_scalars(self.scalars), ()),
            ("positions", POSITION_MOMENTS, (self.windows.horizon,)),
            ("lags", LAG_MOMENTS, (self.windows.cohort_bound,)),
            ("bins", BIN_MOMENTS, (KL_BINS,)),
        ):
            arrays: Mapping[str, Any] = getattr(self, field)
            values = standardize(field, arrays, declared, (*shape, *tail), optional=bool(tail))
            object.__setattr__(self, field, values)
        for name, value in (*self.scalars.items(), *self.positions.items(), *self.lags.items(), *self.bins.items()):
            _check_missing(name, value, self)

    @property
    def profiles(self) -> dict[str, Float]:
        """The moments over positions, lags and bins, by name."""
        return {**self.positions, **self.lags, **self.bins}

    @cached_property
    def present(self) -> NDArray[np.bool_]:
        """The documents that each action has, bool [D, A]."""
        return ~np.isnan(self.scalars["diverged"])

    def in_canonical_order(self) -> DocumentMoments:
        """Return the same moments with their documents in ``canonical_order``; this object if it is in that order."""
        order = self.canonical_order
        return self if np.array_equal(order, np.arange(len(order))) else self._taken(order)

    def of_documents(self, names: Collection[str]) -> DocumentMoments:
        """Return the moments of the named documents."""
        return self._taken(np.isin(self.documents, list(names)))

    def of_actions(self, names: Collection[str]) -> DocumentMoments:
        """Return the moments of the named actions; all documents are kept, so that bootstrap draws stay the same."""
        chosen = [place for place, action in enumerate(self.actions) if action in names]
        return self if len(chosen) == len(self.actions) else self._taken(slice(None), chosen)

    def _taken(self, documents: Any, actions: list[int] | None = None) -> DocumentMoments:
        """Return the moments at indices of documents and, if given, of actions."""
        chosen: Any = slice(None) if actions is None else actions
        action_names = self.actions if actions is None else tuple(self.actions[place] for place in actions)
        moments = (
            {name: value[documents][:, chosen] for name, value in part.items()}
            for part in (self.scalars, self.positions, self.lags, self.bins)
        )
        names, strata, clusters = (part[documents] for part in (self.documents, self.strata, self.clusters))
        return DocumentMoments(names, strata, clusters, action_names, self.windows, *moments)


@dataclass(frozen=True, eq=False)
class ReplicateMoments(MeasuredDocuments):
    """Scalar moments of every replicate of development documents, the input of an allocation.

    ``scalars`` maps every name of SCALAR_MOMENTS to float64 [D, A, K], and in moments of documents with answers every
    name of ANSWER_MOMENTS too; NaN marks a replicate that an action lacks, or a moment that is null over an empty
    window. Replicate k is the same k for every action, since actions share the reference's uniforms.
    """

    windows: Windows
    scalars: Mapping[str, Float]

    def __post_init__(self) -> None:
        super().__post_init__()
        first = np.asarray(self.scalars.get("diverged", np.empty(0)))
        replicates = first.shape[2] if first.ndim == 3 else 0
        shape = (len(self.documents), len(self.actions), replicates)
        object.__setattr__(self, "scalars", standardize("scalars", self.scalars, declared_scalars(self.scalars), shape))

    @cached_property
    def present(self) -> NDArray[np.bool_]:
        """The replicates that each document and action has, bool [D, A, K]."""
        return ~np.isnan(self.scalars["diverged"])

    def document_means(self) -> DocumentMoments:
        """Return means over each document's replicates, without profiles."""
        count = self.present.sum(axis=2)
        means = {}
        for name, value in self.scalars.items():
            total = np.where(self.present, value, 0.0).sum(axis=2)
            means[name] = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
        return DocumentMoments(self.documents, self.strata, self.clusters, self.actions, self.windows, means, {}, {})


def declared_scalars(moments: Mapping[str, Any]) -> Collection[str]:
    """Return the names of the scalar moments that must be given.

    The moments of answers are among them only if ``moments`` has any of these.
    """
    return (*SCALAR_MOMENTS, *(ANSWER_MOMENTS if ANSWER_MOMENTS.keys() & moments.keys() else ()))


def standardize(
    field: str, arrays: Mapping[str, Any], declared: Collection[str], shape: tuple[int, ...], *, optional: bool = False
) -> dict[str, Float]:
    """Return the array of every declared name as float64 of one shape; {} if ``optional`` and all are missing.

    Error messages name the ``field`` that the arrays belong to.
    """
    if optional and not arrays:
        return {}
    if unlike := sorted(arrays.keys() ^ set(declared)):
        raise InputError(f"{field}: the moment '{unlike[0]}' is {'unknown' if unlike[0] in arrays else 'missing'}")
    values = {name: np.asarray(arrays[name], dtype=np.float64) for name in declared}
    for name, value in values.items():
        if value.shape != shape or np.isinf(value).any():
            raise InputError(f"{field}: '{name}' has shape {value.shape}, must be finite numbers of shape {shape}")
    return values


def _check_missing(name: str, value: Float, moments: DocumentMoments) -> None:
    if not value.size:
        return
    missing = np.isnan(value.reshape(*moments.present.shape, -1))
    null = missing.all(axis=(0, 2))
    wrong = (missing == moments.present[:, :, None]).any(axis=2) & ~null
    if wrong.any():
        document, action = np.argwhere(wrong)[0]
        raise InputError(
            f"moment '{name}' of document '{moments.documents[document]}' under '{moments.actions[action]}' and "
            "'diverged' are not null together; give all moments or none"
        )
