"""Forecast of a study's time: some documents are generated and timed for about a minute, and nothing is stored.

A document costs its prefill, and steps whose cost grows with its pairs and its prompt. Both are measured on the study's
device by generating for real: documents of several lengths, as far as a budget goes. If a document is too much for the
budget, only the beginning of its prompt is read, or only its first positions are decoded. The time of every other
document is calculated from its numbers of prompt tokens and pairs.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvdrift.flows.material import Material, check_retentions
from kvdrift.flows.run.study_run import SplitForecast
from kvdrift.generator.engines.model import EngineModel
from kvdrift.generator.engines.registry import engine_model
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.schema.document import Document
from kvdrift.schema.errors import InputError
from kvdrift.schema.keyed_random import keyed_generator
from kvdrift.schema.tables import SWRB

if TYPE_CHECKING:
    from kvdrift.generator.transformer.loading import LoadedModel

BUDGET_SECONDS = 75.0  # approximate time that loading and measuring may take
_PROBE_TOKENS, _PROBE_POSITIONS = 64, 4
_WARM = 0.1  # a first prefill is repeated, to be timed without preparations, unless it took this share of the budget
_COMMIT = 0.05  # seconds that a document's units take to enter a local store
_PLACES = (0.5, 1.0, 0.0)  # places of measured documents among a stratum's documents, ordered by length
_SIDE_BY_SIDE = 0.25  # least time of a document if two threads decode several together, relative to its time alone
_ALIKE = 1.2  # lengths within this ratio cannot show how a cost depends on the length

_Pending = Sequence[PendingUnit]


@dataclass(frozen=True)
class Seconds:
    """A range of seconds, from ``low`` to ``high``."""

    low: float
    high: float

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.low + other.low, self.high + other.high)

    def times(self, low: float, high: float) -> Seconds:
        """Return the range with its ends multiplied by ``low`` and ``high``."""
        return Seconds(self.low * low, self.high * high)


@dataclass(frozen=True)
class Sample:
    """What it cost to generate a document, or the beginning of a document."""

    tokens: int  # prompt tokens
    pairs: int  # pairs of all actions
    positions: int  # decoded positions; the first costs no step
    prefill: float  # seconds
    decode: float  # seconds of all steps
    branched: float  # part of ``decode``: seconds of residual branching
    trials: float  # other seconds: trials and preparations, which are needed once for each size

    @property
    def steps(self) -> int:
        """The number of steps."""
        return max(self.positions - 1, 1)


@dataclass(frozen=True)
class StudyTime:
    """The time of a study, and the measurements behind it.

    Attributes:
        splits: Seconds of each split's generation, from the least to the greatest size that a plan may choose.
        device: The device of the model.
        once: Seconds of work that is done once: loading the model, trials and preparations.
        measuring: Seconds that measuring took.
        samples: The generated documents or parts of documents.
        prompt_rate: Prompt tokens a second, in the longest prompt read.
    """

    splits: dict[str, Seconds]
    device: str
    once: float
    measuring: float
    samples: Sequence[Sample]
    prompt_rate: float


def study_time(
    material: Material, splits: Sequence[SplitForecast], doing: Callable[[str], None], budget: float = BUDGET_SECONDS
) -> StudyTime:
    """Load the study's model, and measure some of the splits' documents within about ``budget`` seconds.

    ``doing`` receives a line before each step.

    Raises:
        InputError: the model cannot be loaded here.
    """
    began, study = time.perf_counter(), material.study
    doing(f"loading {study.model.id}")
    model = replace(_load(material, doing), sampling=study.sampling)
    loading = time.perf_counter() - began
    trial = _Trial(model, material, began + budget, doing)
    trial.measure([item for split in splits for item in split.work])
    least = _SIDE_BY_SIDE if model.pairs_at_once else 1.0
    seconds = {split.split: trial.split_seconds(split).times(least, 1.0) for split in splits if split.work}
    trials = sum(sample.trials for sample in trial.samples)
    measuring = time.perf_counter() - began - loading
    return StudyTime(seconds, model.device, loading + trials, measuring, trial.samples, trial.prompt_rate)


class _Trial:
    """Measures some documents until the clock shows ``until``, and estimates the seconds of all others from these."""

    def __init__(
        self, model: LoadedModel | EngineModel, material: Material, until: float,
        doing: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._model, self._material, self._until, self._doing = model, material, until, doing
        self._horizon = material.study.study.horizon
        self._probe = Sample(1, 1, 1, 0.0, 0.0, 0.0, 0.0)
        self.samples: list[Sample] = []  # all with equally many pairs
        # The sample with one replicate of each action; None if the model is too slow for it.
        self._fewest_pairs: Sample | None = None

    def measure(self, work: Sequence[tuple[Document, _Pending]]) -> None:
        """Measure the beginning of one document, then whole documents of each stratum, as far as there is time."""
        ordered = sorted(work, key=lambda item: item[0].prompt_tokens)
        first, pending = max(ordered, key=lambda item: (_pairs(item[1]), -item[0].prompt_tokens))
        self._read_a_little(first, pending)
        least = self._beginning(first, self._left / 6) or self._least(first)
        if self._prefill(least.prompt_tokens) > self._left / 2:
            return
        row = self._probe.prefill / self._probe.tokens  # a step has more rows than pairs, and costs less than prefill
        affordable = self._left / 2 / max(2 * row * _pairs(_at_most(pending, 1)) * (_PROBE_POSITIONS - 1), 1e-9)
        pending = _at_most(pending, max(int(affordable), 1))
        self.samples.append(self._sample(least, pending, _PROBE_POSITIONS))
        if self._prefill(least.prompt_tokens) <= self._left / 4:
            self._fewest_pairs = self._sample(least, _at_most(pending, 1), _PROBE_POSITIONS)
        by_stratum = defaultdict[str, list[Document]](list)
        for document, _ in ordered:
            by_stratum[document.stratum].append(document)
        seen = set[str]()
        for place in _PLACES:
            chosen = [documents[round(place * (len(documents) - 1))] for documents in by_stratum.values()]
            for number, document in enumerate(chosen):
                if document.doc not in seen:
                    seen.add(document.doc)
                    self._measure_one(
                        document, pending, self._left / (len(chosen) - number), needed=place == _PLACES[0]
                    )

    def split_seconds(self, split: SplitForecast) -> Seconds:
        """Return the seconds of a split, for the least and the greatest size that it may have."""
        count = Counter(document.stratum for document, _ in split.work)
        fewer = split.replicates[0] / split.replicates[1]
        total = Seconds(0.0, 0.0)
        for document, pending in split.work:
            fewest = min(split.documents[document.stratum][0] / count[document.stratum], 1.0) if split.bounded else 1.0
            least = fewest * self._seconds(document, fewer * _pairs(pending), branched=False)
            total += Seconds(least, self._seconds(document, _pairs(pending)))
        return total

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens a second, in the longest prompt read."""
        longest = max([self._probe, *self.samples], key=lambda sample: sample.tokens)
        return longest.tokens / max(longest.prefill, 1e-9)

    @property
    def _left(self) -> float:
        return max(self._until - time.perf_counter(), 0.0)

    def _seconds(self, document: Document, pairs: float, *, branched: bool = True) -> float:
        """Return the seconds of a document; ``branched`` includes the residual branching of a hybrid study."""
        decode = (self._horizon - 1) * self._step(document.prompt_tokens, pairs)
        if not branched and self._material.study.plan.estimator == "hybrid" and self.samples:
            whole = sum(sample.decode for sample in self.samples)
            decode *= 1 - sum(sample.branched for sample in self.samples) / max(whole, 1e-9)
        return self._prefill(document.prompt_tokens) + decode + _COMMIT

    def _prefill(self, tokens: int) -> float:
        """Return the seconds of a prompt: a token costs more, the more tokens are before it."""
        known = self.samples
        if len({sample.tokens for sample in known}) < 2:
            known = [self._probe, *known]
        fixed, growing = _line([(sample.tokens, sample.prefill / sample.tokens, 1.0) for sample in known])
        return tokens * (fixed + growing * tokens)

    def _step(self, tokens: int, pairs: float) -> float:
        """Return the seconds of a step of some pairs after a prompt of some tokens."""
        if not self.samples:  # no step was measured: a pair's step takes about as long as two tokens of a prompt
            return 2 * pairs * self._probe.prefill / self._probe.tokens
        points = [(sample.tokens, sample.decode / sample.steps, float(sample.steps)) for sample in self.samples]
        fixed, growing = _line(points)
        return (fixed + growing * tokens) * self._relative(pairs)

    def _relative(self, pairs: float) -> float:
        """Return the cost of a step of ``pairs`` pairs, as a multiple of the cost of a step in the samples.

        All samples have equally many pairs. Only a part of the cost grows with the number of pairs.
        """
        most, smallest = self.samples[0].pairs, self._fewest_pairs
        if smallest is None or smallest.pairs == most:
            return max(pairs / most, 1.0)
        saved = 1 - (smallest.decode / smallest.steps) / max(self.samples[0].decode / self.samples[0].steps, 1e-9)
        of_pair = min(max(saved / (most - smallest.pairs), 0.0), 1 / most)
        return 1 + of_pair * (pairs - most)

    def _read_a_little(self, document: Document, pending: _Pending) -> None:
        """Time the prefill of the fewest tokens of which all actions can keep entries."""
        short, before = self._least(document), self._left
        for _ in range(2):
            self._probe = self._sample(short, _at_most(pending, 1), 1)
            if before - self._left > _WARM * before:
                break

    def _measure_one(self, document: Document, pending: _Pending, seconds: float, *, needed: bool) -> None:
        """Measure a whole document if ``seconds`` suffice; else, if ``needed``, as much of it as they suffice for."""
        step = max(self._step(document.prompt_tokens, _pairs(pending)), 1e-9)
        if self._prefill(document.prompt_tokens) + step * (self._horizon - 1) <= seconds:
            self.samples.append(self._sample(document, pending, self._horizon))
        elif needed and (part := self._beginning(document, seconds / 2)) is not None:
            room = seconds - self._prefill(part.prompt_tokens)
            self.samples.append(self._sample(part, pending, max(1 + int(room / step), 2)))

    def _beginning(self, document: Document, seconds: float) -> Document | None:
        """Return as much of a document as can be read in ``seconds``; None if that is too little for the actions."""
        if self._prefill(document.prompt_tokens) <= seconds:
            return document
        least = self._least(document)
        tokens = int(seconds * self.prompt_rate)
        if self._prefill(tokens) > seconds:
            tokens = int(tokens * seconds / self._prefill(tokens))
        return replace(document, tokens=document.tokens[:tokens]) if tokens >= least.prompt_tokens else None

    def _least(self, document: Document) -> Document:
        """Return the beginning of a document with the fewest tokens of which all actions can keep entries."""
        tokens = _PROBE_TOKENS
        while tokens < document.prompt_tokens:
            try:
                check_retentions(self._material.actions, tokens, "")
            except InputError:
                tokens *= 2
            else:
                return replace(document, tokens=document.tokens[:tokens])
        return document

    def _sample(self, document: Document, pending: _Pending, positions: int) -> Sample:
        """Generate the first ``positions`` positions after a document's prompt, and return what they cost."""
        study, positions = self._material.study, min(positions, self._horizon)
        self._doing(
            f"measuring: {document.prompt_tokens:,} prompt tokens of document '{document.doc}', "
            f"{_pairs(pending)} pairs, {positions} position{'s' if positions > 1 else ''}"
        )
        if document.stratum in self._material.nominal and not isinstance(self._model, EngineModel):
            most = self._model.positions - self._horizon
            document = _with_random_tokens(document, most, self._model.shape.vocabulary, study.study.seed)
        began = time.perf_counter()
        units = generate_units(self._model, study.name, document, pending, positions, study.study.seed)
        seconds = time.perf_counter() - began
        prefill, decode = (sum(unit.record[f"{part}_seconds"] for unit in units) for part in ("prefill", "decode"))
        branched = sum(unit.record["decode_seconds"] for unit in units if unit.record["estimator"] == SWRB)
        trials = max(seconds - prefill - decode, 0.0)
        return Sample(document.prompt_tokens, _pairs(pending), positions, prefill, decode, branched, trials)


