"""Calibration: how well an early or a fixed-history observation predicts a contrast of R.

From an observation of every document under both actions a predictor gives each action's R, and thereby the document's
contrast. Candidates are fitted on development documents, six-fold cross-validation there selects one, and evaluation
documents judge all of them: the paper's section "Aggregate prediction and temporal resolution".

Choices that are made here:

- Documents are those that both actions have, in development as in evaluation.
- Every mean over documents (of the contrast, the error, the squared error or the absolute error) gives equal weight to
  the documents of a stratum, and then equal weight to the strata. The ridge itself weighs its rows equally.
- "Features centred and scaled" means that each feature has mean 0 and population standard deviation 1 over the training
  documents and both actions. Indicators, one for each stratum of the training documents and one for each action, stay 0
  and 1.
- A document of a stratum that training lacks has no stratum indicator, and its cell mean is the action's mean over the
  training strata.
- Folds are made of clusters. Clusters of the same strata are dealt to the folds in the order of the SHA-256 of their
  names. The next such group of clusters begins at the fold after the last one of the group before, so that the folds'
  numbers of clusters differ by at most one, within a group and overall. With fewer clusters than six each cluster is a
  fold; with one cluster there is no error and nothing is selected.
- Of candidates with equal errors the simplest is taken: the first in CANDIDATES.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvdrift.schema.errors import InputError, nearest
from kvdrift.stats.alike import alike_documents
from kvdrift.stats.bootstrap import resample
from kvdrift.stats.clusters import ClusterBlocks
from kvdrift.stats.ends import PERCENTILE, STUDENTIZED, document_intervals, percentile_intervals
from kvdrift.stats.moments import DocumentMoments, Float, Text
from kvdrift.stats.pooling import Pooling
from kvdrift.stats.quantities import quantity_named
from kvdrift.stats.registry import Range

FOLDS = 6
PENALTY = 10.0
MARGIN = 0.02
INTERVALS_PER_FAMILY = 4  # two models by two observations share alpha

CANDIDATES = ("stratum_action_mean", "flat", "ridge")


@dataclass(frozen=True)
class Observation:
    """An observation of a document under an action: the moments that the candidates ``ridge`` and ``flat`` read."""

    features: tuple[str, ...]
    flat: str


# Extrapolating the first positions flat, (H/W) sum_{t <= W} I_t / H, gives the mean of I_t over block 1: null if W = 0.
OBSERVATIONS: Mapping[str, Observation] = {
    "fixed_history": Observation(("fixed_history_tv",), "fixed_history_tv"),
    "positions": Observation(
        ("prefix_mismatch", "prefix_diverged", "prefix_eos_x", "prefix_eos_y"), "block_1_mismatch"
    ),
}


@dataclass(frozen=True)
class Calibration:
    """The result of one candidate on one observation: a row of the ``calibration`` table, with NaN for null."""

    observation: str
    candidate: str
    selected: bool
    cross_validated_mse: float
    documents: int
    gap: float
    predicted_gap: float
    error: float
    low: float
    high: float
    level: float
    margin: float
    decision: str | None
    mae: float
    rmse: float
    draws: int
    interval: str


class Sample(NamedTuple):
    """The D documents that both actions have, with a predictor's inputs and target: baseline first, then action."""

    strata: Text  # [D]
    clusters: Text  # [D]
    target: Float  # R, [D, 2]
    features: Float  # [D, 2, P]
    flat: Float  # [D, 2]

    def only(self, kept: NDArray[np.bool_]) -> Sample:
        """Return the documents selected by a mask, bool [D]."""
        return Sample._make(part[kept] for part in self)

    @property
    def weights(self) -> Float:
        """Return each document's weight 1 / (S n), float64 [D], with S strata and n documents in its stratum."""
        names, stratum_of, sizes = np.unique(self.strata, return_inverse=True, return_counts=True)
        weights: Float = 1 / (len(names) * sizes[stratum_of])
        return weights


