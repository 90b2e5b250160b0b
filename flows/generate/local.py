"""Generation on this machine, with one model in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from flows.generate.named_work import Part
from flows.generate.pending import Work
from flows.generate.side_processes import SideProcess, SideProcesses, work_beside
from generator.actions import Action
from generator.engines.model import EngineModel
from generator.finite.model import FiniteModel, finite_model
from generator.generation import generate_documents, generate_together, together
from generator.generation.engine_models import engine_model
from generator.generation.model import Model
from generator.identity import ActionIdentity
from generator.transformer.fingerprints import model_identity
from generator.transformer.fused.faults import slower
from generator.transformer.local_folders import model_folder, model_location, weight_files
from log.store import Unit
from schema.progress import SILENT
from schema.study import FINITE_STATE, ModelSection, Study

if TYPE_CHECKING:
    from generator.transformer.model import LoadedModel

_MUCH = 1 << 14  # pairs by positions: some 4 s of a small model, about what a process takes to start
_SMALL = 100 << 20  # bytes of weights


class LocalGenerator:
    """Generates on this machine, with one model in memory at a time: much work of a small model in two processes.

    Args:
        say: Is told in a line what generation does without.

    Attributes:
        sides: The processes beside this one, where there are some; then the model is theirs alone.

    """

    def __init__(self, say: Callable[[str], None] = SILENT.say) -> None:
        self._say = say
        self._study: Study | None = None  # whose model is held
        self._model: LoadedModel | FiniteModel | EngineModel | None = None
        self.sides: SideProcesses | None = None

    def __call__(self, study: Study, work: Work) -> Generator[list[Unit], None, None]:
        """Yield the units of each document, in any order."""
        self.get_ready(study, work)
        if (pairs := self._pairs_beside(study)) and self.sides is not None:
            yield from self._generate_beside(self.sides, study, list(together(pairs, work, 2)))
        else:
            yield from generate_documents(self.model(study), study.name, work, study.study.horizon, study.study.seed)

    def get_ready(self, study: Study, work: Work) -> None:
        """Start two more processes, which takes some seconds, where so much work of a small model is to come."""
        alone = self.sides is None and len(os.sched_getaffinity(0)) > 1
        if alone and _is_much(work, study) and _is_small(study):
            self.sides = SideProcesses(study)

    def _pairs_beside(self, study: Study) -> int:
        """How many pairs the processes beside this one decode at once; 0 where there are none, or none any more."""
        if self.sides is None:
            return 0
        try:
            return self.sides.all[0].pairs_at_once(study)
        except (EOFError, OSError):
            self.close()
            return 0

    def _generate_beside(
        self, sides: SideProcesses, study: Study, parts: Sequence[Part]
    ) -> Generator[list[Unit], None, None]:
        def there(side: SideProcess, part: Part) -> list[list[Unit]]:
            return side.generate(study, part)

        whole = False
        try:
            for documents in work_beside(sides, parts, there, partial(self.generate_part, study)):
                yield from documents
            whole = True
        finally:
            if not whole:
                self.sides = None

    def generate_part(self, study: Study, part: Part) -> list[list[Unit]]:
        """Generate a part of the work in this thread."""
        return generate_together(self.model(study), study.name, part, study.study.horizon, study.study.seed)

    def close(self) -> None:
        """End the processes beside this one, if there are some."""
        if self.sides is not None:
            self.sides.close()
            self.sides = None

    def identify(self, study: Study, *, required: bool) -> Callable[[Action], ActionIdentity]:
        """Return what makes the units of the study's actions; a model is loaded only if it is to be downloaded first.

        Raises:
            InputError: a file cannot be read, or the model cannot be loaded.

        """
        if study.model.kind == FINITE_STATE:
            return finite_model(study).identity
        if study.model.engine is not None:
            return engine_model(study).identity
        files = model_identity(model_location(study.model), study.model.revision)
        if required and files.weights_sha256 is None:
            return self.model(study).identity
        return lambda action: files.of(action.parts)

    def model(self, study: Study) -> Model:
        """Return the study's model with its law, loaded where another one is held or none; that one is released before.

        Raises:
            InputError: the model cannot be loaded.

        """
        held, whole = self._study, study.model.finite or study.model.engine is not None
        # The documents of a study of systems are its systems, and the actions of one with an engine its sides.
        if self._model is None or held is None or held.model != study.model or (whole and held != study):
            self._model = None
            self._model, self._study = self._made(study), study
        model = self._model
        if not isinstance(model, FiniteModel) and model.law != study.law:
            self._model = model = replace(model, law=study.law)
        return model

    def _made(self, study: Study) -> LoadedModel | FiniteModel | EngineModel:
        if study.model.engine is not None:
            return engine_model(study)
        return finite_model(study) if study.model.finite else self._loaded(study.model)

    def _loaded(self, section: ModelSection) -> LoadedModel:
        model = load_transformer(section)
        if notice := slower(model.network, model.device):
            self._say(notice)
        return model


def _is_much(work: Work, study: Study) -> bool:
    return sum(unit.count for _, units in work for unit in units) * study.study.horizon >= _MUCH


def _is_small(study: Study) -> bool:
    """Whether the model may be one of those that decode in one thread; it is not loaded for that."""
    model = study.model
    if model.kind == FINITE_STATE or model.engine is not None or model.device != "cpu":
        return False
    folder = model_folder(model_location(model), model.revision)
    return folder is not None and sum(file.stat().st_size for file in weight_files(folder)) < _SMALL


def load_transformer(section: ModelSection) -> LoadedModel:
    """Load the model of a study file's ``[model]``."""
    from generator.transformer.loading import load_model  # noqa: PLC0415 - what is left to do shows without a model

    return load_model(
        model_location(section),
        name=section.id,
        device=section.device,
        dtype=section.dtype,
        revision=section.revision,
        device_map=section.device_map,
        logits_dtype=section.logits_dtype,
    )
