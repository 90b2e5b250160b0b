"""Forecast of a study's generation time: one document of each stratum is generated for a moment, nothing is stored.

A document costs its prefill, and decoding, which grows with its replicates and positions. Both are measured on the
study's device by generating for real, as many positions as the budget leaves room for, and scaled to the documents and
replicates that the study may have.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flows.material import Material
from flows.plan.left import wanted_units
from generator.actions import Action
from generator.engines.model import EngineModel
from generator.generation import PendingUnit, generate_units
from generator.generation.engine_models import engine_model
from generator.generation.model import Model
from schema.document import Document
from schema.errors import OperationError
from schema.keyed_random import keyed_generator
from schema.tables import PLAIN, SWRB

if TYPE_CHECKING:
    from generator.transformer.model import LoadedModel
    from generator.transformer.other_weights.model import ModelWithOthers

BUDGET_SECONDS = 60.0  # approximate time that measuring may take
_PROBE_TOKENS, _PROBE_POSITIONS = 64, 4
_COMMIT = 0.05  # seconds that a document's units take to enter a local store
_DOCUMENTS_DIFFER = (0.8, 1.3)  # range of a stratum's mean document relative to the measured document
_POSITIONS_DIFFER = (0.5, 2.0)  # range of later positions relative to measured ones: sides end, and pairs diverge
_SIDE_BY_SIDE = 0.25  # least share of a document's time alone if several are decoded together in two threads


@dataclass(frozen=True)
class Extent:
    """The amount of a split to generate: least and most replicates, and least and most documents of each stratum."""

    replicates: tuple[int, int]
    documents: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class _Timed:
    """The documents and actions that are timed."""

    material: Material
    actions: list[Action]


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
class DocumentTime:
    """Seconds of one document: prefill, and decoding of ``replicates`` replicates, timed on ``positions`` positions."""

    prefill: float
    decode: Seconds
    replicates: int
    positions: int

    def of_replicates(self, least: int) -> Seconds:
        """Return the seconds of ``least`` to ``replicates`` replicates; a step of fewer costs at least their share."""
        decode = self.decode.times(least / self.replicates, 1)
        return Seconds(self.prefill + _COMMIT, self.prefill + _COMMIT) + decode


@dataclass(frozen=True)
class StudyTime:
    """Seconds of each split's generation, and the measurements behind them."""

    splits: dict[str, Seconds]
    strata: dict[str, DocumentTime]
    device: str
    measuring: float


def study_time(
    material: Material, extents: dict[str, Extent], actions: Collection[str], budget: float = BUDGET_SECONDS
) -> StudyTime:
    """Load the study's model and measure one document of each stratum, within about ``budget`` seconds.

    Raises:
        InputError: the model cannot be loaded here.
        OperationError: the prefill of a prompt alone would take more than its share of the budget.
    """
    from generator.transformer.other_weights.model import load_transformer

    engine = material.study.model.engine is not None
    loaded = engine_model(material.study) if engine else load_transformer(material.study)
    model = replace(loaded, law=material.study.law)
    timed = _Timed(material, [action for action in material.actions if action.name in actions])
    began = time.perf_counter()
    most = max(extent.replicates[1] for extent in extents.values())
    wanted = {stratum for extent in extents.values() for stratum in extent.documents}
    sections = [section for section in material.study.documents if section.stratum_name in wanted]
    strata: dict[str, DocumentTime] = {}
    per_token = 0.0
    for number, section in enumerate(sorted(sections, key=lambda section: section.length)):
        document = _first_document(section.stratum_name, material, model)
        per_token = per_token or _prefill_per_token(model, timed, document)
        share = (budget - (time.perf_counter() - began)) / (len(sections) - number)
        expected = per_token * document.prompt_tokens
        if expected > share:
            raise OperationError(
                f"the prefill of {document.prompt_tokens:,} prompt tokens alone takes some {expected:.0f} s"
            )
        strata[section.stratum_name] = _document_time(model, timed, document, most, share)
    least = _SIDE_BY_SIDE if model.pairs_at_once else 1.0
    equal = material.study.law.greedy
    splits = {split: _split_seconds(extent, strata, equal=equal).times(least, 1) for split, extent in extents.items()}
    return StudyTime(splits, strata, model.device, time.perf_counter() - began)