def _load(material: Material, say: Callable[[str], None]) -> LoadedModel | EngineModel:
    from kvdrift.generator.transformer.other_weights.model import load_transformer

    study = material.study
    if study.model.engine is None:
        return load_transformer(study, say)
    engine = engine_model(study)
    engine.load(say)
    return engine


def _pairs(pending: Iterable[PendingUnit]) -> int:
    return sum(unit.count for unit in pending)


def _at_most(pending: _Pending, replicates: int) -> _Pending:
    return [replace(unit, count=min(unit.count, replicates)) for unit in pending]


def _line(points: Sequence[tuple[int, float, float]]) -> tuple[float, float]:
    """Fit a straight line to points (tokens, rate, weight); return the rate at 0 tokens, and its growth for each token.

    Neither is negative, since rates that seem to fall with the number of tokens are noise.
    """
    tokens, rates, weights = np.array(points).T
    mean = float(np.average(rates, weights=weights))
    if tokens.max() < _ALIKE * tokens.min():
        return mean, 0.0
    growing, fixed = np.polyfit(tokens, rates, 1, w=np.sqrt(weights))
    if growing <= 0:
        return mean, 0.0
    if fixed < 0:
        return 0.0, float((weights * tokens * rates).sum() / (weights * tokens**2).sum())
    return float(fixed), float(growing)


def _with_random_tokens(document: Document, most: int, vocabulary: int, seed: int) -> Document:
    """Replace the tokens of a document, whose prompt cannot be made here, by at most ``most`` random tokens."""
    length = min(document.prompt_tokens, most)
    uniforms = keyed_generator(f"generation time {document.doc} {seed}").random(length)
    return replace(document, tokens=tuple((uniforms * vocabulary).astype(int).tolist()))
