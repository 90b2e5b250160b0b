"""Generation in this process, with one model in memory, and work in the form in which another process receives it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import TYPE_CHECKING

from kvdrift.generator.actions import Action, build_actions
from kvdrift.generator.engines.model import EngineModel
from kvdrift.generator.engines.registry import engine_model
from kvdrift.generator.finite.model import FiniteModel, finite_model
from kvdrift.generator.generation import PendingUnit, StudyLaw, Work, generate_documents, generate_together
from kvdrift.generator.generation.model import Model
from kvdrift.generator.identity import ActionIdentity
from kvdrift.generator.transformer.files.text_ends import model_files, text_ends
from kvdrift.generator.transformer.fused.layers import slower
from kvdrift.generator.transformer.other_weights.named import identities
from kvdrift.log.store import Unit
from kvdrift.schema.document import Document
from kvdrift.schema.progress import SILENT
from kvdrift.schema.study import FINITE_STATE, Study

if TYPE_CHECKING:
    from kvdrift.generator.transformer.loading import LoadedModel
    from kvdrift.generator.transformer.other_weights.model import ModelWithOthers

NamedPart = list[tuple[Document, list[tuple[str, int, int, str, int, StudyLaw | None]]]]
"""Documents, each with its pending units, whose actions are names."""


def named(part: Work) -> NamedPart:
    """Replace the actions of some work by their names."""
    return [
        (
            document,
            [(unit.action.name, unit.first, unit.count, unit.estimator, unit.revision, unit.of) for unit in units],
        )
        for document, units in part
    ]


def with_actions(study: Study, part: NamedPart) -> Work:
    """Rebuild the actions that work names, from the study and the modules beside its file."""
    actions = {action.name: action for action in build_actions(study)}
    return [
        (
            document,
            [
                PendingUnit(actions[name], first, count, estimator, revision, of)
                for name, first, count, estimator, revision, of in units
            ],
        )
        for document, units in part
    ]


class LocalGenerator:
    """Generation in this process, with one model in memory at a time.

    ``say`` receives a line about anything that generation must do without, and about a model that is proven.
    """

    def __init__(self, say: Callable[[str], None] = SILENT.say) -> None:
        self._say = say
        self._study: Study | None = None  # the study whose model is loaded
        self._model: LoadedModel | ModelWithOthers | FiniteModel | EngineModel | None = None

    def __call__(self, study: Study, work: Work) -> Generator[list[Unit], None, None]:
        """Yield the units of each document, in any order."""
        yield from generate_documents(self.model(study), study.name, work, study.study.horizon, study.study.seed)

    def generate_part(self, study: Study, part: Work) -> list[list[Unit]]:
        """Generate a part of the work in this thread."""
        return generate_together(self.model(study), study.name, part, study.study.horizon, study.study.seed)

    def identify(self, study: Study, *, required: bool) -> Callable[[Action], ActionIdentity]:
        """Return the identity of the study's actions; a model is loaded only if it must be downloaded first."""
        if study.model.kind == FINITE_STATE:
            return finite_model(study).identity
        if study.model.engine is not None:
            return engine_model(study).identity
        identity = identities(study, model_files(study))
        unknown = any(None in (own.weights_sha256, own.selector_sha256) for own in map(identity, build_actions(study)))
        return self.model(study).identity if required and unknown else identity

    def model(self, study: Study) -> Model:
        """Return the study's model with its law and its ends of texts; load it in place of another that is loaded."""
        held, whole = self._study, study.model.finite or study.model.engine is not None
        # The documents of a study of systems are its systems; the actions of a study with an engine are its sides.
        other = held is None or held.model != study.model or held.own_weights != study.own_weights
        model = None if other or (whole and held != study) else self._model
        made = model is None
        if model is None:
            self._model = None  # released before another is loaded
            model = self._made(study)
        if not isinstance(model, FiniteModel | EngineModel) and (made or held != study):
            model = model.ending(text_ends(study).tokens)
        if not isinstance(model, FiniteModel) and model.law != study.law:
            model = replace(model, law=study.law)
        self._model, self._study = model, study
        return model

    def _made(self, study: Study) -> LoadedModel | ModelWithOthers | FiniteModel | EngineModel:
        if study.model.engine is not None:
            return engine_model(study)
        return finite_model(study) if study.model.finite else self._loaded(study)

    def _loaded(self, study: Study) -> LoadedModel | ModelWithOthers:
        from kvdrift.generator.transformer.other_weights.model import load_transformer  # noqa: PLC0415 - what is left to do shows without a model

        model = load_transformer(study, self._say)
        for one in model.models:
            one.steps.say = self._say
            if notice := slower(one.network, one.device):
                self._say(notice)
        return model
