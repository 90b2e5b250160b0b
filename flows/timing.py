"""How long a study's generation will take: one document of each stratum generated here for a moment, nothing stored.

A document costs its prefill, and decoding, which grows with its replicates. Both are measured on the study's device by
generating for real, as many positions as the budget leaves room for, and scaled to the documents and replicates that
the study may have. What does not fit into the budget is scaled from shorter prompts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flows.generation import study_model
from flows.material import Outline, replicates_of
from generator.actions import Action
from generator.documents.draws import DocumentDraws
from generator.documents.registry import stratum_documents
from generator.generation import PendingUnit, generate_units
from generator.model import Model
from generator.transformer.model import LoadedModel
from generator.transformer.tokenizer import load_tokenizer
from schema.document import Document
from schema.errors import InputError, OperationError
from schema.study import DocumentsSection, Study
from schema.tables import PLAIN, SWRB

BUDGET_SECONDS = 60.0  # of measuring, about
_PROBE_TOKENS, _PROBE_REPLICATES, _PROBE_POSITIONS = 64, 2, 4
_COMMIT = 0.05  # seconds that a document's units take to enter a local store
_DOCUMENTS_DIFFER = (0.8, 1.3)  # of a stratum's mean document, against the one that was measured
_POSITIONS_DIFFER = (0.5, 2.0)  # of later positions, against measured ones: sides end, and pairs part


@dataclass(frozen=True)
class Extent:
    """How much of a split is generated: the fewest and the most replicates, and documents of each stratum."""

    replicates: tuple[int, int]
    documents: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Seconds:
    """From ``low`` to ``high`` seconds."""

    low: float
    high: float

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.low + other.low, self.high + other.high)

    def times(self, low: float, high: float | None = None) -> Seconds:
        """From ``low`` to ``high`` times as many."""
        return Seconds(self.low * low, self.high * (low if high is None else high))


@dataclass(frozen=True)
class DocumentTime:
    """What a document of ``tokens`` prompt tokens takes, decoding by replicates; ``positions`` 0 if it was scaled."""

    tokens: int
    prefill: Seconds
    decode: dict[int, Seconds]
    positions: int

    def scaled(self, tokens: int) -> DocumentTime:
        """Of a longer prompt: prefill grows at most with its square, a step of decoding at most with its length."""
        ratio = tokens / self.tokens
        decode = {count: seconds.times(1, ratio) for count, seconds in self.decode.items()}
        return DocumentTime(tokens, self.prefill.times(ratio, ratio**2), decode, 0)


@dataclass(frozen=True)
class StudyTime:
    """Seconds of each split's generation, and what they were found from."""

    splits: dict[str, Seconds]
    strata: dict[str, DocumentTime]
    device: str
    measuring: float


def study_time(outline: Outline, extents: dict[str, Extent], budget: float = BUDGET_SECONDS) -> StudyTime:
    """Load the study's model and measure for ``budget`` seconds.

    InputError where the model cannot be loaded here, OperationError where a prompt would take more than the budget.
    """
    study = outline.study
    model = study_model(study.model)
    began = time.perf_counter()
    counts = sorted({count for extent in extents.values() for count in extent.replicates})
    measuring = _Measuring(model, study, outline.actions, counts)
    strata: dict[str, DocumentTime] = {}
    previous = None
    sections = sorted(study.documents, key=lambda section: section.length)
    for number, section in enumerate(sections):
        document = _first_document(section, study, model)
        previous = previous or measuring.probe(document, budget)
        share = (budget - (time.perf_counter() - began)) / (len(sections) - number)
        strata[section.stratum_name] = previous = measuring.document(document, share, previous)
    splits = {split: _split_seconds(extent, strata) for split, extent in extents.items()}
    return StudyTime(splits, strata, model.device, time.perf_counter() - began)


def _split_seconds(extent: Extent, strata: dict[str, DocumentTime]) -> Seconds:
    least, most = extent.replicates
    total = Seconds(0, 0)
    for stratum, documents in extent.documents.items():
        decode = strata[stratum].decode
        one = strata[stratum].prefill + Seconds(decode[least].low + _COMMIT, decode[most].high + _COMMIT)
        total += one.times(*documents).times(*_DOCUMENTS_DIFFER)
    return total