def _split_seconds(extent: Extent, strata: dict[str, DocumentTime], *, equal: bool) -> Seconds:
    """Return the seconds of a split; equal replicates are decoded once, so fewer distinct ones take as long."""
    total = Seconds(0, 0)
    for stratum, documents in extent.documents.items():
        time_of = strata[stratum]
        least = time_of.replicates if equal else extent.replicates[0]
        total += time_of.of_replicates(least).times(*documents).times(*_DOCUMENTS_DIFFER)
    return total


def _prefill_per_token(model: Model, timed: _Timed, document: Document) -> float:
    """Measure the prefill seconds for each token on the first tokens of a prompt; of two runs the second counts."""
    short = replace(document, tokens=document.tokens[:_PROBE_TOKENS])
    control = [PendingUnit(action, 0, 1) for action in timed.material.actions if action.control]
    for _ in range(2):
        began = time.perf_counter()
        generate_units(model, timed.material.study.name, short, control, 1, 0)
        seconds = time.perf_counter() - began
    return seconds / short.prompt_tokens


def _document_time(model: Model, timed: _Timed, document: Document, replicates: int, budget: float) -> DocumentTime:
    """Time a document: a few positions first, then as many as the budget allows."""
    began, horizon = time.perf_counter(), timed.material.study.study.horizon
    positions = min(horizon, _PROBE_POSITIONS)
    prefill, decode = _generate(model, timed, document, replicates, positions)
    room = budget - (time.perf_counter() - began) - prefill
    reach = min(horizon, 1 + int(room * max(positions - 1, 1) / max(decode.high, 1e-9)))
    if reach > positions:
        positions = reach
        prefill, decode = _generate(model, timed, document, replicates, positions)
    left = (horizon - positions) / max(positions - 1, 1)  # how many positions each measured position stands for
    return DocumentTime(
        prefill, decode.times(*(1 + left * factor for factor in _POSITIONS_DIFFER)), replicates, positions
    )


def _generate(
    model: Model, timed: _Timed, document: Document, replicates: int, positions: int
) -> tuple[float, Seconds]:
    """Return the seconds of prefill and of decoding; the hybrid estimator may branch no action."""
    study = timed.material.study
    actions = {action.name: action for action in timed.actions}
    branched = [] if study.plan.estimator == PLAIN else [name for name, action in actions.items() if not action.control]
    wanted = wanted_units({name: action.control for name, action in actions.items()}, replicates, branched)
    pending = [PendingUnit(actions[one.action], 0, one.replicates, one.estimator) for one in wanted]
    began = time.perf_counter()
    units = generate_units(model, study.name, document, pending, positions, study.study.seed)
    prefill = sum(unit.record["prefill_seconds"] for unit in units)
    decode = time.perf_counter() - began - prefill
    branched = sum(unit.record["decode_seconds"] for unit in units if unit.record["estimator"] == SWRB)
    return prefill, Seconds(decode - branched if study.plan.estimator == "hybrid" else decode, decode)


def _first_document(stratum: str, material: Material, model: LoadedModel | ModelWithOthers | EngineModel) -> Document:
    """Return the stratum's first document, with random tokens if its prompt cannot be made here."""
    document = material.documents["development"][stratum][0]
    if stratum not in material.nominal or isinstance(model, EngineModel):
        return document
    length = min(document.prompt_tokens, model.positions - material.study.study.horizon)
    uniforms = keyed_generator(f"generation time {stratum} {material.study.study.seed}").random(length)
    return replace(document, tokens=tuple((uniforms * model.shape.vocabulary).astype(int).tolist()))