def calibrate(
    development: DocumentMoments,
    evaluation: DocumentMoments,
    *,
    baseline: str,
    action: str,
    draws: int,
    seed: int,
    alpha: float = 0.05,
    margin: float = MARGIN,
    interval: str = STUDENTIZED,
) -> tuple[Calibration, ...]:
    """Judge every candidate on every observation of one contrast; return () if a split has no document of both actions.

    Predictors are fitted and selected on ``development`` and judged on ``evaluation``. The error's interval is at level
    1 - alpha / 4, from the same bootstrap draws of the evaluation documents as other estimates, by the method
    ``interval``; an interval inside +-margin means equivalence.
    """
    level = 1 - alpha / INTERVALS_PER_FAMILY
    development, evaluation = development.in_canonical_order(), evaluation.in_canonical_order()
    pair = (baseline, action)
    shared = _shared(evaluation, pair)
    if not (shared.any() and _shared(development, pair).any()):
        return ()
    scores: dict[str, dict[str, float]] = {}
    predicted: dict[tuple[str, str], Float] = {}
    for name, observation in OBSERVATIONS.items():
        known, unseen = (_sample(moments, pair, observation) for moments in (development, evaluation))
        scores[name] = {candidate: cross_validated_mse(candidate, known) for candidate in CANDIDATES}
        predicted |= {(name, candidate): _contrast(predict(candidate, known, unseen)) for candidate in CANDIDATES}
    # Documents, their weights and the target are the same for every observation.
    weights, contrast = unseen.weights, _contrast(unseen.target)
    errors = {key: contrast - value for key, value in predicted.items()}
    ends = _error_intervals(evaluation, shared, list(errors.values()), level, interval, draws=draws, seed=seed)
    return tuple(
        Calibration(
            observation=name,
            candidate=candidate,
            selected=candidate == _least(scores[name]),
            cross_validated_mse=scores[name][candidate],
            documents=len(contrast),
            gap=float(weights @ contrast),
            predicted_gap=float(weights @ predicted[name, candidate]),
            error=float(weights @ error),
            low=low,
            high=high,
            level=level,
            margin=margin,
            decision=decide(low, high, margin),
            mae=float(weights @ np.abs(error)),
            rmse=math.sqrt(weights @ error**2),
            draws=draws,
            interval=method,
        )
        for ((name, candidate), error), (low, high, method) in zip(errors.items(), ends, strict=True)
    )


def decide(low: float, high: float, margin: float) -> str | None:
    """Return "equivalent" if an interval is inside +-margin, "different" if it is outside, else "unresolved".

    Return None if an end is NaN.
    """
    if math.isnan(low) or math.isnan(high):
        return None
    if -margin <= low and high <= margin:
        return "equivalent"
    return "different" if low > margin or high < -margin else "unresolved"


def predict(candidate: str, training: Sample, documents: Sample) -> Float:
    """Predict each action's R of ``documents``, float64 [D, 2] in [0, 1], by a candidate fitted on ``training``."""
    if candidate == "stratum_action_mean":
        predicted = _cell_means(training, documents)
    elif candidate == "flat":
        predicted = documents.flat
    else:
        predicted = _ridge_predictions(training, documents)
    return np.clip(predicted, 0.0, 1.0)


def cross_validated_mse(candidate: str, sample: Sample) -> float:
    """Return the mean squared error of the predicted contrasts of held-out documents, with equal weight of strata.

    NaN if there are fewer than two clusters.
    """
    fold = folds(sample.strata, sample.clusters)
    if fold.max() == 0:
        return math.nan
    predicted = np.empty_like(sample.target)
    for held_out in range(fold.max() + 1):
        inside = fold == held_out
        predicted[inside] = predict(candidate, sample.only(~inside), sample.only(inside))
    return float(sample.weights @ (_contrast(sample.target) - _contrast(predicted)) ** 2)


def _least(scores: Mapping[str, float]) -> str | None:
    defined = {candidate: score for candidate, score in scores.items() if not math.isnan(score)}
    return min(defined, key=defined.__getitem__) if defined else None


def folds(strata: Text, clusters: Text) -> NDArray[np.intp]:
    """Return each document's fold, int [D] from 0: at most six folds.

    A cluster is in one fold; the clusters of a stratum are spread over the folds.
    """
    strata_of: dict[str, set[str]] = {}
    for stratum, cluster in zip(strata.tolist(), clusters.tolist(), strict=True):
        strata_of.setdefault(cluster, set()).add(stratum)

    def order(cluster: str) -> tuple[list[str], str]:
        return sorted(strata_of[cluster]), hashlib.sha256(cluster.encode()).hexdigest()

    fold_of = {cluster: place % FOLDS for place, cluster in enumerate(sorted(strata_of, key=order))}
    return np.array([fold_of[cluster] for cluster in clusters.tolist()], dtype=np.intp)


def ridge_coefficients(features: Float, target: Float, penalty: float = PENALTY) -> tuple[Float, float]:
    """Compute coefficients [P] and intercept that minimize |y - Xb - c|^2 + penalty |b|^2; no penalty on the intercept.

    ``features`` is float64 [N, P], ``target`` [N].
    """
    # An unpenalized intercept absorbs the means, so the rest is a ridge on centred columns.
    centre, level = features.mean(axis=0), float(target.mean())
    centred = features - centre
    gram = centred.T @ centred + penalty * np.eye(features.shape[1])
    coefficients: Float = np.linalg.solve(gram, centred.T @ (target - level))
    return coefficients, level - float(centre @ coefficients)


