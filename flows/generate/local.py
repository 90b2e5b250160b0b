"""Generation on this machine: in this process, with one model in memory, or beside it in two side processes.

The side processes generate for a small model if there is much to generate, and they draw figures. Each of these tasks
keeps Python's interpreter busy about half of the time, and only one thread of a process can interpret, so a second
thread would gain little. If a side process is killed, this process does its work.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvdrift.generator.actions import Action, build_actions
from kvdrift.generator.attention.threads import torch_threads
from kvdrift.generator.engines.model import EngineModel
from kvdrift.generator.engines.registry import engine_model
from kvdrift.generator.finite.model import FiniteModel, finite_model
from kvdrift.generator.generation import (
    PendingUnit,
    Work,
    generate_documents,
    generate_together,
    together,
)
from kvdrift.generator.generation.model import Model
from kvdrift.generator.identity import ActionIdentity
from kvdrift.generator.transformer.decoder import ONE_THREAD_PARAMETERS
from kvdrift.generator.transformer.files.locations import model_location
from kvdrift.generator.transformer.files.text_ends import model_files, text_ends
from kvdrift.generator.transformer.footprint import local_footprint
from kvdrift.generator.transformer.fused.layers import slower
from kvdrift.generator.transformer.other_weights.named import identities, weights_location, with_own_weights
from kvdrift.log.store import Unit
from kvdrift.schema.document import Document
from kvdrift.schema.errors import KvdriftError, OperationError
from kvdrift.schema.own_process import OwnProcesses
from kvdrift.schema.process_memory import give_back_memory
from kvdrift.schema.progress import SILENT
from kvdrift.schema.study import FINITE_STATE, Study

if TYPE_CHECKING:
    from kvdrift.generator.transformer.loading import LoadedModel

NamedPart = list[tuple[Document, list[dict[str, Any]]]]
"""Documents, each with the fields of its pending units; field ``action`` is the action's name."""


def named(part: Work) -> NamedPart:
    """Return some work with names in place of its actions, so that it can be sent to another process."""
    return [(document, [vars(unit) | {"action": unit.action.name} for unit in units]) for document, units in part]


def with_actions(study: Study, part: NamedPart) -> Work:
    """Return work with actions in place of their names, built from the study and the modules beside its file."""
    actions = {action.name: action for action in build_actions(study)}
    return [
        (document, [PendingUnit(**unit | {"action": actions[unit["action"]]}) for unit in units])
        for document, units in part
    ]


class LocalGenerator:
    """Generation in this process, with one model in memory at a time.

    ``say`` receives lines about tests of the model, and about anything that makes generation slower or less exact.
    """

    def __init__(self, say: Callable[[str], None] = SILENT.say) -> None:
        self._say = say
        self._study: Study | None = None  # the study whose model is loaded
        self._model: LoadedModel | FiniteModel | EngineModel | None = None

    def __call__(self, study: Study, work: Work) -> Generator[list[Unit], None, None]:
        """Yield the units of each document, in any order."""
        yield from generate_documents(self.model(study), study.name, work, study.study.horizon, study.study.seed)

    def generate_part(self, study: Study, part: Work) -> list[list[Unit]]:
        """Generate a part of the work in this thread; return the units of each of its documents."""
        return generate_together(self.model(study), study.name, part, study.study.horizon, study.study.seed)

    def identify(self, study: Study, *, required: bool) -> Callable[[Action], ActionIdentity]:
        """Return a function from an action to its identity; load the model if ``required`` and files do not suffice."""
        if study.model.kind == FINITE_STATE:
            return finite_model(study).identity
        if study.model.engine is not None:
            return engine_model(study).identity
        identity = identities(study, model_files(study))
        unknown = any(
            None in (action_identity.weights_sha256, action_identity.selector_sha256)
            for action_identity in map(identity, build_actions(study))
        )
        return self.model(study).identity if required and unknown else identity

    def model(self, study: Study) -> Model:
        """Return the study's model with its sampling and end tokens; another model that is loaded is released first."""
        held, whole = self._study, study.model.finite or study.model.engine is not None
        # A finite-state model holds the study's systems, an engine's model its actions: both need an equal study.
        other = held is None or held.model != study.model or held.own_weights != study.own_weights
        model = None if other or (whole and held != study) else self._model
        made = model is None
        if model is None:
            self._model = None  # released before another is loaded
            model = self._made(study)
        if not isinstance(model, FiniteModel | EngineModel) and (made or held != study):
            model = model.ending(text_ends(study).tokens)
        if not isinstance(model, FiniteModel) and model.sampling != study.sampling:
            model = replace(model, sampling=study.sampling)
        self._model, self._study = model, study
        return model

    def _made(self, study: Study) -> LoadedModel | FiniteModel | EngineModel:
        if study.model.engine is not None:
            engine = engine_model(study)
            engine.load(self._say)
            return engine
        if study.model.finite:
            return finite_model(study)
        from kvdrift.generator.transformer.other_weights.model import load_transformer  # noqa: PLC0415 - remaining work is shown without a model

        model = load_transformer(study, self._say)
        for loaded in model.models:
            loaded.steps.say = self._say
            if notice := slower(loaded.network, loaded.device):
                self._say(notice)
        give_back_memory()  # which reading the weights and proving the model took
        return model