class _Measuring:
    """Generates documents to see what it takes; ``counts`` are the numbers of replicates that are asked about."""

    def __init__(self, model: Model, study: Study, actions: Sequence[Action], counts: Sequence[int]) -> None:
        self._model, self._study, self._actions, self._counts = model, study, actions, counts
        self._horizon = study.study.horizon

    def probe(self, document: Document, budget: float) -> DocumentTime:
        """The prefill of a prompt's first tokens, which also brings the device to speed."""
        short = replace(document, tokens=document.tokens[:_PROBE_TOKENS])
        control = [PendingUnit(action, 0, 1) for action in self._actions if action.control]
        for _ in range(2):
            began = time.perf_counter()
            generate_units(self._model, self._study.name, short, control, 1, 0)
            seconds = time.perf_counter() - began
        expected = seconds * document.prompt_tokens / short.prompt_tokens
        if expected > budget / 2:
            raise OperationError(
                f"the prefill of {document.prompt_tokens:,} prompt tokens alone takes some {expected:.0f} s"
            )
        return DocumentTime(short.prompt_tokens, Seconds(seconds, seconds), {}, 0)

    def document(self, document: Document, budget: float, previous: DocumentTime) -> DocumentTime:
        """Time of one document, from as many positions as the budget has room for; else scaled from ``previous``."""
        began = time.perf_counter()
        if previous.decode and 2 * previous.scaled(document.prompt_tokens).prefill.low > budget:
            return previous.scaled(document.prompt_tokens)
        few, most = _PROBE_REPLICATES, max(self._counts)
        positions = min(self._horizon, _PROBE_POSITIONS)
        prefill, decode = self._generate(document, few, positions)
        points, step = {few: decode}, decode.high / max(positions - 1, 1) * most / few
        while positions < self._horizon or most not in points:
            room = budget - (time.perf_counter() - began) - prefill
            reach = min(self._horizon, 1 + int(room / step))
            if reach < min(2 * positions, self._horizon):
                break  # not worth another prefill
            prefill, decode = self._generate(document, most, reach)
            positions, points, step = reach, {most: decode}, decode.high / max(reach - 1, 1)
        least, room = min(self._counts), budget - (time.perf_counter() - began)
        if least < most and most in points and room > prefill + points[most].high:
            points[least] = self._generate(document, least, positions)[1]
        left = (self._horizon - positions) / max(positions - 1, 1)  # positions to come for each that was measured
        low, high = (1 + left * factor for factor in _POSITIONS_DIFFER)
        spent = {count: _interpolate(points, count).times(low, high) for count in self._counts}
        return DocumentTime(document.prompt_tokens, Seconds(prefill, prefill), spent, positions)

    def _generate(self, document: Document, replicates: int, positions: int) -> tuple[float, Seconds]:
        """Seconds of prefill and of decoding; with a hybrid estimator it may be that no action is branched."""
        pending = [PendingUnit(action, 0, replicates_of(action, replicates)) for action in self._actions]
        estimator = self._study.plan.estimator
        if estimator != PLAIN:
            pending += [replace(item, estimator=SWRB) for item in pending if not item.action.control]
        began = time.perf_counter()
        units = generate_units(self._model, self._study.name, document, pending, positions, self._study.study.seed)
        prefill = sum(unit.record["prefill_seconds"] for unit in units)
        decode = time.perf_counter() - began - prefill
        branched = sum(unit.record["decode_seconds"] for unit in units if unit.record["estimator"] == SWRB)
        return prefill, Seconds(decode - branched if estimator == "hybrid" else decode, decode)


def _interpolate(points: dict[int, Seconds], count: int) -> Seconds:
    """Seconds of ``count`` replicates, from those of one or two others: a fixed part, and one that grows with them."""
    (one, first), (other, second) = min(points.items()), max(points.items())
    if one == other:
        ratio = count / one
        return first.times(min(ratio, 1), max(ratio, 1))
    share = (count - one) / (other - one)
    return Seconds(first.low + share * (second.low - first.low), first.high + share * (second.high - first.high))


def _first_document(section: DocumentsSection, study: Study, model: LoadedModel) -> Document:
    """The stratum's first document; where it cannot be made here, a prompt of the nominal length in its place."""
    first = section.model_copy(update={"development": 1, "evaluation": 0})
    try:
        made = stratum_documents(
            first, study.study.seed, lambda: load_tokenizer(study.model.id, revision=study.model.revision)
        )
    except InputError:  # its files or the tokenizer are not on this machine
        draws = DocumentDraws("kvdrift/generation time", section.stratum_name, study.study.seed)
        length = min(section.length, model.positions - study.study.horizon)
        tokens = tuple(draws.below(model.network.config.vocab_size) for _ in range(length))
        return Document(section.stratum_name, section.stratum_name, section.stratum_name, "", section.source, tokens)
    return made["development"][0]