def _ridge_predictions(training: Sample, documents: Sample) -> Float:
    columns = training.features.reshape(-1, training.features.shape[2])
    centre, scale = columns.mean(axis=0), columns.std(axis=0)
    # A column whose spread is mere rounding has no information; dividing by that spread would turn it into noise.
    constant = scale <= 1e-12 * np.abs(columns).max(axis=0)
    scale = np.where(constant, 1.0, scale)
    names = np.unique(training.strata)

    def design(sample: Sample) -> Float:
        # One row for each document and action: scaled features [P], stratum indicators [S], action indicators [2].
        count = len(sample.strata)
        stratum = np.broadcast_to((sample.strata[:, None] == names)[:, None, :], (count, 2, len(names)))
        action = np.broadcast_to(np.eye(2), (count, 2, 2))
        scaled = np.where(constant, 0.0, (sample.features - centre) / scale)
        return np.concatenate([scaled, stratum, action], axis=2).reshape(2 * count, -1)

    coefficients, intercept = ridge_coefficients(design(training), training.target.reshape(-1))
    predicted: Float = (design(documents) @ coefficients + intercept).reshape(-1, 2)
    return predicted


def _cell_means(training: Sample, documents: Sample) -> Float:
    names = np.unique(training.strata)
    cells = np.stack([training.target[training.strata == name].mean(axis=0) for name in names])  # [S, 2]
    same = documents.strata[:, None] == names  # [D, S]
    predicted: Float = np.where(same.any(axis=1)[:, None], same @ cells, cells.mean(axis=0))
    return predicted


def _contrast(values: Float) -> Float:
    """Return the action's value less the baseline's, float64 [D], from ``values`` [D, 2], baseline first."""
    difference: Float = values[:, 1] - values[:, 0]
    return difference


def _columns(moments: DocumentMoments, pair: tuple[str, str]) -> list[int]:
    for name in pair:
        if name not in moments.actions:
            raise InputError(f"no action is named '{name}'; {nearest(name, moments.actions)}")
    return [moments.actions.index(name) for name in pair]


def _shared(moments: DocumentMoments, pair: tuple[str, str]) -> NDArray[np.bool_]:
    shared: NDArray[np.bool_] = np.all(moments.present[:, _columns(moments, pair)], axis=1)
    return shared


def _sample(moments: DocumentMoments, pair: tuple[str, str], observation: Observation) -> Sample:
    shared = _shared(moments, pair)

    def of(name: str) -> Float:
        values: Float = moments.scalars[name][shared][:, _columns(moments, pair)]
        return values

    features = np.stack([of(name) for name in observation.features], axis=-1)
    return Sample(moments.strata[shared], moments.clusters[shared], of("mismatch"), features, of(observation.flat))


def _error_intervals(
    evaluation: DocumentMoments, shared: NDArray[np.bool_], errors: Sequence[Float], level: float, interval: str, *,
    draws: int, seed: int,
) -> Iterable[tuple[float, float, str]]:  # fmt: skip
    """Compute an interval of the pooled error for each array in ``errors``: lower end, upper end, and method.

    The ends are NaN if the error is undefined. An array has the errors of the documents that ``shared`` marks, bool
    [D]. It is resampled like the mismatch of an action, over all D evaluation documents, so that draw i takes the same
    documents as draw i of every other estimate.
    """
    columns = np.full((len(shared), len(errors)), np.nan)
    columns[shared] = np.stack(errors, axis=1)
    present = np.where(shared[:, None], 0.0, np.nan) * np.ones(len(errors))
    as_moments = DocumentMoments(
        evaluation.documents, evaluation.strata, evaluation.clusters,
        tuple(str(number) for number in range(len(errors))), evaluation.windows,
        {name: columns if name == "mismatch" else present for name in evaluation.scalars}, {}, {},
    )  # fmt: skip
    studentized, levels = interval == STUDENTIZED, np.full(len(errors), level)
    name, pooled = "mismatch", (0, slice(None), 0)
    sample = resample(as_moments, [name], seed=seed, draws=draws, pairs=[], studentized=studentized)[name].of(pooled)
    if studentized:
        pooling, quantity = Pooling.of(as_moments, []), quantity_named(name)
        clusters, sets = ClusterBlocks(pooling).counts_of(quantity)
        between = Range.SECOND_DIFFERENCE.between(evaluation.windows.horizon)
        likeness = alike_documents(pooling, quantity).of(pooled)
        low, high, methods = document_intervals(sample, levels, clusters[0], sets[0], between, likeness)
    else:
        low, high = percentile_intervals(sample.draws, levels)
        methods = np.full(len(errors), PERCENTILE)
    return zip(low.tolist(), high.tolist(), methods.tolist(), strict=True)