Given = TypeVar("Given")
Made = TypeVar("Made")

_COUNT = 2
_MUCH = 1 << 14  # pairs times positions: some 4 s of a small model, about the time that a process takes to start

_local: LocalGenerator | None = None  # set in a side process


class SideBySideGenerator:
    """Generation on this machine: large amounts of work of a small model in side processes, other work in this process.

    ``local`` generates in this process; ``sides`` are the side processes, each with the model, or None without any.
    """

    def __init__(self, local: LocalGenerator) -> None:
        self._local = local
        self.sides: OwnProcesses | None = None

    def __call__(self, study: Study, work: Work) -> Generator[list[Unit], None, None]:
        """Yield the units of each document, in any order."""
        self.get_ready(study, work)
        pairs = self._pairs_at_once(study)
        if self.sides is None or not pairs:
            yield from self._local(study, work)
            return
        whole, here = False, partial(self._local.generate_part, study)
        there = partial(_generate, study)
        try:
            for documents in work_beside(self.sides, list(together(pairs, work, _COUNT)), there, here, named):
                yield from documents
            whole = True
        finally:
            if not whole:
                self.close()

    def get_ready(self, study: Study, work: Work) -> None:
        """Start the side processes, which take seconds to load the model, if there is much work of a small model."""
        pairs = sum(unit.count for _, units in work for unit in units)
        is_much = pairs * study.study.horizon >= _MUCH
        if self.sides is None and len(os.sched_getaffinity(0)) > 1 and is_much and _is_small(study):
            self.sides = OwnProcesses(_COUNT, _load, study)
            for _ in range(_COUNT):
                self.sides.submit(_pairs_at_once, study)

    def close(self) -> None:
        """End the side processes, if there are any."""
        if self.sides is not None:
            self.sides.kill()
            self.sides = None

    def _pairs_at_once(self, study: Study) -> int:
        """Return how many pairs a side process decodes at once; 0 without side processes."""
        if self.sides is None:
            return 0
        try:
            return self.sides.submit(_pairs_at_once, study).result()
        except BrokenProcessPool:
            self.close()
            return 0


def work_beside(
    sides: OwnProcesses,
    parts: Sequence[Given],
    there: Callable[..., Made],
    here: Callable[[Given], Made],
    sent: Callable[[Given], object] = lambda part: part,
) -> Generator[Made, None, None]:
    """Do parts of some work in side processes, which are ended if the work ends early; yield results in any order.

    ``there`` is called in a side process with what ``sent`` returns for a part. ``here`` is called in this process with
    each part that no side process did, because the process was killed or failed unexpectedly.

    Raises:
        KvdriftError: A process raised it.
    """
    whole = False
    try:
        left, waiting = [], {}
        for part in parts:
            try:
                waiting[sides.submit(there, sent(part))] = part
            except BrokenProcessPool:
                left.append(part)
        for done in as_completed(waiting):
            error = done.exception()
            if isinstance(error, KvdriftError):
                raise error
            if error is None:
                yield done.result()
            else:
                left.append(waiting[done])
        yield from map(here, left)
        whole = True
    finally:
        if not whole:
            sides.kill()


def _load(study: Study) -> None:
    """Load the study's model in a side process; errors are raised later, when the model is used."""
    global _local  # noqa: PLW0603 - one to a process
    _local = LocalGenerator()
    torch_threads(1).__enter__()
    with suppress(KvdriftError):
        _local.model(study)


def _pairs_at_once(study: Study) -> int:
    return _in_this_process().model(study).pairs_at_once


def _generate(study: Study, part: NamedPart) -> list[list[Unit]]:
    """Generate a part in a side process; return the units of each document. Errors are raised as errors of kvdrift."""
    try:
        return _in_this_process().generate_part(study, with_actions(study, part))
    except KvdriftError:
        raise
    except Exception as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise OperationError(f"generation failed: {line}") from error


def _in_this_process() -> LocalGenerator:
    assert _local is not None  # noqa: S101 - loaded before any work
    return _local


def _is_small(study: Study) -> bool:
    """Return whether side processes can take a study's model: it computes on the CPU, best with one thread.

    Weight files say too little: those of a GGUF file have 4 bits a number, and 32 in memory.
    """
    model = study.model
    if model.kind == FINITE_STATE or model.engine is not None or model.device != "cpu":
        return False
    footprints = [local_footprint(model_location(model), model.dtype, model.revision)]
    footprints += [local_footprint(weights_location(study, action), model.dtype) for action in with_own_weights(study)]
    parameters = [0 if side is None else side.weight_bytes // side.shape.item_bytes for side in footprints]
    return all(parameters) and sum(parameters) < ONE_THREAD_PARAMETERS
